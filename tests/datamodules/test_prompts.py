from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lit_dlm.datamodules import PromptDataModule
from lit_dlm.datamodules.prompts import PromptMix
from lit_dlm.decoding import ConfidencePolicy, Decoder, RandomPolicy, Sampler
from lit_dlm.modules import DecodeModule
from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import PromptExample, Task
from tests.fakes import TableBackbone, logits_for
from tests.reports.rows import row
from tests.trajectories.samples import random_record, write_shards


class Letters(Task):
    """Seven problems; the prompt is one letter."""

    name = "letters"
    split = "test"
    runs_code = False

    def examples(self) -> list[PromptExample]:
        return [
            PromptExample(uid=f"letters/test/{n}", task=self.name, text="abcdefg"[n])
            for n in range(7)
        ]

    def reference_completion(self, example):
        return example.text

    def extract(self, example, completion):
        return completion

    def grade(self, example, completion):
        raise AssertionError("not graded here")


@dataclass
class ByteTokenizer:
    """Byte ids plus 10; the template adds a turn marker."""

    calls: list[str] = field(default_factory=list)

    def apply_chat_template(self, turns, *, add_generation_prompt: bool, return_dict: bool):
        assert add_generation_prompt
        assert not return_dict
        (turn,) = turns
        self.calls.append(turn["content"])
        return [7, *(10 + byte for byte in turn["content"].encode())]


def _module() -> DecodeModule:
    module = DecodeModule(
        TableBackbone(logits_for([4], [0.9])),
        tokenizer="none",
        decoders={
            "one": Decoder(policy=ConfidencePolicy()),
            "two": Decoder(policy=RandomPolicy()),
        },
    )
    module.__dict__["tokenizer"] = ByteTokenizer()
    return module


def _work(data: PromptDataModule, *, rank: int = 0, world: int = 1) -> list[tuple[str, str]]:
    data.trainer = SimpleNamespace(
        lightning_module=_module(),
        global_rank=rank,
        world_size=world,
        is_global_zero=rank == 0,
        strategy=SimpleNamespace(barrier=lambda name: None),
    )
    data.setup("predict")
    return [
        (stream.method, example.uid) for stream in data.streams() for example in stream.examples
    ]


def test_each_method_sees_each_example_once_and_in_order():
    work = _work(PromptDataModule([Letters()], batch_size=3))
    assert work == [(m, f"letters/test/{n}") for m in ("one", "two") for n in range(7)]


class _Learned(RandomPolicy):
    """A policy that was trained on some tasks."""

    def __init__(self, tasks: list[str]) -> None:
        self.tasks = tasks

    @property
    def trained_on(self) -> list[str]:
        return self.tasks


def test_a_policy_that_never_saw_the_task_is_named(caplog: pytest.LogCaptureFixture):
    for task, count in (("letters", 0), ("sudoku", 1)):
        caplog.clear()
        data = PromptDataModule([Letters()], methods=["two"])
        data.trainer = SimpleNamespace(lightning_module=_module())
        decoders = data.trainer.lightning_module.decoders
        decoders["two"] = Decoder(policy=_Learned([task]))
        with pytest.raises(AttributeError):  # this trainer has nothing else
            data.setup("predict")
        found = [r.getMessage() for r in caplog.records if "never saw letters" in r.getMessage()]
        assert len(found) == count
        assert all(text.startswith("two: its policy was trained on sudoku") for text in found)


def test_a_task_without_examples_is_refused():
    class Nothing(Letters):
        def examples(self) -> list[PromptExample]:
            return []

    with pytest.raises(ValueError, match="tasks: letters has no examples"):
        _work(PromptDataModule([Nothing()]))


@pytest.mark.parametrize("world", [2, 3])
def test_all_processes_list_the_same_work(world: int):
    """What each of them does of it is decided as they have room."""
    whole = _work(PromptDataModule([Letters()]))
    for rank in range(world):
        assert _work(PromptDataModule([Letters()]), rank=rank, world=world) == whole


def test_further_responses_have_names_of_their_own_and_the_first_keeps_its():
    work = _work(PromptDataModule([Letters()], responses_per_prompt=3, methods=["two"]))
    assert [uid for _, uid in work] == [
        f"letters/test/{n}{suffix}" for n in range(7) for suffix in ("", "#1", "#2")
    ]


def test_more_responses_go_on_from_fewer(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    done = [f"letters/test/{n}" for n in range(7)] + ["letters/test/2#1"]
    folder.append([row(uid, task="letters", method="two") for uid in done])
    data = PromptDataModule(
        [Letters()], methods=["two"], results_dir=str(tmp_path), responses_per_prompt=2
    )
    assert [uid for _, uid in _work(data)] == [f"letters/test/{n}#1" for n in (0, 1, 3, 4, 5, 6)]


def test_responses_of_a_prompt_share_method_and_length():
    data = PromptDataModule(
        [Letters()],
        assignment="one",
        response_length=[3, 4, 5],
        responses_per_prompt=4,
    )
    of_prompt: dict[str, set[tuple[str, int]]] = {}
    _work(data)
    for stream in data.streams():
        for example in stream.examples:
            found = of_prompt.setdefault(example.prompt_uid, set())
            found.add((stream.method, stream.response_length))
    assert len(of_prompt) == 7
    assert all(len(found) == 1 for found in of_prompt.values())
    assert len(set.union(*of_prompt.values())) > 2


def test_a_method_that_draws_nothing_gives_one_response():
    """``one`` takes the most probable tokens in the order of confidence."""
    work = _work(PromptDataModule([Letters()], responses_per_prompt=2))
    assert [uid for method, uid in work if method == "one"] == [
        f"letters/test/{n}" for n in range(7)
    ]
    assert sum(method == "two" for method, _ in work) == 14
    assert not Decoder(policy=ConfidencePolicy()).draws
    assert Decoder(policy=ConfidencePolicy(), sampler=Sampler(temperature=0.1)).draws


def test_finished_samples_are_left_out_whoever_finished_them(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row(f"letters/test/{n}", task="letters", method="one") for n in (0, 3)], rank=4)
    work = _work(PromptDataModule([Letters()], results_dir=str(tmp_path)), rank=1, world=2)
    left = [uid for method, uid in work if method == "one"]
    assert left == [f"letters/test/{n}" for n in (1, 2, 4, 5, 6)]
    assert sum(method == "two" for method, _ in work) == 7


def test_a_sample_is_done_only_when_both_folders_hold_it(tmp_path: Path):
    """Rows 0, 1 and 2 are on disk; records 1, 2 and 3 are: 1 and 2 are done."""
    ResultFolder(tmp_path / "results").append(
        [row(f"letters/test/{n}", task="letters", method="one") for n in (0, 1, 2)]
    )
    records = [random_record(np.random.default_rng(n), f"letters/test/{n}@one") for n in (1, 2, 3)]
    write_shards(tmp_path / "trajectories", records)
    work = _work(
        PromptDataModule(
            [Letters()],
            methods=["one"],
            results_dir=str(tmp_path / "results"),
            trajectories_dir=str(tmp_path / "trajectories"),
        )
    )
    assert [uid for _, uid in work] == [f"letters/test/{n}" for n in (0, 3, 4, 5, 6)]


def test_one_method_per_example_covers_all_examples_and_uses_both():
    work = _work(PromptDataModule([Letters()], assignment="one"))
    assert sorted(uid for _, uid in work) == [f"letters/test/{n}" for n in range(7)]
    assert {method for method, _ in work} == {"one", "two"}


def test_prompts_are_encoded_with_the_template():
    data = PromptDataModule([Letters()], methods=["two"])
    _work(data)
    (stream,) = data.streams()
    assert stream.encode(stream.examples[1]) == [7, 10 + ord("b")]


def test_long_prompts_come_first():
    class Words(Letters):
        def examples(self) -> list[PromptExample]:
            return [
                replace(one, text=one.text * (1 + n % 3))
                for n, one in enumerate(super().examples())
            ]

    work = _work(PromptDataModule([Words()], methods=["one"]))
    assert [uid[-1] for _, uid in work] == [*"25", *"14", *"036"]


@pytest.mark.parametrize(("batch_size", "sizes"), [(3, [3, 3, 1]), (7, [7]), (50, [7])])
def test_a_loader_gives_as_many_batches_as_it_says(batch_size: int, sizes: list[int]):
    """``one`` commits a token a step, so that rows of a batch end together."""
    data = PromptDataModule([Letters()], methods=["one"], batch_size=batch_size, response_length=1)
    _work(data)
    module = data.trainer.lightning_module
    module.backbone = TableBackbone(logits_for([4, 4, 4], [0.9] * 3))
    module.tokenizer.decode = lambda ids, **_: ""
    (loader,) = data.predict_dataloader()
    found = [module.predict_step(stream) for stream in loader]
    assert [len(one.examples) for one in found] == sizes
    assert len(loader) == len(sizes)
    assert [e.uid for one in found for e in one.examples] == [e.uid for e in Letters().examples()]


def test_first_batches_do_not_depend_on_what_is_done(tmp_path: Path):
    ResultFolder(tmp_path).append([row("letters/test/0", task="letters", method="one")])
    data = PromptDataModule([Letters()], results_dir=str(tmp_path), batch_size=2)
    _work(data)
    uids = [e.uid for batch in data.first_batches(3, "one") for e in batch.examples]
    assert uids == [f"letters/test/{n}" for n in range(3)]


def test_a_prompt_that_is_too_long_is_named():
    data = PromptDataModule([Letters()], max_prompt_length=1)
    _work(data)
    stream = data.streams()[0]
    with pytest.raises(ValueError, match=r"letters/test/0: the prompt has 2 tokens, .* = 1"):
        stream.encode(stream.examples[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "tasks: expected at least one"),
        ({"tasks": [Letters(), Letters()]}, "different names, got 'letters' twice"),
        ({"tasks": [Letters()], "batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PromptDataModule(**options)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="expected some of one, two, got three"):
        _work(PromptDataModule([Letters()], methods=["three"]))


def test_each_prompt_keeps_its_own_of_several_lengths() -> None:
    """Batches hold one length; both lengths occur, and every method sees the same one."""
    data = PromptDataModule([Letters()], response_length=[4, 9], batch_size=3)
    _work(data)
    lengths: dict[str, set[int]] = {}
    for stream in data.streams():
        for example in stream.examples:
            lengths.setdefault(example.uid, set()).add(stream.response_length)
    assert len(lengths) == 7
    assert all(len(found) == 1 for found in lengths.values())
    assert set.union(*lengths.values()) == {4, 9}


def test_a_mix_takes_its_number_of_prompts() -> None:
    data = PromptDataModule([Letters()], mix=PromptMix(total=3, weights={"letters": 1.0}))
    assert len({uid for _, uid in _work(data)}) == 3


def test_lengths_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"response_length: expected at least 1, got \[\]"):
        PromptDataModule([Letters()], response_length=[])
