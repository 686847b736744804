import random
from collections import Counter

import pytest

from lit_dlm.datamodules.prompts import PromptMix, drawn_length, largest_remainder
from lit_dlm.tasks import PromptExample

RELEASE = {"gsm8k": 0.2, "kodcode": 0.2, "alpaca": 0.4}


def pool(task: str, count: int) -> list[PromptExample]:
    return [PromptExample(uid=f"{task}/train/{n:05d}", task=task, text="x") for n in range(count)]


def test_shares_of_the_release() -> None:
    """0.25, 0.25 and 0.5 of 7,000 after normalisation."""
    assert largest_remainder(7000, list(RELEASE.values())) == [1750, 1750, 3500]


def test_left_overs_go_to_the_largest_remainders() -> None:
    """10 by 1 : 1 : 1 is 3.33 each (the first takes the rest); 7 by 0.5 : 0.3 : 0.2 is
    3.5, 2.1, 1.4: the half takes it."""
    assert largest_remainder(10, [1, 1, 1]) == [4, 3, 3]
    assert largest_remainder(7, [0.5, 0.3, 0.2]) == [4, 2, 1]


def test_each_task_gives_its_share_of_distinct_examples() -> None:
    examples = {name: pool(name, 40) for name in RELEASE}
    chosen = PromptMix(total=20, weights=RELEASE).chosen(examples)
    assert {name: len(group) for name, group in chosen.items()} == {
        "gsm8k": 5, "kodcode": 5, "alpaca": 10,
    }  # fmt: skip
    assert all(len({e.uid for e in group}) == len(group) for group in chosen.values())
    assert chosen == PromptMix(total=20, weights=RELEASE).chosen(examples)
    assert chosen != PromptMix(total=20, weights=RELEASE, seed=1).chosen(examples)


def test_shuffle_is_seeded_by_the_place_of_the_task() -> None:
    """The slow way: ``Random(seed + k)`` over the indices."""
    examples = {"a": pool("a", 9), "b": pool("b", 9)}
    chosen = PromptMix(total=6, weights={"a": 1, "b": 1}, seed=5).chosen(examples)
    for place, name in enumerate(examples):
        order = list(range(9))
        random.Random(5 + place).shuffle(order)
        assert [e.uid for e in chosen[name]] == [f"{name}/train/{n:05d}" for n in order[:3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": 0, "weights": {"a": 1}}, "mix.total"),
        ({"total": 1, "weights": {"a": 0}}, "mix.weights.a"),
        ({"total": 1, "weights": {"b": 1}}, "expected one for each of a, got b"),
        ({"total": 9, "weights": {"a": 1}}, "'a' has 3 examples, its share is 9"),
    ],
)
def test_bad_mixes_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        PromptMix(**options).chosen({"a": pool("a", 3)})


def test_lengths_are_drawn_by_prompt_and_evenly() -> None:
    uids = [f"gsm8k/train/{n:05d}" for n in range(600)]
    drawn = [drawn_length([128, 256], uid, seed=0) for uid in uids]
    assert drawn == [drawn_length([128, 256], uid, seed=0) for uid in uids]
    assert Counter(drawn)[128] == pytest.approx(300, abs=60)
    assert drawn != [drawn_length([128, 256], uid, seed=1) for uid in uids]
