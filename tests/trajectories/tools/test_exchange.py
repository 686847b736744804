"""Exports say what the other tools read, and an import of an export is the record again."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
    Letters,
    assert_all_same,
    random_record,
    records_of,
    small_record,
)

TOKENIZER = Letters()
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
    many = pa.array([np.zeros(9_000_000, np.int32)] * 3, table.schema.field("tokens").type)
    pq.write_table(table.set_column(at, table.schema.field("tokens"), many), path)
    with pytest.raises(ValueError, match=r"other\.parquet: expected rows of at most .* MiB"):
        list(read_parquet(path)[0])
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"other\.parquet"):
        read_parquet(path)
