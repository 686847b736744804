"""Rows of TABOM's release: lengths that differ, fields that count, and errors that name a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.trajectories.exchange import ImportSettings, read_step_map, read_tabom, tabom_row
from lit_dlm.trajectories.record import Trajectory

MASK, PAD, VOCAB = 2, 0, 30


class Letters:
    """A tokenizer of one letter per id, without a chat template."""

    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 97 for letter in text]


def row(**changes: Any) -> dict[str, Any]:
    """Four tokens: the second first, then the last two, the first at the end."""
    values = {
        "prompt": "ab",
        "response_token_ids": [7, 8, 9, 10],
        "decoding_order": [3, 0, 1, 2],
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not ...}


def read(folder: Path, *rows: Any, **settings: Any) -> list[Trajectory]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"mask_id": MASK, "vocab_size": VOCAB, "tokenizer": Letters(), "pad_id": PAD}
    return list(read_tabom(path, ImportSettings(**{**values, **settings})))


def test_ids_that_end_before_their_steps_are_padded_and_keep_every_step(tmp_path: Path) -> None:
    """Two ids of four steps; where no step wrote there is a mask, not a pad."""
    first, second = read(
        tmp_path,
        row(response_token_ids=[7, 8]),
        row(response_token_ids=[7, 8], decoding_order=[1, 0, 2, -1]),
    )
    assert first.tokens.tolist() == [7, 8, PAD, PAD]
    assert first.commit_step.tolist() == [3, 0, 1, 2]
    assert (first.num_steps, first.status) == (4, "complete")
    assert second.tokens.tolist() == [7, 8, PAD, MASK]
    assert second.commit_step.tolist() == [1, 0, 2, -1]
    with pytest.raises(ValueError, match="no pad_id; give --pad_id"):
        read(tmp_path, row(response_token_ids=[7, 8]), pad_id=None)


def test_text_of_another_length_than_its_steps_is_refused(tmp_path: Path) -> None:
    text = row(response_token_ids=..., response="hijk")
    assert read(tmp_path, text)[0].tokens.tolist() == [7, 8, 9, 10]
    message = r"rows\.jsonl:1: decoding_order has 4 entries for 3 tokens of its text"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**text, "response": "hij"})


def test_every_field_of_a_release_row_reaches_the_record(tmp_path: Path) -> None:
    fields = {"method": "entropy", "data_source": "math", "reward": 0.5, "correct": False}
    (record,) = read(tmp_path, row(**fields))
    assert record.meta == {"method": "entropy", "task": "math", "score": 0.5, "correct": False}
    (record,) = read(tmp_path, row(method="entropy", correct=None, meta={"task": "ours"}))
    assert record.meta == {"task": "ours"}, "an export of ours says it all in meta"


def test_the_files_own_non_ltr_positions_win_and_come_back_in_an_export(tmp_path: Path) -> None:
    """By the order, positions 1 to 3 are out of order; the file may say otherwise, or nothing."""
    found = read(
        tmp_path,
        row(),
        row(non_ltr_positions=[1, 2, 3]),
        row(non_ltr_positions=[3]),
        row(non_ltr_positions=[]),
    )
    listed = [record.meta.get("non_ltr_positions") for record in found]
    assert listed == [None, None, [3], []]
    exported = [tabom_row(record, Letters()) for record in found]
    assert [row["non_ltr_positions"] for row in exported] == [[1, 2, 3], [1, 2, 3], [3], []]
    again = read(tmp_path, *exported)
    assert [record.meta.get("non_ltr_positions") for record in again] == listed


def test_rows_without_an_order_go_from_left_to_right_on_demand_only(tmp_path: Path) -> None:
    """A missing or short order; the row's own list and number of steps are not of that order."""
    rows = [
        row(decoding_order=..., non_ltr_positions=[2], num_steps=1),
        row(decoding_order=[1, 0]),
        row(),
    ]
    found = read(tmp_path, *rows, missing_order="ltr")
    assert [record.commit_step.tolist() for record in found] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [3, 0, 1, 2],
    ]
    assert "non_ltr_positions" not in found[0].meta
    text = row(decoding_order=..., response_token_ids=..., response="hij")
    for one, message in (
        (rows[0], "the row has no decoding_order for 4 tokens; .* missing_order: ltr"),
        (rows[1], "decoding_order has 2 entries for 4 tokens; .* missing_order: ltr"),
        (text, "no decoding_order for 3 tokens; "),
    ):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{message}"):
            read(tmp_path, one)
    with pytest.raises(ValueError, match="no response_token_ids; read it as a ResponsesFile"):
        read(tmp_path, text, missing_order="ltr")


def test_messages_give_the_first_turn_of_each_role(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "z"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "hijk"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (record,) = read(tmp_path, row(prompt=..., response_token_ids=..., messages=turns))
    assert record.prompt_ids.tolist() == [0, 1]
    assert record.tokens.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"given_positions": [999]}, "given_positions holds 999, expected positions below 4"),
        ({"non_ltr_positions": [-1]}, "non_ltr_positions holds -1, expected positions below 4"),
        ({"meta": "abc"}, "meta must be an object, got str"),
        ({"seed": "abc"}, "seed must be an integer, got 'abc'"),
        ({"num_steps": 4.0}, r"num_steps must be an integer, got 4\.0"),
        ({"mask_id": "x"}, "mask_id must be an integer, got 'x'"),
        ({"correct": "yes"}, "correct must be true, false or null, got 'yes'"),
        ({"response_token_ids": [2**32 + 5, 8, 9, 10]}, "holds 4294967301, which has more than 32"),
        ({"prompt": ..., "messages": [{"role": "user"}]}, "a turn of the user in messages"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        read(tmp_path, row(), row(**fields))


def test_packed_files_are_read_and_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    (wanted,) = read(tmp_path, row())
    settings = ImportSettings(mask_id=MASK, vocab_size=VOCAB, tokenizer=Letters())
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    (found,) = read_tabom(packed, settings)
    assert (found.uid, found.digest()) == (wanted.uid, wanted.digest())
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: damaged or cut off"):
        list(read_tabom(packed, settings))
    binary = tmp_path / "bin.jsonl"
    binary.write_bytes(b'{"prompt": "\xff"}\n')
    for reader in (read_tabom, read_step_map):
        with pytest.raises(ValueError, match=r"bin\.jsonl.*not valid JSON"):
            list(reader(binary, settings))
