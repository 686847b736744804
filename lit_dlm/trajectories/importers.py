"""Imports records from the formats of other tools: TABOM's JSONL, dLLM-RL's JSON, and Parquet.

Token ids in a row win over its texts. A row with texts only is tokenised, and refused when the
number of tokens is not that of its steps: re-tokenised text is the known source of shifted step
maps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_dlm.trajectories.record import SIGNAL_DTYPES, Status, Trajectory

_PROMPT_KEYS = ("prompt", "instruction", "question")
_RESPONSE_KEYS = ("response", "output", "gen_text", "answer")


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What rows of other tools do not say."""

    mask_id: int | None = None
    """Id of the mask token, for rows without ``mask_id``."""
    vocab_size: int | None = None
    """Bound of the token ids, for rows without ``vocab_size``."""
    tokenizer: Any = None
    """For rows without token ids."""
    first_step: int = 0
    """Number that the source gives to its first step: 1 for dLLM-RL's block models."""


def read_tabom(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads TABOM's JSONL (``decoding_order``).

    Positions with order -1 were never decoded; they become masks, whatever id pads them there.

    Args:
        path: the file, one JSON object a line.
        settings: what the rows do not say.

    Yields:
        One record per row, in order.

    Raises:
        ValueError: naming the file and line: a field is missing or does not fit.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _object(where, line)
            if "decoding_order" not in row:
                raise ValueError(f"{where}: the row has no decoding_order")
            order = _integers(where, "decoding_order", row["decoding_order"])
            prompt = _prompt_ids(where, row, "prompt_token_ids", settings, templated=False)
            tokens = _response_ids(where, row, "response_token_ids", settings)
            if len(order) < len(tokens):
                raise ValueError(
                    f"{where}: decoding_order has {len(order)} entries for {len(tokens)} tokens"
                )
            given = np.zeros(len(tokens), dtype=bool)
            given[_integers(where, "given_positions", row.get("given_positions", []))] = True
            yield _record(where, row, settings, path, number, prompt, tokens, order, given)


def read_step_map(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads dLLM-RL's JSON list of ``{prompt, response, step_map, reward}``.

    Args and errors are those of :func:`read_tabom`.

    Yields:
        One record per entry, in order.
    """
    rows = _parsed(str(path), path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        where = f"{path}: entry {number}"
        if not isinstance(row, dict) or "step_map" not in row:
            raise ValueError(f"{where}: expected an object with a step_map")
        steps = _integers(where, "step_map", row["step_map"]) - settings.first_step
        prompt = _prompt_ids(where, row, "prompt_ids", settings, templated=True)
        tokens = _response_ids(where, row, "response_ids", settings)
        if len(steps) != len(tokens) or (len(steps) and steps.min() < 0):
            raise ValueError(
                f"{where}: step_map has {len(steps)} entries (from {settings.first_step}) for "
                f"{len(tokens)} tokens"
            )
        length = max(int(row.get("response_length", 0)), len(tokens))
        mask_id = _fact(where, row, "mask_id", settings.mask_id)
        padding = length - len(tokens)
        tokens = np.concatenate([tokens, np.full(padding, mask_id)])
        steps = np.concatenate([steps, np.full(padding, -1)])
        given = np.zeros(length, dtype=bool)
        yield _record(where, row, settings, path, number, prompt, tokens, steps, given)


def read_parquet(path: Path) -> tuple[Iterator[Trajectory], str | None]:
    """Reads what :func:`lit_dlm.trajectories.exporters.write_parquet` wrote.

    Returns:
        The records, and the run record's text where the file has one.

    Raises:
        ValueError: the file is not Parquet, lacks a column, or a row's digest does not match.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    missing = [name for name in _PARQUET_COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(f"{path}: not an export of trajectories, it lacks {missing}")
    run_text = (file.schema_arrow.metadata or {}).get(b"lit_dlm_run")

    def rows() -> Iterator[Trajectory]:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield _from_parquet(path, row)

    return rows(), None if run_text is None else run_text.decode()


_PARQUET_COLUMNS = (
    "uid",
    "prompt_ids",
    "tokens",
    "commit_step",
    "num_steps",
    "mask_id",
    "vocab_size",
    "seed",
    "status",
    "given",
    "superseded",
    "meta",
    "digest",
)


def _from_parquet(path: Path, row: Mapping[str, Any]) -> Trajectory:
    writes = row["superseded"]
    record = Trajectory(
        uid=row["uid"],
        prompt_ids=np.array(row["prompt_ids"], dtype=np.int32),
        tokens=np.array(row["tokens"], dtype=np.int32),
        commit_step=np.array(row["commit_step"], dtype=np.int32),
        num_steps=row["num_steps"],
        mask_id=row["mask_id"],
        vocab_size=row["vocab_size"],
        seed=row["seed"],
        status=row["status"],
        given=None if row["given"] is None else np.array(row["given"], dtype=bool),
        superseded=None
        if writes is None
        else np.array([[w["step"], w["position"], w["token"]] for w in writes], dtype=np.int32),
        signals={
            name: np.array(row[name], dtype=dtype)
            for name, dtype in SIGNAL_DTYPES.items()
            if row.get(name) is not None
        },
        meta=json.loads(row["meta"]),
    )
    record.validate()
    if record.digest() != row["digest"]:
        raise ValueError(
            f"{path}: trajectory {record.uid!r}: content digest {row['digest'].hex()} recorded, "
            f"{record.digest().hex()} now"
        )
    return record


def _record(
    where: str,
    row: Mapping[str, Any],
    settings: ImportSettings,
    path: Path,
    number: int,
    prompt: Any,
    tokens: Any,
    order: Any,
    given: Any,
) -> Trajectory:
    """A record from one row; steps of -1 become masks, except in given cells."""
    mask_id = _fact(where, row, "mask_id", settings.mask_id)
    order = np.where(given, -1, order[: len(tokens)])
    tokens = np.where((order < 0) & ~given, mask_id, tokens)
    num_steps = int(row.get("num_steps", order.max(initial=-1) + 1))
    status: Status = row.get("status") or (
        "complete" if (tokens != mask_id).all() else "step_limit"
    )
    meta = dict(row.get("meta") or {})
    for key, name in (("method", "method"), ("data_source", "task"), ("reward", "score")):
        if row.get(key) not in (None, "") and not meta and "meta" not in row:
            meta[name] = row[key]
    record = Trajectory(
        uid=str(row.get("id", f"{path.stem}/{number}")),
        prompt_ids=prompt,
        tokens=tokens,
        commit_step=order,
        num_steps=num_steps,
        mask_id=mask_id,
        vocab_size=_fact(where, row, "vocab_size", settings.vocab_size),
        seed=int(row.get("seed", 0)),
        status=status,
        given=given,
        meta=meta,
    )
    try:
        record.validate()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return record


def _object(where: str, line: str) -> dict[str, Any]:
    row = _parsed(where, line)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def _integers(where: str, name: str, values: Any) -> Any:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{where}: {name} must be a list of integers")
    return np.array(values, dtype=np.int64)


def _fact(where: str, row: Mapping[str, Any], name: str, default: int | None) -> int:
    value = row.get(name, default)
    if value is None:
        raise ValueError(f"{where}: the row has no {name}; give --{name}")
    return int(value)


def _prompt_ids(
    where: str, row: Mapping[str, Any], ids_key: str, settings: ImportSettings, *, templated: bool
) -> Any:
    """Prompt ids of a row; texts pass through the chat template unless they already did."""
    if ids_key in row:
        return _integers(where, ids_key, row[ids_key])
    text = _first_text(where, row, _PROMPT_KEYS)
    tokenizer = _tokenizer(where, ids_key, settings)
    if templated or getattr(tokenizer, "chat_template", None) is None:
        return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return np.array(ids, dtype=np.int64)


def _response_ids(
    where: str, row: Mapping[str, Any], ids_key: str, settings: ImportSettings
) -> Any:
    if ids_key in row:
        return _integers(where, ids_key, row[ids_key])
    text = _first_text(where, row, _RESPONSE_KEYS)
    tokenizer = _tokenizer(where, ids_key, settings)
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def _first_text(where: str, row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if isinstance(row.get(key), str):
            return str(row[key])
    raise ValueError(f"{where}: expected one of the texts {', '.join(keys)}")


def _tokenizer(where: str, ids_key: str, settings: ImportSettings) -> Any:
    if settings.tokenizer is None:
        raise ValueError(f"{where}: the row has no {ids_key}; give --tokenizer to use its texts")
    return settings.tokenizer
