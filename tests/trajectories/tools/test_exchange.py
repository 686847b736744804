"""Exports say what the other tools read, and an import of an export is the record again."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.rows import ImportSettings, read_step_map, read_tabom
from lit_dlm.trajectories.tools.exchange import (
    read_parquet,
    step_map_row,
    tabom_row,
    write_json_rows,
    write_parquet,
)
from tests.trajectories.samples import (
    MASK,
    VOCAB,
    assert_all_same,
    random_record,
    records_of,
    small_record,
)


class Letters:
    """A tokenizer of one letter per id."""

    def __init__(self, chat_template: str | None = "yy{}z") -> None:
        self.chat_template = chat_template

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def apply_chat_template(self, turns: list[dict], **options: Any) -> Any:
        text = f"yy{turns[0]['content']}z"
        return text if options.get("tokenize") is False else self.encode(text)


TOKENIZER, PLAIN = Letters(), Letters(None)
SETTINGS = {"mask_id": MASK, "vocab_size": VOCAB, "tokenizer": PLAIN, "pad_id": 0}
# ``b`` at step 2, ``a`` at 0, ``d`` at 1, ``c`` at 1, and one cell left masked.
SMALL = small_record(
    [1, 0, 3, 2, MASK],
    [2, 0, 1, 1, -1],
    uid="task/0@m",
    prompt_ids=[24, 24, 7, 8, 25],
    num_steps=4,
    seed=2**64 - 1,
    status="step_limit",
    meta={"method": "confidence", "task": "sums", "correct": True},
)


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


def test_rows_of_the_releases_say_which_step_wrote_each_position():
    """Positions 1, 2, 3 were written before position 0, to their left. LLaDA's order is TABOM's
    `default`; dLLM-RL has a step for every token and no tail."""
    row = tabom_row(SMALL, TOKENIZER)
    assert row["prompt"] == "hi", "without the template yy...z"
    assert row["response"] == "badc"
    assert row["response_token_ids"] == [1, 0, 3, 2, MASK]
    assert row["decoding_order"] == [2, 0, 1, 1, -1]
    assert row["non_ltr_positions"] == [1, 2, 3]
    assert (row["method"], row["data_source"]) == ("default", "sums")
    entry = step_map_row(SMALL, TOKENIZER)
    assert entry["prompt"] == "yyhiz", "with the template"
    assert (entry["response"], entry["step_map"], entry["reward"]) == ("badc", [2, 0, 1, 1], 1.0)
    gap = replace(SMALL, tokens=[1, MASK, 3, 2, MASK], commit_step=[2, -1, 1, 1, -1])
    with pytest.raises(ValueError, match="no step wrote position 1"):
        step_map_row(gap, TOKENIZER)
    kept = np.array([False] * 4 + [True])  # a template's last cell stood before the first step
    ended = replace(SMALL, tokens=[1, 0, 3, 2, 3], given=kept)
    with pytest.raises(ValueError, match="no step wrote position 4"):
        step_map_row(ended, TOKENIZER)


def test_what_the_other_formats_cannot_hold_leaves_no_file(tmp_path):
    records = [SMALL, random_record(np.random.default_rng(1), remask=0.5)]
    for make in (tabom_row, step_map_row):
        rows = (make(record, TOKENIZER) for record in records)
        with pytest.raises(ValueError, match="were overwritten, which this format cannot hold"):
            write_json_rows(rows, tmp_path / "rows", as_list=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_an_import_of_an_export_is_the_record(tmp_path, kind):
    shape = {"fill": 0.7, "given": 0.2} if kind == "jsonl" else {}
    records = [SMALL, *records_of(5, **shape)]
    make, again = (tabom_row, read_tabom) if kind == "jsonl" else (step_map_row, read_step_map)
    path, rows = tmp_path / "rows", (make(record, TOKENIZER) for record in records)
    assert write_json_rows(rows, path, as_list=kind == "json") == 6
    assert_all_same(records, again(path, ImportSettings()))


def test_an_import_of_a_parquet_export_keeps_signals_events_and_the_run(tmp_path):
    rng, path = np.random.default_rng(3), tmp_path / "rows.parquet"
    first = random_record(rng, "a", remask=0.4, signals=True)
    records = [first, random_record(rng, "b", given=0.4, fill=0.5), SMALL]
    assert write_parquet(records, path, run_text="{}") == 3
    rows, run_text = read_parquet(path)
    assert run_text == "{}"
    assert_all_same(records, rows)


def test_foreign_changed_and_damaged_parquet_is_refused_in_one_line(tmp_path):
    path = tmp_path / "other.parquet"
    write_parquet(records_of(3), path)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["tokens"][0] += 1
    at = table.schema.get_field_index("tokens")
    for changed, message in (
        (
            table.set_column(at, "tokens", pa.array([b"a", b"b", b"c"])),
            r"other\.parquet: .*'tokens' must be list<.*got binary",
        ),
        (pa.Table.from_pylist(rows, schema=table.schema), "content digest does not match"),
    ):
        pq.write_table(changed, path)
        with pytest.raises(ValueError, match=message):
            list(read_parquet(path)[0])
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"other\.parquet"):
        read_parquet(path)


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
