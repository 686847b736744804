"""Records in the formats of other tools: TABOM's JSONL, dLLM-RL's JSON, and Parquet.

The first two hold one integer per response position, the step that wrote it, so they can hold
neither overwritten writes nor, for the second, gaps. Records that do not fit are refused by name.
Both get extra fields (exact token ids, lengths, ids), which the other tools ignore and an import
reads back.

Token ids in a row win over its texts. A row with texts only is tokenised, and refused when the
number of tokens is not that of its steps: re-tokenised text is the known source of shifted step
maps. Ids that end before the steps do are padded, as TABOM's release pads them.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.record import MAX_LENGTH, RecordStatus, Trajectory

_ROWS_PER_GROUP = 1024
_RELEASE_METHODS = {"confidence": "default"}
"""What TABOM's release calls our decoders, where it differs; its filters know no other names."""


def tabom_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One line of TABOM's data (arXiv 2605.11854, release), and our own fields.

    ``prompt`` is without the chat template, ``decoding_order`` has the step of each position (-1:
    none), ``non_ltr_positions`` are those in ``meta``, else those of
    :func:`lit_dlm.ops.cuts.non_ltr_positions`.
    """
    _check_single_writes(record)
    order = record.commit_step
    computed = _non_ltr(order).nonzero()[0].tolist()
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


def _non_ltr(order: NDArray[np.int32]) -> NDArray[np.bool_]:
    import torch  # here: most of the exchange does without

    from lit_dlm.ops.cuts import non_ltr_positions

    return non_ltr_positions(torch.from_numpy(order)).numpy()


def step_map_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One entry of dLLM-RL's training data (arXiv 2509.06949, release), and our own fields.

    Cells after the last written one are left out, as the release cuts an ended response; gaps
    before it are refused. ``prompt`` has the chat template, ``step_map`` counts from 0, ``reward``
    is there where the record was graded.
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
    """Writes one JSON object per line; returns the number of rows."""
    with _replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        count = 0
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def write_json_list(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Writes one JSON list, one entry a line. Returns the number of rows."""
    count = 0
    with _replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, start=1):
            file.write("[\n" if count == 1 else ",\n")
            file.write(json.dumps(row, ensure_ascii=False))
        file.write("\n]\n" if count else "[]\n")
    return count


def write_parquet(records: Iterable[Trajectory], path: Path, *, run_text: str | None = None) -> int:
    """Writes records as rows of a Parquet file; nothing but features is lost.

    The columns are those of a block (:mod:`lit_dlm.trajectories.format`), and so are the metadata,
    with the run record of all rows beside them. Returns the number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lit_dlm.trajectories.format import COLUMNS, record_batch

    # One type for all groups; a column that a group lacks is null there.
    kinds = {name: types[-1] for name, types in COLUMNS.items() if name != "kept_steps"}
    schema, file, count = pa.schema(list(kinds.items())), None, 0
    rows = (replace(record, features=None) for record in records)
    with _replacing(path) as partial, ExitStack() as stack:
        for _, alike in groupby(rows, key=lambda record: tuple(sorted(record.signals))):
            while group := list(islice(alike, _ROWS_PER_GROUP)):
                batch = record_batch(group)
                facts = batch.schema.metadata | ({b"lit_dlm_run": run_text} if run_text else {})
                if file is None:
                    schema = schema.with_metadata(facts)
                    file = stack.enter_context(
                        pq.ParquetWriter(partial, schema, compression="zstd", compression_level=9)
                    )
                elif schema.metadata != pa.schema([], facts).metadata:
                    raise ValueError(f"{group[0].uid!r}: another mask id or vocabulary than before")
                columns = [
                    batch.column(name).cast(kind)
                    if name in batch.schema.names
                    else pa.nulls(len(group), kind)
                    for name, kind in kinds.items()
                ]
                file.write_table(pa.Table.from_arrays(columns, schema=schema))
                count += len(group)
        if file is None:
            pq.write_table(schema.empty_table(), partial)
    return count


def _own_fields(record: Trajectory) -> dict[str, Any]:
    """What the other formats lack and an import needs."""
    names = ("num_steps", "mask_id", "vocab_size", "seed", "status", "meta")
    return {name: getattr(record, name) for name in names}


def _check_single_writes(record: Trajectory) -> None:
    if record.superseded is not None:
        raise ValueError(
            f"trajectory {record.uid!r}: {len(record.superseded)} of its writes were overwritten, "
            "which this format cannot hold; export to parquet"
        )


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


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Gives another file to fill, and moves it over ``path`` when that has succeeded."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# -- import ----------------------------------------------------------------------------------------

_PROMPT_KEYS = ("prompt", "instruction", "question")
_RESPONSE_KEYS = ("response", "output", "gen_text", "answer")


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What rows of other tools do not say."""

    mask_id: int | None = None  # id of the mask token, for rows without mask_id
    vocab_size: int | None = None  # bound of the token ids, for rows without vocab_size
    tokenizer: Any = None  # for rows without token ids
    pad_id: int | None = None  # id behind token ids that end before the steps of their row do
    missing_order: Literal["none", "ltr"] = "none"
    """``ltr`` takes the ids of a row from left to right where its ``decoding_order`` is missing or
    shorter than they are; ``none`` refuses such a row."""


def read_tabom(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads TABOM's JSONL (``decoding_order``), also gzipped; errors name the file and line.

    Positions with order -1 were never decoded; they become masks, whatever id pads them there.
    Where a row's ``non_ltr_positions`` are not what its order gives, ``meta`` keeps them.
    """
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        row = json_object(where, parsed_json(where, line))
        prompt = _prompt_ids(where, row, "prompt_token_ids", settings, templated=False)
        tokens = _response_ids(where, row, "response_token_ids", settings)
        row, tokens, order = _ordered(where, row, tokens, settings)
        given = _cells(where, row, "given_positions", len(tokens))
        record = _record(where, row, settings, path, number, prompt, tokens, order, given)
        if row.get("non_ltr_positions") is not None:
            listed = _cells(where, row, "non_ltr_positions", len(tokens))
            if not np.array_equal(listed, _non_ltr(record.commit_step)):
                record = record.with_meta(non_ltr_positions=np.flatnonzero(listed).tolist())
        yield record


def _ordered(
    where: str, row: dict[str, Any], tokens: Any, settings: ImportSettings
) -> tuple[dict[str, Any], Any, Any]:
    """The row, its tokens and their order, as many entries as tokens."""
    order = None
    if row.get("decoding_order") is not None:
        order = _integers(where, "decoding_order", row["decoding_order"])
    has_ids = "response_token_ids" in row
    found = (
        "the row has no decoding_order"
        if order is None
        else f"decoding_order has {len(order)} entries"
    )
    found = f"{where}: {found} for {len(tokens)} tokens"
    if order is None or len(order) < len(tokens):
        if settings.missing_order != "ltr":
            raise ValueError(
                f"{found}; only training with the data's missing_order: ltr takes such a row"
            )
        if not has_ids:
            # Its text does not say where the answer ends.
            raise ValueError(f"{found}, and no response_token_ids; read it as a ResponsesFile")
        # What the row says of its decode is not of this order.
        kept = {k: v for k, v in row.items() if k not in ("num_steps", "non_ltr_positions")}
        return kept, tokens, np.arange(len(tokens))
    if len(order) > len(tokens):
        if not has_ids:
            raise ValueError(f"{found} of its text; expected equal numbers or response_token_ids")
        pad_id = _fact(where, row, "pad_id", settings.pad_id)
        tokens = np.concatenate([tokens, np.full(len(order) - len(tokens), pad_id)])
    return row, tokens, order


def read_step_map(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads dLLM-RL's JSON list of ``{prompt, response, step_map, reward}``."""
    rows = parsed_json(str(path), path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        where = f"{path}: entry {number}"
        if not isinstance(row, dict) or "step_map" not in row:
            raise ValueError(f"{where}: expected an object with a step_map")
        steps = _integers(where, "step_map", row["step_map"])
        if "num_steps" not in row and (steps >= 0).all():  # dLLM-RL's block models count from 1
            steps = steps - steps.min(initial=2**31)
        prompt = _prompt_ids(where, row, "prompt_ids", settings, templated=True)
        tokens = _response_ids(where, row, "response_ids", settings)
        if len(steps) != len(tokens) or (len(steps) and steps.min() < 0):
            raise ValueError(
                f"{where}: step_map has {len(steps)} entries of 0 or more for {len(tokens)} tokens"
            )
        length = max(_whole(where, row, "response_length", 0), len(tokens))
        if length > MAX_LENGTH:
            raise ValueError(
                f"{where}: response_length: expected at most {MAX_LENGTH}, got {length}"
            )
        mask_id = _fact(where, row, "mask_id", settings.mask_id)
        padding = length - len(tokens)
        tokens = np.concatenate([tokens, np.full(padding, mask_id)])
        steps = np.concatenate([steps, np.full(padding, -1)])
        given = np.zeros(length, dtype=bool)
        yield _record(where, row, settings, path, number, prompt, tokens, steps, given)


def read_parquet(path: Path) -> tuple[Iterator[Trajectory], str | None]:
    """The records that :func:`write_parquet` wrote, and their run's text where the file has one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lit_dlm.trajectories.format import block_of, records_of

    try:
        file = pq.ParquetFile(path)
        facts = file.schema_arrow.metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error

    def rows() -> Iterator[Trajectory]:
        for number in range(file.num_row_groups):
            try:
                table = file.read_row_group(number).combine_chunks()
                full = [c.name for c in table.schema if table[c.name].null_count < len(table)]
                for batch in table.select(full).to_batches():
                    yield from records_of(block_of(batch.replace_schema_metadata(facts)))
            except (pa.ArrowException, OSError, TrajectoryFormatError) as error:
                raise ValueError(f"{path}: row group {number}: {error}") from error

    run_text = facts.get(b"lit_dlm_run")
    return rows(), None if run_text is None else run_text.decode(errors="replace")


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
    order = np.where(given, -1, order)
    tokens = np.where((order < 0) & ~given, mask_id, tokens)
    status: RecordStatus = row.get("status") or (
        "complete" if (tokens != mask_id).all() else "step_limit"
    )
    record = Trajectory(
        uid=str(row.get("id", f"{Path(path.name.removesuffix('.gz')).stem}/{number}")),
        prompt_ids=prompt,
        tokens=tokens,
        commit_step=order,
        num_steps=_whole(where, row, "num_steps", int(order.max(initial=-1)) + 1),
        mask_id=mask_id,
        vocab_size=_fact(where, row, "vocab_size", settings.vocab_size),
        seed=_whole(where, row, "seed", 0),
        status=status,
        given=given,
        meta=_meta(where, row),
    )
    try:
        record.validate()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return record


def _meta(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` of an export of ours, else what the other tools' fields say."""
    if row.get("meta") is not None:
        if not isinstance(row["meta"], dict):
            raise ValueError(f"{where}: meta must be an object, got {type(row['meta']).__name__}")
        return dict(row["meta"])
    named = (("method", "method"), ("data_source", "task"), ("reward", "score"))
    meta = {name: row[key] for key, name in named if row.get(key) not in (None, "")}
    correct = row.get("correct")
    if correct is not None:
        if correct not in (0, 1):
            raise ValueError(f"{where}: correct must be true, false or null, got {correct!r}")
        meta["correct"] = bool(correct)
    return meta


def json_object(where: str, value: Any) -> dict[str, Any]:
    """A value of JSON that must be an object; ``where`` it stands is for the error."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parsed_json(where: str, text: bytes) -> Any:
    """What JSON of others says, in UTF-8."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also where the bytes are no text
        raise ValueError(f"{where}: not valid JSON ({error})") from None


def _integers(where: str, name: str, values: Any) -> Any:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{where}: {name} must be a list of integers")
    for value in values:
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{where}: {name} holds {value}, which has more than 32 bits")
    return np.array(values, dtype=np.int64)


def _cells(where: str, row: Mapping[str, Any], name: str, length: int) -> Any:
    """``(length,)`` bool, ``True`` at the positions that a field lists."""
    positions = _integers(where, name, row.get(name) or [])
    outside = positions[(positions < 0) | (positions >= length)]
    if len(outside):
        raise ValueError(
            f"{where}: {name} holds {outside[0]}, expected positions below {length}, "
            "the number of tokens"
        )
    cells = np.zeros(length, dtype=bool)
    cells[positions] = True
    return cells


def _whole(where: str, row: Mapping[str, Any], name: str, default: int) -> int:
    value = row.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise ValueError(f"{where}: {name} must be an integer, got {value!r}")
    if not 0 <= value < 2**64:
        raise ValueError(f"{where}: {name} must be in 0..2**64-1, got {value}")
    return value


def _fact(where: str, row: Mapping[str, Any], name: str, default: int | None) -> int:
    if row.get(name) is None and default is None:
        raise ValueError(f"{where}: the row has no {name}; give --{name}")
    value = _whole(where, row, name, default or 0)
    if value >= 2**31:  # they become elements of arrays
        raise ValueError(f"{where}: {name}: expected less than 2**31, got {value}")
    return value


def _prompt_ids(
    where: str, row: Mapping[str, Any], ids_key: str, settings: ImportSettings, *, templated: bool
) -> Any:
    """Prompt ids of a row; texts pass through the chat template unless they already did."""
    if ids_key in row:
        return _integers(where, ids_key, row[ids_key])
    text = _first_text(where, row, _PROMPT_KEYS, role="user")
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
    text = _first_text(where, row, _RESPONSE_KEYS, role="assistant")
    tokenizer = _tokenizer(where, ids_key, settings)
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def _first_text(where: str, row: Mapping[str, Any], keys: tuple[str, ...], *, role: str) -> str:
    """The first text of a row, or the first turn of a role in its ``messages``."""
    for key in keys:
        if isinstance(row.get(key), str):
            return str(row[key])
    turns = row.get("messages")
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict) and turn.get("role") == role:
            if isinstance(turn.get("content"), str):
                return str(turn["content"])
            break
    raise ValueError(
        f"{where}: expected one of the texts {', '.join(keys)}, or a turn of the {role} in messages"
    )


def _tokenizer(where: str, ids_key: str, settings: ImportSettings) -> Any:
    if settings.tokenizer is None:
        raise ValueError(f"{where}: the row has no {ids_key}; give --tokenizer to use its texts")
    return settings.tokenizer


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; ``.gz`` is unpacked."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut off after line {number} ({error})") from None
