"""Which prompts are decoded by which method, how many of them, and in which order."""

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_dlm import DecodeModule
from lit_dlm.backbones import load_backbone
from lit_dlm.datamodules import PromptDataModule
from lit_dlm.datamodules.prompts import PromptMix, drawn_length, largest_remainder
from lit_dlm.decoding import (
    ConfidencePolicy,
    Decoder,
    NoisyConfidencePolicy,
    RandomPolicy,
    Sampler,
)
from lit_dlm.tasks import PromptExample
from lit_dlm.tasks.gsm8k import GSM8K
from tests.callbacks.letters import Letters, trace_module
from tests.fakes import TableBackbone, logits_for
from tests.finetuning.runs import quiet
from tests.processes import ROOT
from tests.shared_data import shared

SEVEN = [f"letters/test/{n}" for n in range(7)]


def work(data: PromptDataModule, module: DecodeModule | None = None) -> list[tuple[str, str]]:
    """Method and uid of every decode, in order."""
    data.trainer = SimpleNamespace(lightning_module=module or trace_module(capture=False))
    data.setup("predict")
    return [
        (stream.method, example.uid) for stream in data.streams() for example in stream.examples
    ]


def data(**options: object) -> PromptDataModule:
    return PromptDataModule(**{"tasks": [Letters(7)], **options})  # type: ignore[arg-type]


def test_each_method_sees_each_example_once_and_in_order():
    prompts = data(batch_size=3)
    assert work(prompts) == [(m, uid) for m in ("confidence", "random") for uid in SEVEN]
    stream = prompts.streams()[0]
    assert stream.encode(stream.examples[1]) == [7, 10 + ord("b")]  # with the template


def test_what_is_done_is_left_out():
    prompts = data(methods=["random"], responses_per_prompt=2)
    prompts.done = {
        *(f"{uid}@random" for uid in SEVEN),
        f"{SEVEN[2]}#1@random",
        f"{SEVEN[3]}#1@confidence",
    }
    assert [uid for _, uid in work(prompts)] == [f"letters/test/{n}#1" for n in (0, 1, 3, 4, 5, 6)]
    assert len(prompts.wanted) == 14
    uids = [e.uid for batch in prompts.first_batches(3, "confidence") for e in batch.examples]
    assert uids == SEVEN[:3]  # whatever is done


def test_a_policy_that_never_saw_the_task_is_named(caplog: pytest.LogCaptureFixture):
    module = trace_module(capture=False)
    for task in ("letters", "sudoku"):
        learned = type("Learned", (RandomPolicy,), {"trained_on": [task]})
        module.decoders["random"] = Decoder(policy=learned())
        work(data(methods=["random"]), module)
    (told,) = [message for message in caplog.messages if "never saw letters" in message]
    assert told.startswith("random: its policy was trained on sudoku")


def test_responses_of_a_prompt_share_method_and_length_and_have_names_of_their_own():
    """With one method each, all examples are covered and both are used."""
    prompts = data(assignment="confidence", response_length=[3, 4, 5], responses_per_prompt=3)
    module = trace_module(capture=False)
    module.decoders["confidence"] = Decoder(policy=RandomPolicy())
    uids = [uid for _, uid in work(prompts, module)]
    assert sorted(uids) == sorted(f"{uid}{end}" for uid in SEVEN for end in ("", "#1", "#2"))
    of_prompt: dict[str, set[tuple[str, int]]] = {}
    for stream in prompts.streams():
        for example in stream.examples:
            found = of_prompt.setdefault(example.prompt_uid, set())
            found.add((stream.method, stream.response_length))
    assert all(len(found) == 1 for found in of_prompt.values())
    assert len(set.union(*of_prompt.values())) > 2
    assert {method for ((method, _),) in of_prompt.values()} == {"confidence", "random"}


def test_a_method_that_draws_nothing_gives_one_response():
    """``confidence`` takes the most probable tokens in the order of confidence."""
    found = work(data(responses_per_prompt=2))
    assert [uid for method, uid in found if method == "confidence"] == SEVEN
    assert len(found) == 7 + 14
    assert not Decoder(policy=ConfidencePolicy()).draws
    assert Decoder(policy=ConfidencePolicy(), sampler=Sampler(temperature=0.1)).draws
    noisy = [NoisyConfidencePolicy(4, temperature) for temperature in (0.0, 1.0)]
    assert [Decoder(policy=policy).draws for policy in noisy] == [False, True]


class Words(Letters):
    """One to three letters, the second prompt having two."""

    def examples(self) -> list[PromptExample]:
        given = super().examples()
        return [replace(one, text=one.text * (1 + n % 3)) for n, one in enumerate(given)]


def test_long_prompts_come_first():
    found = work(data(tasks=[Words(7)], methods=["confidence", "confidence"]))  # decoded once
    assert [uid[-1] for _, uid in found] == [*"25", *"14", *"036"]


def test_prompts_that_do_not_fit_are_refused_or_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
):
    """With the template they have 2, 3 and 4 tokens in turn; 8 of 11 positions are a response's."""
    module, options = trace_module(capture=False), {"tasks": [Words(7)], "response_length": 8}
    module.backbone.max_positions = 11
    with pytest.raises(ValueError, match=r"^overlong: 2 of 7 prompts of letters are too long; "):
        work(data(**options), module)
    for more, kept in (({}, "1403 6"), ({"max_prompt_length": 2}, "0 3 6")):
        prompts = data(**options, **more, overlong="skip", methods=["random"])
        uids = [f"letters/test/{number}" for number in kept.replace(" ", "")]
        assert sorted(uid for _, uid in work(prompts, module)) == sorted(uids)
        assert prompts.skipped == {"letters": 7 - len(uids)}
        assert len(prompts.wanted) == len(uids)
        first = [e.uid for batch in prompts.first_batches(2, "random") for e in batch.examples]
        assert first == sorted(uids)[:2]
    assert "left out: 4 of 7 prompts of letters are too long; letters/test/5 exc" in caplog.text
    mixed = data(**options, overlong="skip", mix=PromptMix(total=7, weights={"letters": 1.0}))
    assert len(work(mixed, module)) == 2 * 5


def test_as_many_of_gsm8k_do_not_fit_the_embedded_model_as_the_page_says():
    task = GSM8K(str(shared("gsm8k", "test.jsonl.gz")), split="test")
    decoders = {"confidence": Decoder(policy=ConfidencePolicy())}
    module = DecodeModule(load_backbone("tiny"), tokenizer="tiny", decoders=decoders)
    with pytest.raises(ValueError, match="gsm8k/test/01077 exceeds the 256 tokens that") as error:
        work(PromptDataModule([task]), module)
    found, total = re.match(r"overlong: (\d+) of (\d+)", str(error.value)).groups()
    page = (ROOT / "docs" / "how-to" / "benchmark.md").read_text()
    assert f"{found} of the {int(total):,} problems do not fit beside a" in " ".join(page.split())


@pytest.mark.parametrize(("batch_size", "sizes"), [(3, [3, 3, 1]), (7, [7]), (50, [7])])
def test_a_loader_gives_as_many_batches_as_it_says(batch_size: int, sizes: list[int]):
    """``confidence`` commits a token a step, so that rows of a batch end together."""
    prompts = data(methods=["confidence"], batch_size=batch_size, response_length=1)
    work(prompts)
    module = prompts.trainer.lightning_module
    module.backbone = TableBackbone(logits_for([4, 4, 4], [0.9] * 3))
    module.trainer = trainer = quiet(Path())
    assert not trainer.callbacks
    (loader,) = prompts.predict_dataloader()
    found = [module.predict_step(stream) for stream in loader]
    assert [len(one.examples) for one in found] == sizes
    assert len(loader) == len(sizes)
    assert [e.uid for one in found for e in one.examples] == SEVEN


@pytest.mark.parametrize(("length", "rows"), [(32, 256), (256, 32), ([64, 1024], 8), (10_000, 1)])
def test_a_batch_has_8192_cells_unless_its_size_is_given(length: int | list[int], rows: int):
    prompts = data(response_length=length, methods=["random"])
    work(prompts)
    assert {stream.batch_size for stream in prompts.streams()} == {rows}
    assert data(response_length=length, batch_size=3).rows == 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tasks": []}, "tasks"),
        ({"tasks": [Letters(7), Letters(7)]}, "letters"),
        ({"tasks": [Letters(0)]}, "tasks: examples of letters"),
        ({"batch_size": 0}, "batch_size"),
        ({"response_length": []}, "response_length"),
        ({"methods": ["three"]}, "methods"),
        ({"max_prompt_length": 1}, "overlong: 7 of 7 .*letters/test/6 exceeds max_prompt_.* by 1;"),
        (
            {"max_prompt_length": 1, "overlong": "skip"},
            "overlong: prompts left of letters: .* got 0",
        ),
        ({"mix": {"total": 0, "weights": {"letters": 1}}}, r"mix\.total"),
        ({"mix": {"total": 1, "weights": {"letters": 0}}}, r"mix\.weights\.letters"),
        ({"mix": {"total": 1, "weights": {"other": 1}}}, r"mix\.weights"),
        ({"mix": {"total": 9, "weights": {"letters": 1}}}, r"mix\.total: examples of letters"),
    ],
)
def test_bad_settings_are_named(options: dict, name: str):
    with pytest.raises(ValueError, match=name):  # noqa: PT012
        mix = {"mix": PromptMix(**options["mix"])} if "mix" in options else {}
        work(data(**options | mix))


def test_lengths_are_drawn_by_prompt_and_evenly() -> None:
    uids = [f"gsm8k/train/{n:05d}" for n in range(600)]
    drawn = [drawn_length([128, 256], uid, seed=0) for uid in uids]
    assert drawn == [drawn_length([128, 256], uid, seed=0) for uid in uids]
    assert Counter(drawn)[128] == pytest.approx(300, abs=60)
    assert drawn != [drawn_length([128, 256], uid, seed=1) for uid in uids]


RELEASE = {"gsm8k": 0.2, "kodcode": 0.2, "alpaca": 0.4}


def pool(task: str, count: int) -> list[PromptExample]:
    return [PromptExample(uid=f"{task}/train/{n:05d}", task=task, text="x") for n in range(count)]


def test_left_overs_go_to_the_largest_remainders() -> None:
    """10 by 1 : 1 : 1 is 3.33 each (the first takes the rest), 7 by these 3.5, 2.1, 1.4."""
    assert largest_remainder(7000, list(RELEASE.values())) == [1750, 1750, 3500]
    assert largest_remainder(10, [1, 1, 1]) == [4, 3, 3]
    assert largest_remainder(7, [0.5, 0.3, 0.2]) == [4, 2, 1]


def test_each_task_gives_its_share_shuffled_by_seed_and_number() -> None:
    """The slow way: ``Random(seed + k)`` over the indices. A data module takes what is chosen."""
    examples = {name: pool(name, 40) for name in RELEASE}
    chosen = PromptMix(total=20, weights=RELEASE, seed=5).chosen(examples)
    for number, (name, count) in enumerate({"gsm8k": 5, "kodcode": 5, "alpaca": 10}.items()):
        order = list(range(40))
        random.Random(5 + number).shuffle(order)
        assert [e.uid for e in chosen[name]] == [f"{name}/train/{n:05d}" for n in order[:count]]
    mix = PromptMix(total=3, weights={"letters": 1.0})
    assert len({uid for _, uid in work(data(mix=mix))}) == 3
