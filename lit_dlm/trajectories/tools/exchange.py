"""Writes records in other tools' formats: TABOM's JSONL, dLLM-RL's JSON, and Parquet, also read.

The first two hold the step that wrote each position, so neither can hold overwritten writes, and
the second cannot hold gaps. Both get extra fields (exact token ids, lengths, uids), which the other
tools ignore and :mod:`lit_dlm.trajectories.rows` reads back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.system.files import replacing
from lit_dlm.system.json_lines import Allowance
from lit_dlm.trajectories.format import COLUMNS, block_of, record_batch, records_of
from lit_dlm.trajectories.record import Trajectory, expect
from lit_dlm.trajectories.rows import located, non_ltr

_ROWS_PER_GROUP = 1024
_RELEASE_METHODS = {"confidence": "default"}
"""Names of our decoders in TABOM's release where they differ; its filters know no other names."""


def tabom_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Returns one line of TABOM's data (arXiv 2605.11854, release), with our own fields added.

    ``prompt`` is without the chat template, ``decoding_order`` has the step of each position (-1:
    none), ``non_ltr_positions`` are those in ``meta``, else those of
    :func:`lit_dlm.tensors.order.non_ltr_positions`.
    """
    order = record.commit_step
    computed = non_ltr(order).nonzero()[0].tolist()
    method = record.meta.get("method", "default")
    row = {
        "id": record.uid,
        "prompt": _user_text(record, tokenizer),
        "response": _text(record.tokens[record.tokens != record.mask_id], tokenizer),
        "response_token_ids": record.tokens.tolist(),
        "decoding_order": order.tolist(),
        "non_ltr_positions": record.meta.get("non_ltr_positions", computed),
        "method": _RELEASE_METHODS.get(method, method),
        "data_source": record.meta.get("task", ""),
        "prompt_token_ids": record.prompt_ids.tolist(),
        **_own_fields(record),
    }
    if record.given is not None:
        row["given_positions"] = np.flatnonzero(record.given).tolist()
    return row


def step_map_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Returns one entry of dLLM-RL's data (arXiv 2509.06949, release), with our own fields added.

    Masks after the last token are left out, just as the release cuts an ended response; other
    positions that no step wrote are refused. ``prompt`` has the chat template, ``step_map`` counts
    from 0, ``reward`` is present if the record was graded.
    """
    own = _own_fields(record)
    filled = np.flatnonzero(record.tokens != record.mask_id)
    length = int(filled[-1]) + 1 if len(filled) else 0
    gaps = np.flatnonzero(record.commit_step[:length] < 0)
    expect(
        not len(gaps),
        f"trajectory {record.uid!r}: a step_map needs a step for every position, but no step "
        f"wrote position {next(iter(gaps), None)}",
    )
    row = {
        "id": record.uid,
        "prompt": _text(record.prompt_ids, tokenizer),
        "response": _text(record.tokens[:length], tokenizer),
        "step_map": record.commit_step[:length].tolist(),
        "prompt_ids": record.prompt_ids.tolist(),
        "response_ids": record.tokens[:length].tolist(),
        "response_length": record.num_generated,
        **own,
    }
    reward = record.meta.get("score", record.meta.get("correct"))
    return row if reward is None else {**row, "reward": float(reward)}


def write_json_rows(rows: Iterable[dict[str, Any]], path: Path, *, as_list: bool) -> int:
    """Writes JSON objects, one per line or in a list with one per line; returns their number."""
    count = 0
    begin, between, end = ("[\n", ",\n", "\n]\n") if as_list else ("", "\n", "\n")
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(begin)
        for count, row in enumerate(rows, start=1):
            file.write(("" if count == 1 else between) + json.dumps(row, ensure_ascii=False))
        file.write(end)
    return count


def write_parquet(records: Iterable[Trajectory], path: Path, *, run_text: str | None = None) -> int:
    """Writes records as rows of a Parquet file; only features are lost.

    Columns and metadata are those of a block (:mod:`lit_dlm.trajectories.format`); the metadata
    also hold the run record of all rows, if it is given. Returns the number of rows.
    """
    # One type for all groups; a column that a group lacks is null there.
    kinds = {name: types[-1] for name, types in COLUMNS.items() if name != "kept_steps"}
    schema, file, count = pa.schema(list(kinds.items())), None, 0
    rows = (replace(record, features=None) for record in records)
    with replacing(path) as partial, ExitStack() as stack:
        # A row group is a block: records of one set of signals, at most so many.
        for _, alike in groupby(rows, key=lambda record: tuple(sorted(record.signals))):
            while group := list(islice(alike, _ROWS_PER_GROUP)):
                batch = record_batch(group)
                metadata = batch.schema.metadata | ({b"lit_dlm_run": run_text} if run_text else {})
                if file is None:
                    schema = schema.with_metadata(metadata)
                    file = stack.enter_context(
                        pq.ParquetWriter(partial, schema, compression="zstd", compression_level=9)
                    )
                is_same = schema.metadata == pa.schema([], metadata).metadata
                expect(is_same, f"{group[0].uid!r}: another mask id or vocabulary than before")
                # Concatenated with an empty table of all columns: those that it lacks become null.
                parts = [schema.empty_table(), pa.Table.from_batches([batch])]
                table = pa.concat_tables(parts, promote_options="permissive")
                file.write_table(table.select(schema.names).combine_chunks())
                count += len(group)
        if file is None:  # no record says what the metadata should be
            pq.write_table(schema.empty_table(), partial)
    return count


def read_parquet(path: Path) -> tuple[Iterator[Trajectory], str | None]:
    """Returns the records that :func:`write_parquet` wrote, and their run's text or ``None``."""
    with located(path):
        file = pq.ParquetFile(path)
        metadata = file.schema_arrow.metadata or {}

    def rows() -> Iterator[Trajectory]:
        for number in range(file.num_row_groups):
            # Equal values are stored once: first count what the metadata declare.
            group = file.metadata.row_group(number)
            values = [group.column(i).num_values for i in range(group.num_columns)]
            Allowance(path).take(8 * sum(values), 0)
            with located(f"{path}: row group {number}"):
                table = file.read_row_group(number).combine_chunks()
                # A column that is null in a whole group is one that its records lack.
                full = [c.name for c in table.schema if table[c.name].null_count < len(table)]
                batches = table.select(full).replace_schema_metadata(metadata).to_batches()
                records = [records_of(block_of(batch)) for batch in batches]
            yield from chain.from_iterable(records)

    run_text = metadata.get(b"lit_dlm_run")
    return rows(), None if run_text is None else run_text.decode(errors="replace")


def _own_fields(record: Trajectory) -> dict[str, Any]:
    """Fields that the other formats lack and an import needs."""
    count = 0 if record.superseded is None else len(record.superseded)
    expect(
        count == 0,
        f"trajectory {record.uid!r}: {count} of its writes were overwritten, "
        "which this format cannot hold; export to parquet",
    )
    names = ("num_steps", "mask_id", "vocab_size", "seed", "status", "meta")
    return {name: getattr(record, name) for name in names}


def _text(ids: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _user_text(record: Trajectory, tokenizer: Any) -> str:
    """The text of a prompt, without the chat template if it is a single user turn."""
    text = _text(record.prompt_ids, tokenizer)
    if getattr(tokenizer, "chat_template", None) is None:
        return text
    turns = [{"role": "user", "content": "\0"}]
    around = apply_chat_template(tokenizer, turns, tokenize=False, add_generation_prompt=True)
    # A prompt of several turns, or of another template, keeps its markers: they are part of it.
    before, found, after = str(around).partition("\0")
    if found and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return text
