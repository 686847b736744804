"""Pairs of preference: forms of rows, right against wrong decodes, errors that name a row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_dlm.backbones import BackboneSpec, load_tokenizer
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.datamodules.supervised_sources import ModelFacts, PreferencesFile, RecordedPairs
from tests.e2e.runs import write_jsonl
from tests.finetuning.runs import EOS, MASK, PAD
from tests.traces import VOCAB, recorded, small_backbone, write_shards


@pytest.fixture(scope="module")
def model() -> ModelFacts:
    spec = BackboneSpec(family="tiny", mask_id=MASK, pad_id=PAD, eos_ids=(EOS,))
    return ModelFacts(tokenizer=load_tokenizer("tiny"), spec=spec, vocab_size=VOCAB)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, RIGHT, WRONG = turn("user", "2+3"), turn("assistant", "5"), turn("assistant", "12")


def test_rows_hold_texts_or_turns_with_the_prompt_apart_or_inside(
    tmp_path: Path, model: ModelFacts
) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "2+3", "chosen": "5", "rejected": "12"},
        {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"prompt": "2+3", "chosen": "5", "rejected": "12", "messages": [ASKED, RIGHT]},
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", lines)
    found = list(PreferencesFile(path).examples(model))
    assert [one.uid for one in found] == [f"pairs/{number:06d}" for number in range(4)]
    assert [one.rejected.uid for one in found] == [f"{one.uid}/rejected" for one in found]
    for one in found:
        assert one.prompt_ids.tolist() == one.rejected.prompt_ids.tolist()
        sides = [model.tokenizer.decode(row.response_ids[:-1]) for row in one.rows()]
        assert sides == ["5", "12"]
        assert model.tokenizer.decode(one.prompt_ids).count("2+3") == 1
    # Both are cut, or the pair is left out if one is too long.
    read = SupervisedDataModule([PreferencesFile(path)], response_length=2)
    assert [row.response_ids[-1] == EOS for row in next(read._read(model)).rows()] == [True, False]
    read = SupervisedDataModule([PreferencesFile(path)], response_length=2, overlong="drop")
    assert not list(read._read(model))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "2+3", "chosen": "5"}, "'rejected'"),
        ({"prompt": "2+3", "chosen": "5", "rejected": 12}, "'rejected'"),
        ({"prompt": "2+3", "chosen": [RIGHT], "rejected": [WRONG]}, "'prompt'"),
        ({"chosen": "5", "rejected": "12"}, "prompt"),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [turn("user", "4"), WRONG]},
            "the same prompt",
        ),
    ],
)
def test_bad_rows_are_named(
    line: dict[str, Any], message: str, tmp_path: Path, model: ModelFacts
) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [line])
    with pytest.raises(ValueError, match=rf"pairs\.jsonl.*1.*{message}"):
        list(PreferencesFile(path).examples(model))


def test_right_decodes_are_paired_with_wrong_ones_to_the_same_prompt(
    tmp_path: Path, model: ModelFacts
) -> None:
    """Three prompts: two right and one wrong, one and two, none and one. Order does not matter."""
    records = recorded(small_backbone(), 7)
    asked, is_right = [0, 0, 0, 1, 1, 1, 2], [1, 0, 1, 0, 1, 0, 0]
    records = [
        replace(
            one, prompt_ids=records[prompt].prompt_ids, meta={**one.meta, "correct": bool(right)}
        )
        for one, prompt, right in zip(records, asked, is_right, strict=True)
    ]
    shards = write_shards(tmp_path / "traces", records[::-1])
    found = list(RecordedPairs(shards).examples(model))
    uids = [record.uid for record in records]
    expected = [(uids[0], uids[1]), (uids[4], uids[3])]
    assert [(one.uid, one.rejected.uid) for one in found] == [
        (chosen, f"{chosen}/rejected") for chosen, _ in expected
    ]
    for one, (_, rejected) in zip(found, expected, strict=True):
        assert np.array_equal(one.rejected.response_ids, records[uids.index(rejected)].tokens)
    pictures = [
        replace(one, meta={**one.meta, "images": [digest]})
        for one, digest in zip(records[:2], ("a", "b"), strict=True)
    ]
    shards = write_shards(tmp_path / "alone", [records[6], *pictures])
    with pytest.raises(ValueError, match="alone: expected a prompt with a right and a wrong"):
        list(RecordedPairs(shards).examples(model))


def test_records_that_are_left_out_need_no_grade(tmp_path: Path, model: ModelFacts) -> None:
    """Four decodes of one prompt: right, ungraded, wrong, and one of a task that is left out."""
    records = recorded(small_backbone(), 4)
    metas = [{"task": "t", "correct": grade} for grade in (True, None, False)] + [{"task": "u"}]
    asked = records[0].prompt_ids
    records = [
        replace(one, prompt_ids=asked, meta=meta) for one, meta in zip(records, metas, strict=True)
    ]
    shards = write_shards(tmp_path / "traces", records)
    (pair,) = RecordedPairs(shards, tasks=["t"]).examples(model)
    assert pair.uid == records[0].uid
    assert np.array_equal(pair.rejected.response_ids, records[2].tokens)
    assert not np.array_equal(records[1].tokens, records[2].tokens)
    with pytest.raises(ValueError, match="not graded"):
        list(RecordedPairs(shards).examples(model))
