"""Reads and writes records in other tools' formats: TABOM's JSONL, dLLM-RL's JSON, and Parquet.

The first two hold the step that wrote each position, so neither can hold overwritten writes, and
the second cannot hold gaps. Both get extra fields (exact token ids, lengths, uids), which the other
tools ignore and an import reads back.

Token ids in a row take precedence over its texts. A row with only texts is tokenised, and refused
if it has more or fewer tokens than steps: re-tokenised text is the known source of shifted step
maps. Token ids that end before the steps do are padded, as in TABOM's release.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.system.files import replacing
from lit_dlm.trajectories.format import COLUMNS, block_of, record_batch, records_of
from lit_dlm.trajectories.record import MAX_LENGTH, STATUSES, Trajectory
from lit_dlm.trajectories.store.files import STRANGE

_ROWS_PER_GROUP = 1024
_LONGEST_LINE = 32 << 20
_ALWAYS_ALLOWED = 64 << 20
_MOST_UNPACKED = 100
"""Bytes of memory allowed per byte of a file; texts compress to a tenth, pictures do not."""
_BYTES_OF_ROW = 128
_BYTES_OF_VALUE = 64
_RELEASE_METHODS = {"confidence": "default"}
"""Names of our decoders in TABOM's release where they differ; its filters know no other names."""


def tabom_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Returns one line of TABOM's data (arXiv 2605.11854, release), with our own fields added.

    ``prompt`` is without the chat template, ``decoding_order`` has the step of each position (-1:
    none), ``non_ltr_positions`` are those in ``meta``, else those of
    :func:`lit_dlm.tensors.masking.non_ltr_positions`.
    """
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
    import torch  # imported here, as most of this module does not need it

    from lit_dlm.tensors.masking import non_ltr_positions

    return non_ltr_positions(torch.from_numpy(order)).numpy()


def step_map_row(record: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Returns one entry of dLLM-RL's data (arXiv 2509.06949, release), with our own fields added.

    Masks after the last token are left out, just as the release cuts an ended response; other
    cells that no step wrote are refused. ``prompt`` has the chat template, ``step_map`` counts from
    0, ``reward`` is present if the record was graded.
    """
    own = _own_fields(record)
    filled = np.flatnonzero(record.tokens != record.mask_id)
    length = int(filled[-1]) + 1 if len(filled) else 0
    if len(gaps := np.flatnonzero(record.commit_step[:length] < 0)):
        raise ValueError(
            f"trajectory {record.uid!r}: a step_map needs a step for every position, but no step "
            f"wrote position {gaps[0]}"
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
                parts = [schema.empty_table(), pa.Table.from_batches([batch])]
                table = pa.concat_tables(parts, promote_options="permissive")
                file.write_table(table.select(schema.names).combine_chunks())
                count += len(group)
        if file is None:
            pq.write_table(schema.empty_table(), partial)
    return count


def _own_fields(record: Trajectory) -> dict[str, Any]:
    """Fields that the other formats lack and an import needs."""
    if record.superseded is not None:
        raise ValueError(
            f"trajectory {record.uid!r}: {len(record.superseded)} of its writes were overwritten, "
            "which this format cannot hold; export to parquet"
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
    before, found, after = str(around).partition("\0")
    if found and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return text


# -- import ----------------------------------------------------------------------------------------

_TEXT_KEYS = {
    "user": ("prompt", "instruction", "question"),
    "assistant": ("response", "output", "gen_text", "answer"),
}


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Facts that rows of other tools may lack."""

    mask_id: int | None = None  # id of the mask token, for rows without mask_id
    vocab_size: int | None = None  # bound of the token ids, for rows without vocab_size
    tokenizer: Any = None  # for rows without token ids
    pad_id: int | None = None  # pads token ids that end before the steps of their row do


_IDS = pa.list_(pa.int32())
_LISTS = (
    *("prompt_token_ids", "response_token_ids", "prompt_ids", "response_ids"),
    *("decoding_order", "step_map", "non_ltr_positions", "given_positions"),
)
_ROW = {
    **dict.fromkeys(_LISTS, _IDS),
    **dict.fromkeys(("mask_id", "vocab_size", "pad_id", "response_length"), pa.int32()),
    "num_steps": pa.uint16(),
    "seed": pa.uint64(),
}
"""Fields that are checked, and their types; texts are checked if a row has no token ids."""


def _checked_row(row: Any, settings: ImportSettings) -> dict[str, Any]:
    """Returns the row with its lists as arrays, and missing fields from the settings."""
    checked = {**json_object("row", row), "tokenizer": settings.tokenizer}
    for name, kind in _ROW.items():
        if row.get(name) is None:
            checked[name] = getattr(settings, name, None)
            continue
        try:
            values = pa.array([row[name]], kind)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise ValueError(f"{name}: expected {kind}: {error}") from error
        is_list = kind == _IDS
        # Arrow cuts fractions off.
        if values.to_pylist() != [row[name]] or (is_list and values.flatten().null_count):
            raise ValueError(f"{name}: expected {kind}, got {row[name]!r}")
        (checked[name],) = values.to_pylist()
        if is_list:
            checked[name] = values.flatten().to_numpy().astype(np.int64)
    return checked


def read_tabom(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads TABOM's JSONL (``decoding_order``), also gzipped; errors name the file and line.

    Positions with order -1 were never decoded; they become masks, whatever id pads them there.
    If a row's ``non_ltr_positions`` differ from those computed from its order, ``meta`` keeps them.
    """
    for number, line in numbered_lines(path):
        with _located(f"{path}:{number}"):
            row = _checked_row(json.loads(line), settings)
            prompt = _ids(row, "prompt_token_ids", "user", template=True)
            tokens = _ids(row, "response_token_ids", "assistant")
            listed = row["decoding_order"]
            order = np.empty(0, np.int64) if listed is None else listed
            lacking = len(order) - len(tokens)
            # A text does not say where the answer ends.
            if lacking < 0 or (lacking and row["response_token_ids"] is None):
                told = f"decoding_order has {len(order)} entries for {len(tokens)} tokens"
                raise ValueError(told)
            if lacking:
                tokens = np.append(tokens, np.full(lacking, _fact(row, "pad_id")))
            given = _cells(row, "given_positions", len(tokens))
            name = f"{Path(path.name.removesuffix('.gz')).stem}/{number}"
            record = _record(row, name, prompt, tokens, order, given)
            if row["non_ltr_positions"] is not None:
                cells = _cells(row, "non_ltr_positions", len(tokens))
                if not np.array_equal(cells, _non_ltr(record.commit_step)):
                    kept = np.flatnonzero(cells).tolist()
                    record = record.with_meta(non_ltr_positions=kept)
        yield record


def read_step_map(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads dLLM-RL's JSON list of ``{prompt, response, step_map, reward}``."""
    with _located(path):
        rows = list(json.loads(path.read_bytes()))
    for number, stored in enumerate(rows):
        with _located(f"{path}: entry {number}"):
            row = _checked_row(stored, settings)
            steps = _fact(row, "step_map")
            if row["num_steps"] is None and (steps >= 0).all():  # from 1 in its block models
                steps = steps - steps.min(initial=2**31)
            prompt = _ids(row, "prompt_ids", "user")
            tokens = _ids(row, "response_ids", "assistant")
            length = max(row["response_length"] or 0, len(tokens))
            if len(steps) != len(tokens) or steps.min(initial=0) < 0 or length > MAX_LENGTH:
                raise ValueError(
                    f"step_map has {len(steps)} entries of 0 or more for {len(tokens)} tokens in "
                    f"a response_length of {length}, at most {MAX_LENGTH}"
                )
            padding = length - len(tokens)
            tokens = np.concatenate([tokens, np.full(padding, _fact(row, "mask_id"))])
            steps = np.concatenate([steps, np.full(padding, -1)])
            given = np.zeros(length, dtype=bool)
            record = _record(row, f"{path.stem}/{number}", prompt, tokens, steps, given)
        yield record


def read_parquet(path: Path) -> tuple[Iterator[Trajectory], str | None]:
    """Returns the records that :func:`write_parquet` wrote, and their run's text or ``None``."""
    with _located(path):
        file = pq.ParquetFile(path)
        facts = file.schema_arrow.metadata or {}

    def rows() -> Iterator[Trajectory]:
        for number in range(file.num_row_groups):
            with _located(f"{path}: row group {number}"):
                table = file.read_row_group(number).combine_chunks()
                full = [c.name for c in table.schema if table[c.name].null_count < len(table)]
                batches = table.select(full).to_batches()
                records = [records_of(block_of(b.replace_schema_metadata(facts))) for b in batches]
            yield from chain.from_iterable(records)

    run_text = facts.get(b"lit_dlm_run")
    return rows(), None if run_text is None else run_text.decode(errors="replace")


@contextmanager
def _located(where: object) -> Iterator[None]:
    """Turns errors about malformed input into a ``ValueError`` that says where it is."""
    try:
        yield
    except (pa.ArrowException, OSError, *STRANGE) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where}: {text}") from error


def _record(
    row: Mapping[str, Any], name: str, prompt: Any, tokens: Any, order: Any, given: Any
) -> Trajectory:
    """Builds a record from one row; cells with step -1 become masks unless they are given."""
    mask_id = _fact(row, "mask_id")
    order = np.where(given, -1, order)
    tokens = np.where((order < 0) & ~given, mask_id, tokens)
    is_full = bool((tokens != mask_id).all())
    uid, steps, status = row.get("id"), row["num_steps"], row.get("status")
    record = Trajectory(
        uid=name if uid is None else str(uid),
        prompt_ids=prompt,
        tokens=tokens,
        commit_step=order,
        num_steps=int(order.max(initial=-1)) + 1 if steps is None else steps,
        mask_id=mask_id,
        vocab_size=_fact(row, "vocab_size"),
        seed=row["seed"] or 0,
        status=status if status in STATUSES else "complete" if is_full else "step_limit",
        given=given,
        meta=_meta(row),
    )
    record.validate()
    return record


def _meta(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``meta`` of our own exports, else facts from the other tools' fields."""
    if row.get("meta") is not None:
        return dict(row["meta"])
    named = (("method", "method"), ("data_source", "task"), ("reward", "score"))
    meta = {name: row[key] for key, name in named if row.get(key) not in (None, "")}
    correct = row.get("correct")
    if correct not in (0, 1, None):
        raise ValueError(f"correct must be true, false or null, got {correct!r}")
    return meta if correct is None else {**meta, "correct": bool(correct)}


def json_object(where: str, value: Any) -> dict[str, Any]:
    """Returns a JSON value that must be an object; the error says ``where`` it is."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parsed_json(where: str, text: bytes) -> Any:
    """Parses JSON, whoever wrote it; the error says ``where`` it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also if the bytes are not text
        raise ValueError(f"{where}: not valid JSON ({error})") from None


def _cells(row: Mapping[str, Any], name: str, length: int) -> NDArray[np.bool_]:
    """``(length,)`` bool, ``True`` at the positions that a field lists."""
    positions = np.empty(0, np.int64) if row[name] is None else row[name]
    outside = positions[(positions < 0) | (positions >= length)]
    if len(outside):
        raise ValueError(f"{name}: expected positions below {length}, got {outside[0]}")
    cells = np.zeros(length, dtype=bool)
    cells[positions] = True
    return cells


def _fact(row: Mapping[str, Any], name: str) -> Any:
    """Returns a fact that the row or an option must supply."""
    if row[name] is None:
        hint = f"; give --{name}" if name in vars(ImportSettings()) else ""
        raise ValueError(f"the row has no {name}{hint}")
    return row[name]


def _ids(row: Mapping[str, Any], name: str, role: str, *, template: bool = False) -> Any:
    """Token ids of a row, or of its first text of ``role``, in the chat template on request."""
    if row[name] is not None:
        return row[name]
    texts = [row[key] for key in _TEXT_KEYS[role] if row.get(key) is not None]
    turns = row.get("messages") or []
    texts += [turn.get("content") for turn in turns if turn.get("role") == role]
    if not texts or not isinstance(texts[0], str):
        keys = ", ".join(_TEXT_KEYS[role])
        raise ValueError(f"expected one of the texts {keys}, or a turn of the {role} in messages")
    tokenizer = _fact(row, "tokenizer")
    if template and getattr(tokenizer, "chat_template", None) is not None:
        chat = [{"role": role, "content": texts[0]}]
        options = {"add_generation_prompt": True, "return_dict": False}
        ids = apply_chat_template(tokenizer, chat, **options)
    else:
        ids = tokenizer.encode(texts[0], add_special_tokens=False)
    return np.array(ids, dtype=np.int64)


class Allowance:
    """Limits the memory that rows of a file may take: bytes of their values, and some per row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.most = _ALWAYS_ALLOWED + _MOST_UNPACKED * path.stat().st_size
        self._taken = 0

    def take(self, size: int, rows: int, *, at_once: int = 0) -> None:
        """Counts rows; ``at_once`` is what alone may not be larger either."""
        self._taken += size + rows * _BYTES_OF_ROW
        if max(self._taken, at_once) > self.most:
            most = f"{self.most >> 20} MiB in a file of this size"
            raise ValueError(f"{self.path}: expected rows of at most {most}, got more")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with numbers from 1; ``.gz`` files are unpacked."""
    number, allowance = 0, Allowance(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = iter(partial(file.readline, _LONGEST_LINE + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > _LONGEST_LINE:
                    most = f"{_LONGEST_LINE >> 20} MiB"
                    raise ValueError(f"{path}, line {number}: expected at most {most}, got more")
                has_row = bool(line.strip())
                # Parsed, its values may take far more than the line does.
                values = sum(map(line.count, (b"[", b"{", b",")))
                allowance.take(len(line), has_row, at_once=_BYTES_OF_VALUE * values)
                if has_row:
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut off after line {number} ({error})") from None
