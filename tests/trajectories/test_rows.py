"""Rows of other tools become records, or are refused with their line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.rows import ImportSettings, read_step_map, read_tabom
from lit_dlm.trajectories.tools.exchange import tabom_row
from tests.trajectories.samples import MASK, VOCAB, Letters

TOKENIZER, PLAIN = Letters(), Letters(None)
SETTINGS = {"mask_id": MASK, "vocab_size": VOCAB, "tokenizer": PLAIN, "pad_id": 0}


def row(**changes: Any) -> dict[str, Any]:
    """Four tokens: the second first, then the last two, the first at the end."""
    values = {"prompt": "ab", "response_token_ids": [7, 8, 1, 10], "decoding_order": [3, 0, 1, 2]}
    return {key: value for key, value in {**values, **changes}.items() if value is not ...}


def read(folder: Path, *rows: Any, **settings: Any) -> list[Trajectory]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_tabom(path, ImportSettings(**SETTINGS | settings)))


def read_entry(folder: Path, **entry: Any) -> Trajectory:
    path = folder / "rows.json"
    path.write_text(json.dumps([entry]))
    (record,) = read_step_map(path, ImportSettings(**SETTINGS))
    return record


def test_a_step_map_that_counts_from_one_is_brought_to_zero(tmp_path):
    record = read_entry(tmp_path, prompt="yya", response="abc", step_map=[1, 1, 2])
    assert record.prompt_ids.tolist() == [24, 24, 0]
    assert record.commit_step.tolist() == [0, 0, 1]
    assert (record.num_steps, record.status) == (2, "complete")


def test_ids_that_end_before_their_steps_are_padded_and_keep_every_step(tmp_path):
    """Two ids of four steps; where no step wrote there is a mask, not a pad."""
    first, second = read(
        tmp_path,
        row(response_token_ids=[7, 8]),
        row(response_token_ids=[7, 8], decoding_order=[1, 0, 2, -1]),
    )
    assert first.tokens.tolist() == [7, 8, 0, 0]
    assert first.commit_step.tolist() == [3, 0, 1, 2]
    assert (first.num_steps, first.status) == (4, "complete")
    assert second.tokens.tolist() == [7, 8, 0, MASK]
    assert second.commit_step.tolist() == [1, 0, 2, -1]


def test_rows_are_tokenised_only_when_they_have_no_ids(tmp_path):
    text = row(response_token_ids=..., prompt=..., instruction="hi", output="hibk")
    spoken = (("system", "z"), ("user", "ab"), ("assistant", "hibk"), ("user", "c"))
    turns = [{"role": role, "content": content} for role, content in spoken]
    chat = row(prompt=..., response_token_ids=..., messages=turns)
    found = read(tmp_path, text, chat, row(output="a"), tokenizer=TOKENIZER)
    assert found[0].uid == "rows/1"
    assert found[0].prompt_ids.tolist() == [24, 24, 7, 8, 25]
    assert found[1].prompt_ids.tolist() == [24, 24, 0, 1, 25]
    assert [one.tokens.tolist() for one in found] == [[7, 8, 1, 10]] * 3


def test_what_other_tools_say_beside_token_ids_is_not_read(tmp_path):
    chat = [{"role": "user", "content": "ab"}]
    other = {"prompt": chat, "prompt_token_ids": [1], "answer": 18, "status": "ok"}
    found = read(tmp_path, row(**other, id=None), row(**other, id=0))
    assert [(one.uid, one.status) for one in found] == [("rows/1", "complete"), ("0", "complete")]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: expected one of the texts response"):
        read(tmp_path, row(**other, response_token_ids=...))


def test_every_field_of_a_release_row_reaches_the_record(tmp_path):
    fields = {"method": "entropy", "data_source": "math", "reward": 0.5, "correct": False}
    one, two = read(tmp_path, row(**fields), row(**fields, meta={"task": "ours"}))
    assert one.meta == {"method": "entropy", "task": "math", "score": 0.5, "correct": False}
    assert two.meta == {"task": "ours"}, "an export of ours says it all in meta"


def test_the_files_own_non_ltr_positions_win_and_come_back_in_an_export(tmp_path):
    """By the order, positions 1 to 3 are out of order; the file may say otherwise, or nothing."""
    lists = (..., [1, 2, 3], [3], [])
    found = read(tmp_path, *(row(non_ltr_positions=positions) for positions in lists))
    listed = [record.meta.get("non_ltr_positions") for record in found]
    assert listed == [None, None, [3], []]
    exported = [tabom_row(record, PLAIN) for record in found]
    assert [row["non_ltr_positions"] for row in exported] == [[1, 2, 3], [1, 2, 3], [3], []]
    again = read(tmp_path, *exported)
    assert [record.meta.get("non_ltr_positions") for record in again] == listed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoding_order": ...}, "0 entries for 4 tokens"),
        ({"decoding_order": [0]}, "1 entries for 4 tokens"),
        ({"decoding_order": "01"}, "decoding_order"),
        ({"decoding_order": [None] * 4}, "decoding_order"),
        ({"response_token_ids": ..., "response": "hij"}, "4 entries for 3 tokens"),
        ({"response_token_ids": ...}, "one of the texts response"),
        ({"response_token_ids": [2**32 + 5, 8, 1, 10]}, "response_token_ids"),
        ({"prompt": ...}, "one of the texts prompt"),
        ({"prompt": ..., "messages": [{"role": "user"}]}, "a turn of the user in messages"),
        ({"given_positions": [999]}, "given_positions: expected positions below 4, got 999"),
        ({"non_ltr_positions": [-1]}, "non_ltr_positions: expected positions below 4, got -1"),
        ({"meta": "abc"}, ""),
        ({"seed": "abc"}, "seed"),
        ({"num_steps": 4.5}, "num_steps"),
        ({"mask_id": "x"}, "mask_id"),
        ({"correct": "yes"}, "correct"),
        ({"response_token_ids": [1], "pad_id": 10**30}, "pad_id"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_line(tmp_path, fields, message):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        read(tmp_path, row(), row(**fields))


def test_wild_numbers_are_named_and_take_no_memory(tmp_path):
    entry = {"prompt_ids": [3], "response_ids": [3, 4, 3], "step_map": [0, 1, 2]}
    for name, *values in (
        ("response_length", 2**32, 70_000),
        ("mask_id", 10**30),
        ("vocab_size", 2**40),
        ("num_steps", 10**30),
        ("seed", -1),
        ("step_map", [10**30, 0, 1], None, [0, -1, 0]),
    ):
        for value in values:
            with pytest.raises(ValueError, match=rf"rows\.json: entry 0: .*{name}"):
                read_entry(tmp_path, **entry | {name: value})


@pytest.mark.parametrize("option", SETTINGS)
def test_what_the_rows_do_not_say_must_be_given(tmp_path, option):
    rows = [row(prompt_token_ids=[1], response_token_ids=[7]), row()]
    with pytest.raises(ValueError, match=rf"rows\.jsonl:\d: .*; give --{option}"):
        read(tmp_path, *rows, **{option: None})


def test_packed_files_are_read_and_files_that_are_no_text_are_named(tmp_path):
    (wanted,) = read(tmp_path, row())
    settings, packed = ImportSettings(**SETTINGS), tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    (found,) = read_tabom(packed, settings)
    assert (found.uid, found.digest()) == (wanted.uid, wanted.digest())
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: damaged or cut off"):
        list(read_tabom(packed, settings))
    for content in (b'{"prompt": "\xff"}\n', b"{", b"[1]"):
        (tmp_path / "bad.jsonl").write_bytes(content)
        for reader in (read_tabom, read_step_map):
            with pytest.raises(ValueError, match=r"bad\.jsonl"):
                list(reader(tmp_path / "bad.jsonl", settings))
