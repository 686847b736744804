"""Exports records to the formats of other tools: TABOM's JSONL, dLLM-RL's JSON, and Parquet.

The first two hold one integer per response position, the step that wrote it, so they can hold
neither overwritten writes nor, for the second, gaps. Records that do not fit are refused by name.
Both get extra fields (exact token ids, lengths, ids) which the other tools ignore and
:mod:`~lit_dlm.trajectories.importers` reads back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.record import SIGNAL_DTYPES, Trajectory
from lit_dlm.trajectories.withheld import WithheldTrajectory

_ROWS_PER_GROUP = 1024
_RELEASE_METHODS = {"confidence": "default"}
"""What TABOM's release calls our decoders, where it differs; its filters know no other names."""


def tabom_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One line of TABOM's data (arXiv 2605.11854, release).

    Args:
        record: without overwritten writes.
        tokenizer: gives the texts; token ids stay authoritative.

    Returns:
        ``prompt`` (without the chat template), ``response``, ``response_token_ids``,
        ``decoding_order`` (position to step, -1 where no step wrote), ``non_ltr_positions``
        (those in ``meta``, else :func:`non_ltr_positions`), ``method``, ``data_source``, and our
        own fields.

    Raises:
        ValueError: the record does not fit the format.
    """
    _check_single_writes(record)
    order = record.commit_step
    computed = np.flatnonzero(non_ltr_positions(order)).tolist()
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


def non_ltr_positions(order: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Positions that some position to their left was written after.

    Args:
        order: ``(G,)`` int32 step of each position, -1 where no step wrote.

    Returns:
        ``(G,)`` bool; equal to :func:`lit_dlm.ops.cuts.non_ltr_positions`, without torch.
    """
    return (order >= 0) & (np.maximum.accumulate(order) > order)


def step_map_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One entry of dLLM-RL's training data (arXiv 2509.06949, release).

    Cells after the last written one are left out, as the release cuts an ended response.

    Args:
        record: without overwritten writes, given cells, or gaps before its last written cell.
        tokenizer: gives the texts.

    Returns:
        ``prompt`` (with the chat template), ``response``, ``step_map`` (steps from 0), ``reward``
        where the record was graded, and our own fields.

    Raises:
        ValueError: the record does not fit the format.
    """
    _check_single_writes(record)
    written = np.flatnonzero(record.commit_step >= 0)
    length = int(written[-1]) + 1 if len(written) else 0
    if len(written) < length:
        gap = int(np.flatnonzero(record.commit_step[:length] < 0)[0])
        raise ValueError(
            f"trajectory {record.uid!r}: a step_map needs a step for every position, but no step "
            f"wrote position {gap}"
        )
    row = {
        "id": record.uid,
        "prompt": _text(record.prompt_ids, tokenizer),
        "response": _text(record.tokens[:length], tokenizer),
        "step_map": record.commit_step[:length].tolist(),
        "prompt_ids": record.prompt_ids.tolist(),
        "response_ids": record.tokens[:length].tolist(),
        "response_length": record.num_generated,
        **_own_fields(record),
    }
    reward = record.meta.get("score", record.meta.get("correct"))
    return row if reward is None else {**row, "reward": float(reward)}


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Writes one JSON object per line, under another name until all of it is there.

    Returns:
        The number of rows.
    """

    def write(partial: Path) -> int:
        count = 0
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        return count

    return _replacing(path, write)


def write_json_list(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Writes one JSON list, one entry a line. Returns the number of rows."""

    def write(partial: Path) -> int:
        count = 0
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write("[\n" if count == 0 else ",\n")
                file.write(json.dumps(row, ensure_ascii=False))
                count += 1
            file.write("\n]\n" if count else "[]\n")
        return count

    return _replacing(path, write)


def write_parquet(records: Iterable[Trajectory], path: Path, *, run_text: str | None = None) -> int:
    """Writes records as rows of a Parquet file, zstd-compressed; nothing but features is lost.

    Args:
        records: the records.
        path: target file, replaced when all rows are written.
        run_text: run record of all rows, stored in the file's metadata.

    Returns:
        The number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema().with_metadata({"lit_dlm_run": run_text} if run_text else None)

    def write(partial: Path) -> int:
        count = 0
        with pq.ParquetWriter(partial, schema, compression="zstd", compression_level=9) as file:
            for group in _grouped(records):
                rows = [_parquet_row(record) for record in group]
                file.write_table(pa.Table.from_pylist(rows, schema=schema))
                count += len(rows)
        return count

    return _replacing(path, write)


def _schema() -> Any:
    import pyarrow as pa

    ints = pa.list_(pa.int32())
    write = pa.struct([("step", pa.int32()), ("position", pa.int32()), ("token", pa.int32())])
    signals = [
        (name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in SIGNAL_DTYPES.items()
    ]
    return pa.schema(
        [
            ("uid", pa.string()),
            ("prompt_ids", ints),
            ("tokens", ints),
            ("commit_step", ints),
            ("num_steps", pa.int32()),
            ("mask_id", pa.int32()),
            ("vocab_size", pa.int32()),
            ("seed", pa.uint64()),
            ("status", pa.string()),
            ("given", pa.list_(pa.bool_())),
            ("superseded", pa.list_(write)),
            ("meta", pa.string()),
            ("digest", pa.binary(16)),
            *signals,
        ]
    )


def _parquet_row(record: Trajectory) -> dict[str, Any]:
    _check_prompt(record)
    writes = None
    if record.superseded is not None:
        names = ("step", "position", "token")
        writes = [dict(zip(names, write, strict=True)) for write in record.superseded.tolist()]
    return {
        "uid": record.uid,
        "prompt_ids": record.prompt_ids,
        "tokens": record.tokens,
        "commit_step": record.commit_step,
        "num_steps": record.num_steps,
        "mask_id": record.mask_id,
        "vocab_size": record.vocab_size,
        "seed": record.seed,
        "status": record.status,
        "given": record.given,
        "superseded": writes,
        "meta": json.dumps(record.meta, ensure_ascii=False, sort_keys=True),
        "digest": record.digest(),
        **record.signals,
    }


def _grouped(records: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    rest = iter(records)
    while group := list(islice(rest, _ROWS_PER_GROUP)):
        yield group


def _own_fields(record: Trajectory) -> dict[str, Any]:
    """What the other formats lack and an import needs."""
    return {
        "num_steps": record.num_steps,
        "mask_id": record.mask_id,
        "vocab_size": record.vocab_size,
        "seed": record.seed,
        "status": record.status,
        "meta": record.meta,
    }


def _check_single_writes(record: Trajectory) -> None:
    _check_prompt(record)
    if record.superseded is not None:
        raise ValueError(
            f"trajectory {record.uid!r}: {len(record.superseded)} of its writes were overwritten, "
            "which this format cannot hold; export to parquet"
        )


def _check_prompt(record: Trajectory) -> None:
    if isinstance(record, WithheldTrajectory):
        raise ValueError(f"trajectory {record.uid!r}: its prompt is withheld, nothing to export")


def _text(ids: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _user_text(record: Trajectory, tokenizer: Any) -> str:
    """The prompt without the chat template around it, where it is one user turn."""
    text = _text(record.prompt_ids, tokenizer)
    if getattr(tokenizer, "chat_template", None) is None:
        return text
    around = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = str(around).partition("\0")
    if found and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return text


def _replacing(path: Path, write: Callable[[Path], int]) -> int:
    """Lets ``write`` fill another file and moves it over ``path`` when that has succeeded."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        count = write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count
