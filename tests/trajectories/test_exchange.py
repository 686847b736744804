"""Exports say what the other tools read, and an import of an export is the record again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_dlm.trajectories.exchange import (
    ImportSettings,
    read_parquet,
    read_step_map,
    read_tabom,
    step_map_row,
    tabom_row,
    write_json_list,
    write_jsonl,
    write_parquet,
)
from lit_dlm.trajectories.record import Trajectory
from tests.trajectories.samples import MASK, VOCAB, assert_same, random_record, records_of

pytestmark = pytest.mark.slow  # whole commands on real shards


class Letters:
    """A tokenizer of one letter per id."""

    chat_template = "[{}]"

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def apply_chat_template(self, turns: list[dict], **options: Any) -> Any:
        text = f"yy{turns[0]['content']}z"
        return text if options.get("tokenize") is False else self.encode(text)


TOKENIZER = Letters()


def small_record(**changes: Any) -> Trajectory:
    """Five positions: ``b`` at step 2, ``a`` at 0, ``d`` at 1, ``c`` at 1, and one left masked."""
    values: dict[str, Any] = {
        "uid": "task/0@m",
        "prompt_ids": [24, 24, 7, 8, 25],
        "tokens": [1, 0, 3, 2, MASK],
        "commit_step": [2, 0, 1, 1, -1],
        "num_steps": 4,
        "mask_id": MASK,
        "vocab_size": VOCAB,
        "seed": 11,
        "status": "step_limit",
        "meta": {"method": "entropy", "task": "sums", "correct": True},
    }
    return Trajectory(**{**values, **changes})


def test_a_row_of_tabom_is_a_map_from_position_to_step() -> None:
    """Positions 1, 2, 3 were written after none, position 0 after step 2 ... so 1 to 3 are out of
    left-to-right order: position 0, to their left, came later (2 > 0, 1, 1)."""
    row = tabom_row(small_record(), TOKENIZER)
    assert row["prompt"] == "hi", "without the template yy...z"
    assert row["response"] == "badc"
    assert row["response_token_ids"] == [1, 0, 3, 2, MASK]
    assert row["decoding_order"] == [2, 0, 1, 1, -1]
    assert row["non_ltr_positions"] == [1, 2, 3]
    assert (row["method"], row["data_source"]) == ("entropy", "sums")


def test_a_row_of_tabom_names_the_method_as_the_release_filters_it(tmp_path: Path) -> None:
    """LLaDA's order is the release's `default`; our own name comes back on import."""
    record = small_record(meta={"method": "confidence", "task": "sums"})
    row = tabom_row(record, TOKENIZER)
    assert row["method"] == "default"
    write_jsonl([row], tmp_path / "rows.jsonl")
    (again,) = read_tabom(tmp_path / "rows.jsonl", ImportSettings())
    assert again.meta["method"] == "confidence"


def test_an_entry_of_dllm_rl_has_a_step_for_every_token_and_no_tail() -> None:
    row = step_map_row(small_record(), TOKENIZER)
    assert row["prompt"] == "yyhiz", "with the template"
    assert row["response"] == "badc"
    assert row["step_map"] == [2, 0, 1, 1]
    assert row["reward"] == 1.0
    with pytest.raises(ValueError, match="no step wrote position 1"):
        step_map_row(
            small_record(tokens=[1, MASK, 3, 2, MASK], commit_step=[2, -1, 1, 1, -1]), TOKENIZER
        )


def test_overwritten_writes_do_not_fit_and_are_not_dropped() -> None:
    record = random_record(np.random.default_rng(1), remask=0.5)
    for row in (tabom_row, step_map_row):
        with pytest.raises(ValueError, match="were overwritten, which this format cannot hold"):
            row(record, TOKENIZER)


def fitting(rng: np.random.Generator, count: int, **shape: Any) -> list[Trajectory]:
    return [random_record(rng, f"s/{i}", **shape) for i in range(count)]


def test_an_import_of_a_jsonl_export_is_the_record(tmp_path: Path) -> None:
    records = fitting(np.random.default_rng(2), 6, fill=0.7, given=0.2)
    path = tmp_path / "rows.jsonl"
    assert write_jsonl((tabom_row(r, TOKENIZER) for r in records), path) == 6
    for before, after in zip(records, read_tabom(path, ImportSettings()), strict=True):
        assert_same(before, after)


def test_an_import_of_a_step_map_export_is_the_record(tmp_path: Path) -> None:
    records = [small_record(), *fitting(np.random.default_rng(2), 5)]
    path = tmp_path / "rows.json"
    assert write_json_list((step_map_row(r, TOKENIZER) for r in records), path) == 6
    assert isinstance(json.loads(path.read_text()), list)
    for before, after in zip(records, read_step_map(path, ImportSettings()), strict=True):
        assert_same(before, after)


def test_an_import_of_a_parquet_export_keeps_signals_events_and_the_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    records = [
        random_record(rng, "a", remask=0.4, signals=True),
        random_record(rng, "b", given=0.4, fill=0.5),
        small_record(seed=2**64 - 1),
    ]
    path = tmp_path / "rows.parquet"
    assert write_parquet(records, path, run_text="{}") == 3
    rows, run_text = read_parquet(path)
    assert run_text == "{}"
    for before, after in zip(records, rows, strict=True):
        assert_same(before, after)


def test_rows_of_other_tools_are_tokenised_only_when_they_have_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "foreign.jsonl"
    rows = [
        {
            "instruction": "hi",
            "output": "abcd",
            "decoding_order": [0, 2, -1, 1],
            "method": "credit",
        },
        {"question": "hi", "response": "x", "response_token_ids": [4, 5], "decoding_order": [1, 0]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = ImportSettings(mask_id=MASK, vocab_size=VOCAB, tokenizer=TOKENIZER)
    first, second = read_tabom(path, settings)
    assert first.uid == "foreign/1"
    assert first.prompt_ids.tolist() == [24, 24, 7, 8, 25]
    assert first.tokens.tolist() == [0, 1, MASK, 3], "what was never decoded is a mask"
    assert (first.num_steps, first.status) == (3, "step_limit")
    assert first.meta == {"method": "credit"}
    assert second.tokens.tolist() == [4, 5]


def test_a_step_map_that_counts_from_one_is_brought_to_zero(tmp_path: Path) -> None:
    path = tmp_path / "block.json"
    path.write_text(json.dumps([{"prompt": "yya", "response": "abc", "step_map": [1, 1, 2]}]))
    settings = ImportSettings(mask_id=MASK, vocab_size=VOCAB, tokenizer=TOKENIZER)
    (record,) = read_step_map(path, settings)
    assert record.commit_step.tolist() == [0, 0, 1]
    assert (record.num_steps, record.status) == (2, "complete")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": "ab"}, "the row has no decoding_order"),
        ({"prompt": "a", "response": "ab", "decoding_order": [0]}, "has 1 entries for 2 tokens"),
        ({"prompt": "a", "response": "ab", "decoding_order": "01"}, "must be a list of integers"),
        ({"prompt": "a", "decoding_order": [0]}, "expected one of the texts response"),
        ({"response": "a", "decoding_order": [0]}, "expected one of the texts prompt"),
        ([1], "expected a JSON object, got list"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, row: Any, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n")
    settings = ImportSettings(mask_id=MASK, vocab_size=VOCAB, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{message}"):
        list(read_tabom(path, settings))


def test_what_the_rows_do_not_say_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt_ids": [1], "response_ids": [2], "step_map": [0]}]))
    with pytest.raises(ValueError, match="entry 0: the row has no mask_id; give --mask_id"):
        list(read_step_map(path, ImportSettings()))
    path.write_text(json.dumps([{"prompt": "a", "response": "b", "step_map": [0]}]))
    with pytest.raises(ValueError, match="no prompt_ids; give --tokenizer"):
        list(read_step_map(path, ImportSettings(mask_id=9, vocab_size=50)))
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        list(read_step_map(path, ImportSettings()))


def test_a_changed_parquet_row_does_not_pass(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    write_parquet([small_record()], path)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["tokens"][0] += 1
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    with pytest.raises(ValueError, match="content digest does not match"):
        list(read_parquet(path)[0])
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a Parquet file"):
        read_parquet(path)


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    records = [small_record(), random_record(np.random.default_rng(1), remask=0.5)]
    with pytest.raises(ValueError, match="were overwritten"):
        write_jsonl((tabom_row(r, TOKENIZER) for r in records), tmp_path / "rows.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_length", 2**32),
        ("response_length", 10**30),
        ("mask_id", 10**30),
        ("vocab_size", 2**40),
        ("num_steps", 10**30),
        ("seed", -1),
        ("step_map", [10**30, 0, 1]),
    ],
)
def test_wild_numbers_are_named_and_take_no_memory(tmp_path: Path, name: str, value: Any) -> None:
    row = {"prompt_ids": [3], "response_ids": [3, 4, 3], "step_map": [0, 1, 2]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**row, name: value}]))
    with pytest.raises(ValueError, match=rf"rows\.json: entry 0: .*{name}"):
        list(read_step_map(path, ImportSettings(mask_id=2, vocab_size=9)))


def test_a_padding_id_that_no_array_holds_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt_token_ids": [3], "response_token_ids": [3], "decoding_order": [0, 1]}
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: pad_id"):
        list(read_tabom(path, ImportSettings(mask_id=2, vocab_size=9, pad_id=10**30)))


def test_foreign_and_damaged_parquet_is_refused_in_one_line(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    write_parquet(records_of(3), good)
    table = pq.read_table(good)
    at = table.schema.get_field_index("tokens")
    other = table.set_column(at, "tokens", pa.array([b"a", b"b", b"c"]))
    path = tmp_path / "other.parquet"
    pq.write_table(other, path)
    with pytest.raises(ValueError, match=r"other\.parquet: .*'tokens' must be list<.*got binary"):
        list(read_parquet(path)[0])
    data = good.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(4, len(data), 60):
        path.write_bytes(data[:at] + bytes([data[at] ^ 85]) + data[at + 1 :])
        try:
            list(read_parquet(path)[0])
        except ValueError as error:
            assert str(path) in str(error) or "trajectory" in str(error)  # noqa: PT017
