"""Supervised data: every source, filters, overlong samples, splits, and errors that name a row."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.backbones import BackboneSpec, load_tokenizer
from lit_dlm.datamodules.supervised import SupervisedDataModule, check_learnable
from lit_dlm.datamodules.supervised_sources import (
    ModelFacts,
    RecordedDecodes,
    ResponsesFile,
    TABOMFile,
    TaskReferences,
)
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.losses.corruption import RandomMasking, TraceMasking
from lit_dlm.modules.supervised_batch import collate_supervised, lay_out, responses_of
from lit_dlm.toy import WordProblems
from lit_dlm.trajectories.exchange import tabom_row
from lit_dlm.trajectories.store import merge_manifest
from tests.finetuning import EOS, MASK, PAD, Data, G, examples, small
from tests.traces import VOCAB, recorded, small_backbone, write_shards


@pytest.fixture(scope="module")
def model() -> ModelFacts:
    spec = BackboneSpec(family="tiny", mask_id=MASK, pad_id=PAD, eos_ids=(EOS,))
    return ModelFacts(tokenizer=load_tokenizer("tiny"), spec=spec, vocab_size=VOCAB)


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
    turns = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    lines = [
        {"messages": turns},
        {"prompt": "2+3", "response": "5"},
        {"instruction": "2+3", "input": "", "output": "5"},
        {"question": "2+3", "answer": "5"},
        {"conversations": [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]},
    ]
    path = rows(tmp_path / "a.jsonl", *lines)
    first, *others = ResponsesFile(path).examples(model)
    assert model.tokenizer.decode(first.response_ids[:-1]) == "5"
    for other in others:
        assert other.prompt_ids.tolist() == first.prompt_ids.tolist()
        assert other.response_ids.tolist() == first.response_ids.tolist()
    assert [e.uid for e in [first, *others]] == [f"a/{n:06d}" for n in range(5)]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert [e.uid for e in ResponsesFile(str(packed), limit=2).examples(model)] == [
        "a/000000",
        "a/000001",
    ]


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


def test_trace_training_follows_the_step_map(tmp_path: Path, model: ModelFacts) -> None:
    """Steps 2, 0, 2 of three tokens: one state predicts the second, the other the rest."""
    line = {"prompt": "2+3", "response": "12", "step_map": [2, 0, 2]}
    (example,) = ResponsesFile(rows(tmp_path / "a.jsonl", line)).examples(model)
    batch = collate_supervised([example], response_length=4, spec=model.spec)
    responses = responses_of(batch, model.spec, seed=0, num_padding=0)
    states = TraceMasking().states(responses)
    assert states.supervised.tolist() == [[False, True, False, False], [True, False, True, False]]


def test_recorded_decodes_keep_tokens_and_steps_and_drop_wrong_ones(
    tmp_path: Path, model: ModelFacts
) -> None:
    records = recorded(small_backbone(), 12)
    shards = write_shards(tmp_path / "shards", records)
    right = {record.uid: record for record in records if record.meta["correct"]}
    found = list(RecordedDecodes(shards).examples(model))
    assert {example.uid for example in found} == set(right)
    for example in found:
        record = right[example.uid]
        assert example.response_ids.tolist() == record.tokens.tolist()
        assert example.steps.tolist() == record.commit_step.tolist()
    assert len(list(RecordedDecodes(shards, only_correct=False).examples(model))) == 12
    assert len(list(RecordedDecodes(shards, limit=3).examples(model))) == 3
    other = replace(model, spec=replace(model.spec, mask_id=5))
    with pytest.raises(ValueError, match="mask id 2, expected 5"):
        list(RecordedDecodes(shards).examples(other))


def test_recorded_decodes_come_in_one_order_however_they_were_written(
    tmp_path: Path, model: ModelFacts
) -> None:
    records = recorded(small_backbone(), 12)
    whole = write_shards(tmp_path / "whole", records)
    dealt = tmp_path / "dealt"
    for rank in (1, 0):
        write_shards(dealt, records[rank::2], records_per_block=3, rank=rank)
    for limit in (None, 3):
        orders = [
            [e.uid for e in RecordedDecodes(folder, limit=limit).examples(model)]
            for folder in (whole, dealt)
        ]
        assert orders[0] == orders[1] == sorted(orders[0])


def test_recorded_entropies_are_those_of_the_step_that_wrote(
    tmp_path: Path, model: ModelFacts
) -> None:
    """One token a step from the right: at its step, position p is row (2 - p) of the open ones."""
    record = recorded(small_backbone(), 1, response_length=3)[0]
    record = replace(
        record,
        commit_step=np.array([2, 1, 0]),
        signals={"step_entropy": np.array([9, 9, 0.5, 9, 0.25, 0.125], dtype=np.float16)},
    )
    shards = write_shards(tmp_path / "shards", [record])
    (example,) = RecordedDecodes(shards, only_correct=False).examples(model)
    assert example.decode_entropy.tolist() == [0.125, 0.25, 0.5]


def test_tabom_files_give_the_same_examples_as_the_shards(
    tmp_path: Path, model: ModelFacts
) -> None:
    records = recorded(small_backbone(), 6)
    path = rows(tmp_path / "t.jsonl", *(tabom_row(r, model.tokenizer) for r in records))
    found = list(TABOMFile(path).examples(model))
    for example, record in zip(found, records, strict=True):
        assert example.prompt_ids.tolist() == record.prompt_ids.tolist()
        assert example.response_ids.tolist() == record.tokens.tolist()
        assert example.steps.tolist() == record.commit_step.tolist()


def test_a_source_that_gives_nothing_names_itself_and_its_filters(
    tmp_path: Path, model: ModelFacts
) -> None:
    """Two of five are of the wrong method, the other three are wrong."""
    record = recorded(small_backbone(), 1)[0]
    records = [
        replace(record, uid=f"s/{number}", meta={"method": method, "correct": False})
        for number, method in enumerate(["credit"] * 2 + ["entropy"] * 3)
    ]
    path = rows(tmp_path / "t.jsonl", *(tabom_row(r, model.tokenizer) for r in records))
    with pytest.raises(ValueError, match=r"t\.jsonl: .* none of 5: 5 by methods: \['other'\]"):
        list(TABOMFile(path, methods=["other"]).examples(model))
    source = TABOMFile(path, methods=["entropy"], only_correct=True)
    with pytest.raises(ValueError, match=r"2 by methods: \['entropy'\], 3 by only_correct"):
        list(source.examples(model))
    shards = write_shards(tmp_path / "shards", records)
    with pytest.raises(ValueError, match=r"shards: .* none of 5: 5 by tasks: \['sums'\]"):
        list(RecordedDecodes(shards, tasks=["sums"]).examples(model))
    with pytest.raises(ValueError, match=r"empty\.jsonl: .* got an empty source"):
        list(TABOMFile(rows(tmp_path / "empty.jsonl")).examples(model))


def test_release_rows_keep_their_list_their_pads_and_their_filters(
    tmp_path: Path, model: ModelFacts
) -> None:
    """Without an order the data's option decides, also inside a trajectory file."""
    given = {"prompt": "2+3", "response_token_ids": [5, 6], "method": "entropy", "correct": True}
    listed = {**given, "decoding_order": [2, 1, 0], "non_ltr_positions": [2]}
    path = rows(tmp_path / "t.jsonl", listed, {**given, "correct": False})
    with pytest.raises(ValueError, match=r"t\.jsonl:2: .* missing_order: ltr"):
        list(TABOMFile(path).examples(model))
    model = replace(model, missing_order="ltr")
    first, second = TABOMFile(path).examples(model)
    assert first.response_ids.tolist() == [5, 6, PAD]
    assert first.steps.tolist() == [2, 1, 0]
    assert first.non_ltr.tolist() == [False, False, True]
    assert second.steps.tolist() == [0, 1]
    assert [e.uid for e in TABOMFile(path, only_correct=True).examples(model)] == [first.uid]
    (cut,) = read(model, first, response_length=2, max_prompt_length=99)
    assert cut.non_ltr.tolist() == [False, False]


def test_shards_of_a_run_that_did_not_finish_are_taken_with_a_warning(
    tmp_path: Path, model: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    shards = write_shards(tmp_path / "shards", recorded(small_backbone(), 2))
    source = RecordedDecodes(shards, only_correct=False)
    (shards / "manifest.json").unlink(missing_ok=True)
    assert len(list(source.examples(model))) == 2
    assert "there is no manifest.json" in caplog.text
    caplog.clear()
    merge_manifest(shards)
    assert len(list(source.examples(model))) == 2
    assert "manifest" not in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, r"a\.jsonl.*1.*expected 'messages', 'conversations', or one of prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "at least 2 with"),
        (
            {"messages": [{"role": "user", "content": "x"}] * 2},
            "the assistant's as the last of 'messages', got 'user'",
        ),
        ({"prompt": 3, "response": "x"}, "a text in field 'prompt'"),
        (
            {"prompt": "<|user|>2+3<|assistant|>", "response": "x"},
            r"begins with '<\|user\|>', .* set templated: true",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "tool", "value": "x"}]},
            r"at least 2 with from \(human, gpt, system\)",
        ),
        (
            {"prompt": "2+3", "response": "12", "step_map": [0]},
            "'step_map' has 1 steps for a response of 3 tokens",
        ),
        (
            {"prompt": "2+3", "response": "12", "step_map": [0, -1, 1]},
            "'step_map' must list whole numbers of 0 or more",
        ),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, model: ModelFacts, line: dict[str, Any], message: str
) -> None:
    path = rows(tmp_path / "a.jsonl", line)
    with pytest.raises(ValueError, match=message):
        list(ResponsesFile(path).examples(model))


def test_a_templated_file_holds_no_chats(tmp_path: Path, model: ModelFacts) -> None:
    turns = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    path = rows(tmp_path / "a.jsonl", {"messages": turns})
    with pytest.raises(ValueError, match="expects a prompt that is one text, got 'messages'"):
        list(ResponsesFile(path, templated=True).examples(model))


def test_only_graded_records_pass_the_filter(tmp_path: Path, model: ModelFacts) -> None:
    record = replace(recorded(small_backbone(), 1)[0], meta={})
    shards = write_shards(tmp_path / "shards", [record])
    with pytest.raises(ValueError, match=r"only_correct: record .* was not graded"):
        list(RecordedDecodes(shards).examples(model))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<|user|>{% endfor %}", "<|user|>"),
        (
            "{% for m in messages %}{{ m.content }}"
            "{{ '<|user|>' if m.role == 'assistant' else '<|endoftext|>' }}{% endfor %}",
            "<|user|>",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "<|endoftext|>"),
        (None, "<|endoftext|>"),
    ],
)
def test_answers_end_as_turns_do(model: ModelFacts, template: str | None, end: str) -> None:
    """An end of turn is behind the end of text among those of every released family."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
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
    assert "left out 2 examples whose prompt has more than 3 tokens" in caplog.text
    assert "cut 6 responses to response_length, 5 tokens, 6 of them before" in caplog.text
    assert read(model, *given, response_length=5, overlong="drop") == []
    assert [e.uid for e in read(model, *given, limit=2)] == [e.uid for e in given[:2]]


def test_a_cut_that_keeps_the_end_of_text_is_told_apart(
    model: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of two responses ends at its third token; filters at the limit are told too."""
    first, second, *_ = examples(2)
    second = replace(second, response_ids=np.array([5, 6, EOS, *[PAD] * 5], dtype=np.int32))
    read(model, first, second, *examples(4)[2:], response_length=5, limit=2)
    assert "cut 2 responses to response_length, 5 tokens, 1 of them before" in caplog.text


def test_grouping_by_length_pads_less_and_loses_nothing() -> None:
    """Answers of 1 to 8 cells in pairs: of a block model, neighbours in length share a batch."""
    given = examples(64)
    for number, example in enumerate(given):
        example.response_ids[number % G :] = EOS
    columns, uids = {}, {}
    for grouped in (False, True):
        data = Data(given, batch_size=2, group_by_length=grouped)
        spec = small(attention="block", block_size=1, decoder="qwen3").spec
        data.set_examples(given, spec, num_padding=0)
        batches = list(data.train_dataloader())
        columns[grouped] = sum(batch.ids.numel() for batch in batches)
        uids[grouped] = sorted(uid for batch in batches for uid in batch.uids)
    assert uids[True] == uids[False] == sorted(example.uid for example in given)
    real = sum(len(e.prompt_ids) + min(number % G + 1, G) for number, e in enumerate(given))
    assert real <= columns[True] < 1.1 * real < columns[False]


@pytest.mark.parametrize("attention", ["full", "block"])
def test_batches_by_tokens_hold_what_fits(attention: str) -> None:
    """The columns that the model sees: of a block model the clean and the noisy copy."""
    given = examples(64)
    for number, example in enumerate(given):
        example.response_ids[number % G :] = EOS
    data = Data(given, max_tokens_per_batch=80)
    options = {"attention": "block", "block_size": 2, "decoder": "qwen3"}
    spec = small(**(options if attention == "block" else {})).spec
    data.set_examples(given, spec, num_padding=0)
    batches = list(data.train_dataloader())
    seen = []
    for batch in batches:
        states = RandomMasking().states(responses_of(batch, spec, seed=0, num_padding=0))
        columns = lay_out(batch, states, spec).ids.numel()
        assert columns <= 80
        seen.append((columns, len(batch.uids)))
    assert sorted(uid for batch in batches for uid in batch.uids) == sorted(e.uid for e in given)
    assert np.mean([columns for columns, _ in seen]) > 60
    assert len({rows for _, rows in seen}) > (1 if attention == "block" else 0)


def test_rows_per_update_needs_batches_of_one_size() -> None:
    with pytest.raises(ValueError, match="rows_per_update: expected null with max_tokens_per_bat"):
        Data(examples(4), max_tokens_per_batch=80, rows_per_update=8)


def test_a_batch_larger_than_the_data_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for size, is_told in ((3, False), (4, True)):
        data = Data(examples(3), batch_size=size)
        data.set_examples(data.given, small().spec)
        data.train_dataloader()
        assert ("more than the 3 training examples" in caplog.text) == is_told


def test_a_missing_order_is_left_to_right_on_demand_only(model: ModelFacts) -> None:
    given = replace(examples(1)[0], steps=None)
    assert read(model, given)[0].steps is None
    assert read(model, given, missing_order="ltr")[0].steps.tolist() == list(range(8))


def test_equal_uids_are_refused(model: ModelFacts) -> None:
    with pytest.raises(ValueError, match="two examples have the uid 'fake/train/00000'"):
        read(model, *examples(1), *examples(1))


def test_a_target_that_has_no_probability_is_named_before_training() -> None:
    """The padding id is forbidden; behind the answer it matters only where padding is learnt."""
    spec = small(forbidden_ids=(PAD,)).spec
    (example,) = examples(1)
    inside = replace(example, response_ids=np.array([5, PAD, MASK, EOS], dtype=np.int32))
    behind = replace(example, response_ids=np.array([5, EOS, PAD, PAD], dtype=np.int32))
    with pytest.raises(ValueError, match="fake/train/00000: token 0 at response position 1"):
        check_learnable(inside, spec, vocab_size=VOCAB, num_padding=0)
    check_learnable(behind, spec, vocab_size=VOCAB, num_padding=0)
    for num_padding in (1, None):
        with pytest.raises(ValueError, match="at response position 2"):
            check_learnable(behind, spec, vocab_size=VOCAB, num_padding=num_padding)


def test_ids_that_the_model_does_not_have_are_named_before_training() -> None:
    """Also behind the end of an answer, where they are no target but stand on the canvas."""
    spec = small().spec
    (example,) = examples(1)
    for name, ids, message in (
        ("response_ids", [5, EOS, 24], "ids from 0 to 23, .* got 24 at response position 2"),
        ("prompt_ids", [5, -1], "got -1 at prompt position 1"),
    ):
        wrong = replace(example, **{name: np.array(ids, dtype=np.int32)})
        with pytest.raises(ValueError, match=f"fake/train/00000: .*{message}"):
            check_learnable(wrong, spec, vocab_size=24, num_padding=0)
    highest = replace(example, response_ids=np.array([0, 23], dtype=np.int32))
    check_learnable(highest, spec, vocab_size=24, num_padding=None)


def test_nothing_to_validate_is_an_error_of_validate_only() -> None:
    data = Data(examples(8), batch_size=4)
    data.set_examples(data.given, small().spec)
    assert data.val_dataloader() == []
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.state.fn = TrainerFn.FITTING
    assert data.val_dataloader() == []
    data.trainer.state.fn = TrainerFn.VALIDATING
    with pytest.raises(ValueError, match=r"data\.val_fraction: expected .* got 0\.0"):
        data.val_dataloader()


@pytest.mark.parametrize(
    ("data", "instead"),
    [
        (SupervisedDataModule([Fixed()]), "data.limit"),  # type: ignore[list-item]
        (TrajectoryDataModule("shards"), "shards with few records"),
    ],
    ids=["supervised", "states"],
)
def test_repeated_batches_are_refused(data: LightningDataModule, instead: str) -> None:
    options = {"logger": False, "enable_checkpointing": False, "overfit_batches": 1}
    data.trainer = Trainer(accelerator="cpu", **options)
    with pytest.raises(ValueError, match=f"overfit_batches: expected 0, got 1; .* use {instead}"):
        data.setup("fit")


def test_validation_and_training_share_no_prompt_and_lose_none() -> None:
    data = Data(examples(40), batch_size=4, val_fraction=0.3)
    data.set_examples(data.given, small().spec)
    both = sorted([*data.train_numbers.tolist(), *data.val_numbers.tolist()])
    assert both == list(range(40))
    assert 3 < len(data.val_numbers) < 25
    seen = [uid for batch in data.val_dataloader() for uid in batch.uids]
    assert set(seen) == {data.given[number].uid for number in data.val_numbers}
    assert len(data.probe_prompts(3)) == 3


def test_no_example_is_an_error() -> None:
    data = Data([], batch_size=4)
    with pytest.raises(ValueError, match="no training example is left of 0"):
        data.set_examples([], small().spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_length": 0}, "response_length"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"limit": 0}, "limit"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SupervisedDataModule([Fixed()], **options)  # type: ignore[list-item]


def test_sources_are_needed() -> None:
    with pytest.raises(ValueError, match="sources: expected at least one"):
        SupervisedDataModule([])
