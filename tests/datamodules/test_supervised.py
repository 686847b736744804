"""Supervised data: every source, filters, overlong samples, splits, and errors that name a row."""

import gzip
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.backbones import BackboneSpec, load_tokenizer
from lit_dlm.datamodules.supervised import SupervisedDataModule, check_decodes, check_learnable
from lit_dlm.datamodules.supervised_sources import (
    ModelFacts,
    RecordedDecodes,
    ResponsesFile,
    ResponsesList,
    TABOMFile,
    TaskReferences,
)
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule, TimeDelay
from lit_dlm.toy import WordProblems
from lit_dlm.training.masking import TraceMasking
from lit_dlm.trajectories.store import merge_manifest
from lit_dlm.trajectories.tools.exchange import tabom_row
from tests.finetuning.runs import EOS, MASK, PAD, Data, G, examples, quiet, small
from tests.traces import VOCAB, recorded, small_backbone, write_shards


def refused(message: str | None) -> Any:
    """Expects an error with a message, or none."""
    return pytest.raises(ValueError, match=message) if message else nullcontext()


@pytest.fixture(scope="module")
def model() -> ModelFacts:
    spec = BackboneSpec(family="tiny", mask_id=MASK, pad_id=PAD, eos_ids=(EOS,))
    return ModelFacts(tokenizer=load_tokenizer("tiny"), spec=spec, vocab_size=VOCAB)


CHAT = {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "5"}]}


def rows(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_references_of_a_task_are_right_answers_behind_the_chat_template(model: ModelFacts) -> None:
    task = WordProblems("train", num_examples=3)
    found = list(TaskReferences([task]).examples(model))
    for example, problem in zip(found, task.examples(), strict=True):
        assert example.uid == problem.uid
        assert example.steps is None
        assert example.response_ids[-1] == EOS
        text = model.tokenizer.decode(example.response_ids[:-1])
        assert task.grade(problem, text).is_correct
        prompt = model.tokenizer.decode(example.prompt_ids)
        assert prompt.startswith("<|user|>")
        assert prompt.endswith("<|assistant|>")


def test_files_may_hold_messages_or_a_prompt_and_a_response(
    tmp_path: Path, model: ModelFacts
) -> None:
    lines = [
        CHAT,
        {"prompt": "2", "response": "5"},
        {"instruction": "2", "input": "", "output": "5"},
        {"question": "2", "answer": "5"},
        {"conversations": [{"from": "human", "value": "2"}, {"from": "gpt", "value": "5"}]},
    ]
    path = Path(rows(tmp_path / "a.jsonl", *lines))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        found = list(ResponsesFile(str(file)).examples(model))
        assert [e.uid for e in found] == [f"a/{n:06d}" for n in range(5)]
        assert model.tokenizer.decode(found[0].response_ids[:-1]) == "5"
        for name in ("prompt_ids", "response_ids"):
            assert len({getattr(one, name).tobytes() for one in found}) == 1
    given = list(ResponsesList(lines).examples(model))
    assert [e.uid for e in given] == [f"rows/{n:06d}" for n in range(5)]
    assert [e.response_ids.tolist() for e in given] == [e.response_ids.tolist() for e in found]
    with pytest.raises(ValueError, match=r"rows\[1\]: .*messages"):
        list(ResponsesList([CHAT, {"prompt": "2"}]).examples(model))


def test_templated_prompts_are_taken_as_they_are_with_their_step_maps(
    tmp_path: Path, model: ModelFacts
) -> None:
    """dLLM-RL's preprocessed files: a JSON list, the end of the answer inside its text.

    The response is three tokens, ``1``, ``2`` and the end. A map from 1 is counted from 0; one
    without the end gives it a step of its own, one of the whole region is cut.
    """
    prompt, response = "<|user|>2+3<|assistant|>", "12<|endoftext|>"
    maps = [[3, 1, 4], [3, 1], [0, 0, 1, 1, 1], None]
    path = tmp_path / "sft.json"
    lines = [{"prompt": prompt, "response": response, "step_map": given} for given in maps]
    path.write_text(json.dumps(lines))
    found = list(ResponsesFile(str(path), templated=True).examples(model))
    plain = rows(tmp_path / "a.jsonl", {"prompt": "2+3", "response": "12"})
    (expected,) = ResponsesFile(plain).examples(model)
    for example in found:
        assert example.prompt_ids.tolist() == expected.prompt_ids.tolist()
        assert example.response_ids.tolist() == expected.response_ids.tolist()
    steps = [None if e.steps is None else e.steps.tolist() for e in found]
    assert steps == [[2, 0, 3], [2, 0, 3], [0, 0, 1], None]
    assert len(expected.response_ids) == 3


def test_recorded_decodes_keep_tokens_and_steps_and_drop_wrong_ones(
    tmp_path: Path, model: ModelFacts
) -> None:
    """They come in one order however they were written; files of TABOM's give the same ones."""
    records = recorded(small_backbone(), 12)
    whole = write_shards(tmp_path / "whole", records)
    for rank in (1, 0):
        write_shards(tmp_path / "dealt", records[rank::2], records_per_block=3, rank=rank)
    listed = rows(tmp_path / "t.jsonl", *(tabom_row(r, model.tokenizer) for r in records))
    right = [record for record in records if record.meta["correct"]]
    for source, expected in (
        (RecordedDecodes(whole), right),
        (RecordedDecodes(tmp_path / "dealt"), right),
        (RecordedDecodes(whole, only_correct=False), records),
        (TABOMFile(listed), records),
    ):
        for example, record in zip(source.examples(model), expected, strict=True):
            assert isinstance(source, TABOMFile) or example.uid == record.uid
            assert example.prompt_ids.tolist() == record.prompt_ids.tolist()
            assert example.response_ids.tolist() == record.tokens.tolist()
            assert example.steps.tolist() == record.commit_step.tolist()
    other = replace(model, spec=replace(model.spec, mask_id=5))
    with pytest.raises(ValueError, match="mask id 2, expected 5"):
        list(RecordedDecodes(whole).examples(other))
    ungraded = write_shards(tmp_path / "ungraded", [replace(records[0], meta={})])
    with pytest.raises(ValueError, match=r"only_correct: record .* was not graded"):
        list(RecordedDecodes(ungraded).examples(model))


def test_recorded_entropies_are_those_of_the_step_that_wrote(
    tmp_path: Path, model: ModelFacts
) -> None:
    """One token a step from the right: at its step, position p is row (2 - p) of the open ones."""
    (record,) = recorded(small_backbone(), 1, response_length=3)
    signals = {"step_entropy": np.array([9, 9, 0.5, 9, 0.25, 0.125], dtype=np.float16)}
    backwards = replace(record, commit_step=np.array([2, 1, 0]), signals=signals)
    shards = write_shards(tmp_path / "shards", [backwards])
    (example,) = RecordedDecodes(shards, only_correct=False).examples(model)
    assert example.decode_entropy.tolist() == [0.125, 0.25, 0.5]


def test_a_source_that_gives_nothing_names_itself_and_its_filters(
    tmp_path: Path, model: ModelFacts
) -> None:
    """Two of five are of the wrong method, the other three are wrong."""
    (record,) = recorded(small_backbone(), 1)
    records = [
        replace(record, uid=f"s/{number}", meta={"method": method, "correct": False})
        for number, method in enumerate(["credit"] * 2 + ["entropy"] * 3)
    ]
    path = rows(tmp_path / "t.jsonl", *(tabom_row(r, model.tokenizer) for r in records))
    shards = write_shards(tmp_path / "shards", records)
    again = replace(record, superseded=np.array([[0, int(record.commit_step.argmax()), 9]]))
    taken_back = write_shards(tmp_path / "back", [again])
    both = TABOMFile(path, methods=["entropy"], only_correct=True)
    for source, message in (
        (TABOMFile(path, methods=["other"]), r"t\.jsonl: .* none of 5: 5 by methods: \['other'\]"),
        (both, r"2 by methods: \['entropy'\], 3 by only_correct"),
        (RecordedDecodes(shards, tasks=["sums"]), r"shards: .* of 5: 5 by tasks: \['sums'\]"),
        (RecordedDecodes(taken_back, only_correct=False), r"back: .* 1: 1 by rewritten tokens"),
        (TABOMFile(rows(tmp_path / "empty.jsonl")), r"empty\.jsonl: .* got an empty source"),
    ):
        with pytest.raises(ValueError, match=message):
            list(source.examples(model))
    source = RecordedDecodes(taken_back, only_correct=False)
    (taken,) = source.examples(replace(model, takes_rewrites=True))
    assert taken.superseded.tolist() == again.superseded.tolist()


def test_release_rows_keep_their_list_their_pads_and_their_filters(
    tmp_path: Path, model: ModelFacts
) -> None:
    given = {"prompt": "2+3", "response_token_ids": [5, 6], "method": "entropy", "correct": True}
    listed = {**given, "decoding_order": [2, 1, 0], "non_ltr_positions": [2]}
    with pytest.raises(ValueError, match=r"t\.jsonl:1"):
        list(TABOMFile(rows(tmp_path / "t.jsonl", given)).examples(model))
    path = rows(tmp_path / "t.jsonl", listed, {**listed, "correct": False})
    first, _ = TABOMFile(path).examples(model)
    assert first.response_ids.tolist() == [5, 6, PAD]
    assert first.steps.tolist() == [2, 1, 0]
    assert first.non_ltr.tolist() == [False, False, True]
    assert [e.uid for e in TABOMFile(path, only_correct=True).examples(model)] == [first.uid]
    (cut,) = read(model, first, response_length=2, max_prompt_length=99)
    assert cut.non_ltr.tolist() == [False, False]


def test_shards_of_a_run_that_did_not_finish_are_taken_with_a_warning(
    tmp_path: Path, model: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    shards = write_shards(tmp_path / "shards", recorded(small_backbone(), 2))
    (shards / "manifest.json").unlink(missing_ok=True)
    for count in (1, 1):  # the second time it has one
        assert len(list(RecordedDecodes(shards, only_correct=False).examples(model))) == 2
        assert caplog.text.count("there is no manifest.json") == count
        merge_manifest(shards)


@pytest.mark.parametrize(
    ("line", "templated", "name"),
    [
        ({"text": "x"}, False, "1.*'messages', 'conversations'"),
        ({"prompt": "<|user|>2<|assistant|>", "response": "x"}, False, r"1.*: true.*<\|user\|>"),
        ({"prompt": "2+3", "response": "12", "step_map": [0]}, False, "1.*3 steps in 'step_map'"),
        ({"prompt": "2", "response": "12", "step_map": [0, -1, 1]}, False, "1.*in 'step_map'"),
        (CHAT, True, "templated"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, model: ModelFacts, line: dict[str, Any], templated: bool, name: str
) -> None:
    source = ResponsesFile(rows(tmp_path / "a.jsonl", line), templated=templated)
    with pytest.raises(ValueError, match=rf"a\.jsonl.*{name}"):
        list(source.examples(model))


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ("<|user|>", "<|user|>"),
        ("{{ '<|user|>' if m.role == 'assistant' else '<|endoftext|>' }}", "<|user|>"),
        ("", "<|endoftext|>"),
        (None, "<|endoftext|>"),
    ],
)
def test_answers_end_as_turns_do(model: ModelFacts, ends: str | None, end: str) -> None:
    """An end of turn is behind the end of text among those of every released family."""
    tokenizer = load_tokenizer("tiny")
    turn = "{% for m in messages %}{{ m.content }}"
    tokenizer.chat_template = None if ends is None else turn + ends + "{% endfor %}"
    ids = tokenizer.get_vocab()
    spec = replace(model.spec, eos_ids=(EOS, ids["<|user|>"]))
    assert replace(model, tokenizer=tokenizer, spec=spec).end_id == ids[end]


class Fixed:
    """A source of given examples."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def examples(self, model: ModelFacts) -> Any:
        return iter(self.given)


def read(model: ModelFacts, *given: Any, **options: Any) -> list[Any]:
    values: dict[str, Any] = {"response_length": 8, "max_prompt_length": 3}
    data = SupervisedDataModule([Fixed(*given)], **{**values, **options})
    return list(data._read(model))


def test_long_prompts_are_left_out_and_long_responses_cut_or_left_out(
    model: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    given = examples(8)  # prompts of 1, 2, 3, 4, 1, ... tokens, responses of 8
    kept = read(model, *given, response_length=5)
    assert [len(e.prompt_ids) for e in kept] == [1, 2, 3, 1, 2, 3]
    assert all(len(e.response_ids) == len(e.steps) == 5 for e in kept)
    told = "left out 2 examples whose prompt has more than max_prompt_length = 3 tokens"
    assert told in caplog.text
    assert "cut 6 responses to response_length, 5 tokens, 6 of them before" in caplog.text
    assert read(model, *given, response_length=5, overlong="drop") == []
    short = replace(model, backbone=SimpleNamespace(max_positions=10))  # two beside a response
    assert [len(e.prompt_ids) for e in read(short, *given)] == [1, 2, 1, 2]
    assert "left out 4 examples whose prompt has more than the 2 tokens that resp" in caplog.text
    # The second of two ends at its third token; filters at the limit are told too.
    given[1] = replace(given[1], response_ids=np.array([5, 6, EOS, *[PAD] * 5], dtype=np.int32))
    read(model, *given, response_length=5, limit=2)
    assert "cut 2 responses to response_length, 5 tokens, 1 of them before" in caplog.text
    assert [e.uid for e in read(model, *given, limit=2)] == [e.uid for e in given[:2]]


def ready(count: int, **options: Any) -> Data:
    data = Data(examples(count), **{"batch_size": 4, **options})
    data.set_examples(data.given, small().spec)
    return data


def test_grouping_by_length_pads_less_and_loses_nothing() -> None:
    """Answers of 1 to 8 cells in pairs: of a block model, neighbours in length share a batch."""
    given = examples(64)
    for number, example in enumerate(given):
        example.response_ids[number % G :] = EOS
    columns, uids = {}, {}
    spec = small(attention="block", block_size=1, decoder="qwen3").spec
    for grouped in (False, True):
        data = Data(given, batch_size=2, group_by_length=grouped)
        data.set_examples(given, spec, num_padding=0)
        batches = list(data.train_dataloader())
        columns[grouped] = sum(batch.ids.numel() for batch in batches)
        uids[grouped] = sorted(uid for batch in batches for uid in batch.uids)
    assert uids[True] == uids[False] == sorted(example.uid for example in given)
    real = sum(len(e.prompt_ids) + min(number % G + 1, G) for number, e in enumerate(given))
    assert real <= columns[True] < 1.1 * real < columns[False]


def test_a_batch_larger_than_the_data_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for size, is_told in ((3, False), (4, True)):
        ready(3, batch_size=size).train_dataloader()
        assert ("repeats some of the 3 training examples" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("options", "ids", "num_padding", "message"),
    [
        # The padding id is forbidden; behind the answer it matters only where padding is learnt.
        ({"forbidden_ids": (PAD,)}, [5, PAD, MASK, EOS], 0, "token 0 at response position 1"),
        ({"forbidden_ids": (PAD,)}, [5, EOS, PAD, PAD], 0, None),
        ({"forbidden_ids": (PAD,)}, [5, EOS, PAD, PAD], 1, "at response position 2"),
        ({"forbidden_ids": (PAD,)}, [5, EOS, PAD, PAD], None, "at response position 2"),
        # Also behind the end of an answer, where it is no target, an id stands on the canvas.
        ({}, [5, EOS, 24], 0, "ids from 0 to 23, .* got 24 at response position 2"),
        ({}, [0, 23], None, None),
    ],
)
def test_ids_that_cannot_be_learnt_are_named_before_training(
    options: dict[str, Any], ids: list[int], num_padding: int | None, message: str | None
) -> None:
    given = {"spec": small(**options).spec, "vocab_size": 24, "num_padding": num_padding}
    example = replace(examples(1)[0], response_ids=np.array(ids, dtype=np.int32))
    with refused(message and f"fake/train/00000: .*{message}"):
        check_learnable(example, **given)
    wrong = replace(example, prompt_ids=np.array([5, -1], dtype=np.int32))
    with refused(r"00000: .*got -1 at prompt position 1"):
        check_learnable(wrong, **given)


def test_an_end_of_text_before_a_marker_ends_no_answer() -> None:
    spec = small(forbidden_ids=(PAD,)).spec
    ids, given = np.array([5, EOS, 6, PAD, EOS], dtype=np.int32), np.array([0, 0, 1, 0, 0], bool)
    example = replace(examples(1)[0], response_ids=ids, given=given)
    with pytest.raises(ValueError, match="token 0 at response position 3"):
        check_learnable(example, spec=spec, vocab_size=24, num_padding=0)


def test_nothing_to_validate_is_an_error_of_validate_only(tmp_path: Path) -> None:
    data = ready(8)
    assert data.val_dataloader() == []
    data.trainer = quiet(tmp_path)
    data.trainer.state.fn = TrainerFn.FITTING
    assert data.val_dataloader() == []
    data.trainer.state.fn = TrainerFn.VALIDATING
    with pytest.raises(ValueError, match=r"data\.val_fraction: expected .* got 0\.0"):
        data.val_dataloader()


def test_repeated_batches_are_refused(tmp_path: Path) -> None:
    supervised, states = SupervisedDataModule([Fixed()]), TrajectoryDataModule("shards")
    for data, other in ((supervised, "data.limit"), (states, "shards with few records")):
        data.trainer = quiet(tmp_path, overfit_batches=1)
        with pytest.raises(ValueError, match=f"overfit_batches: expected 0, got 1; .* use {other}"):
            data.setup("fit")


def test_validation_and_training_share_no_prompt_and_lose_none() -> None:
    data = ready(40, val_fraction=0.3)
    both = sorted([*data.train_numbers.tolist(), *data.val_numbers.tolist()])
    assert both == list(range(40))
    assert 3 < len(data.val_numbers) < 25
    seen = [uid for batch in data.val_dataloader() for uid in batch.uids]
    assert set(seen) == {data.given[number].uid for number in data.val_numbers}
    assert len(data.probe_prompts(3)) == 3


def test_a_path_is_a_file_behind_the_sources() -> None:
    (first, second) = SupervisedDataModule([Fixed()], path="chat.jsonl").sources
    assert isinstance(first, Fixed)
    assert isinstance(second, ResponsesFile)
    assert second.path == "chat.jsonl"


def test_bad_settings_no_example_and_equal_uids_are_named(model: ModelFacts) -> None:
    bad = {"response_length": 0, "val_fraction": 1.0, "limit": 0, "sources": []}
    for name, value in bad.items():
        with refused(name):
            SupervisedDataModule(**{"sources": [Fixed()], name: value})
    with refused("no training example is left of 0"):
        ready(0)
    with refused("fake/train/00000"):
        read(model, *examples(1), *examples(1))


def tabom(**options: Any) -> TABOMModule:
    return TABOMModule(small(), **{"tokenizer": "tiny", "window": 4, "rank_window": 4, **options})


def test_a_sample_whose_decode_lacks_what_is_needed_is_named() -> None:
    """Cuts need steps, and ties by rank need entropies, of the third of four as well."""
    delayed, traced = (
        SFTModule(small(), tokenizer="tiny", masking=masking)
        for masking in (TimeDelay(window=4), TraceMasking())
    )
    for name, module, message in (
        ("steps", tabom(), "TimeDelay needs"),
        ("steps", delayed, "TimeDelay needs"),
        ("steps", traced, None),
        ("decode_entropy", tabom(ties="rank"), "ties 'rank' needs"),
        ("decode_entropy", tabom(), None),
    ):
        given = examples(4)
        given[2] = replace(given[2], **{name: None})
        with refused(message and f"fake/train/00002: {message}"):
            check_decodes(given, module, response_length=G)


def test_samples_without_a_cut_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Eight steps, the last of them 7: a reference window of 7 leaves a cut at 0, one of 8 none.
    One sample in four was never written."""
    given, seven = examples(4, never=(1,)), tabom(window=7, cut_range="reference")
    check_decodes(examples(4), seven, response_length=G)
    assert "without a cut" not in caplog.text
    check_decodes(given, seven, response_length=G)
    assert "leaves 1 of 4 samples without a cut" in caplog.text
    with pytest.raises(ValueError, match="window of 8 leaves 4 of 4 samples without a cut"):
        check_decodes(given, tabom(window=8, cut_range="reference"), response_length=G)
    check_decodes(examples(4), tabom(window=8), response_length=G)
