"""Reads rows of other tools as records: TABOM's JSONL and dLLM-RL's JSON.

Token ids in a row take precedence over its texts. A row with only texts is tokenised, and refused
if it has more or fewer tokens than steps: re-tokenised text is the known source of shifted step
maps. Token ids that end before the steps do are padded, as in TABOM's release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.system.json_lines import json_object, numbered_lines
from lit_dlm.system.options import refuse
from lit_dlm.trajectories.record import MAX_LENGTH, STATUSES, Trajectory, expect
from lit_dlm.trajectories.store.files import STRANGE

_TEXT_KEYS = {
    "user": ("prompt", "instruction", "question"),
    "assistant": ("response", "output", "gen_text", "answer"),
}
_IDS = pa.list_(pa.int32())
_LISTS = (
    *("prompt_token_ids", "response_token_ids", "prompt_ids", "response_ids"),
    *("decoding_order", "step_map", "non_ltr_positions", "given_positions"),
)
_FIELDS = {
    **dict.fromkeys(_LISTS, _IDS),
    **dict.fromkeys(("mask_id", "vocab_size", "pad_id", "response_length"), pa.int32()),
    "num_steps": pa.uint16(),
    "seed": pa.uint64(),
}
"""Fields that are checked, and their types; texts are checked if a row has no token ids."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Fields that rows of other tools may lack."""

    mask_id: int | None = None  # id of the mask token, for rows without mask_id
    vocab_size: int | None = None  # bound of the token ids, for rows without vocab_size
    tokenizer: Any = None  # for rows without token ids
    pad_id: int | None = None  # pads token ids that end before the steps of their row do


def read_tabom(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads TABOM's JSONL (``decoding_order``), also gzipped; errors name the file and line.

    Positions with order -1 were never decoded; they become masks, whatever id pads them there.
    If a row's ``non_ltr_positions`` differ from those computed from its order, ``meta`` keeps them.
    """
    stem = Path(path.name.removesuffix(".gz")).stem
    for number, line in numbered_lines(path):
        with located(f"{path}:{number}"):
            row = checked_row(json.loads(line), settings)
            prompt = ids_of(row, "prompt_token_ids", "user", template=True)
            tokens = ids_of(row, "response_token_ids", "assistant")
            order = row["decoding_order"]
            order = np.empty(0, np.int64) if order is None else order
            num_missing = len(order) - len(tokens)
            # Only token ids are padded: a text does not say where the answer ends.
            is_exact = row["response_token_ids"] is not None
            expect(
                num_missing == 0 or (num_missing > 0 and is_exact),
                f"decoding_order has {len(order)} entries for {len(tokens)} tokens",
            )
            if num_missing:
                tokens = np.append(tokens, np.full(num_missing, required(row, "pad_id")))
            given = _is_listed(row, "given_positions", len(tokens))
            record = _record(row, f"{stem}/{number}", prompt, tokens, order, given)
            # Kept where they are not the computed ones, so that an export is this row again.
            if row["non_ltr_positions"] is not None:
                listed = _is_listed(row, "non_ltr_positions", len(tokens))
                if not np.array_equal(listed, non_ltr(record.commit_step)):
                    kept = np.flatnonzero(listed).tolist()
                    record = record.with_meta(non_ltr_positions=kept)
        yield record


def read_step_map(path: Path, settings: ImportSettings) -> Iterator[Trajectory]:
    """Reads dLLM-RL's JSON list of ``{prompt, response, step_map, reward}``."""
    with located(path):  # one JSON list: there are no lines that could be read one by one
        rows = list(json.loads(path.read_bytes()))
    for number, stored in enumerate(rows):
        with located(f"{path}: entry {number}"):
            row = checked_row(stored, settings)
            steps = required(row, "step_map")
            # Their block models count from 1. Our own rows say num_steps and count from 0, also
            # where step 0 wrote nothing.
            if row["num_steps"] is None and (steps >= 0).all():
                steps = steps - steps.min(initial=2**31)
            prompt = ids_of(row, "prompt_ids", "user")
            tokens = ids_of(row, "response_ids", "assistant")
            length = max(row["response_length"] or 0, len(tokens))
            expect(
                len(steps) == len(tokens) and steps.min(initial=0) >= 0 and length <= MAX_LENGTH,
                f"step_map has {len(steps)} entries of 0 or more for {len(tokens)} tokens in "
                f"a response_length of {length}, at most {MAX_LENGTH}",
            )
            padding = length - len(tokens)
            tokens = np.concatenate([tokens, np.full(padding, required(row, "mask_id"))])
            steps = np.concatenate([steps, np.full(padding, -1)])
            given = np.zeros(length, dtype=bool)
            record = _record(row, f"{path.stem}/{number}", prompt, tokens, steps, given)
        yield record


def non_ltr(order: NDArray[np.int32]) -> NDArray[np.bool_]:
    """:func:`lit_dlm.tensors.order.non_ltr_positions` of an array."""
    import torch  # imported here, as most of this module does not need it

    from lit_dlm.tensors.order import non_ltr_positions

    return non_ltr_positions(torch.from_numpy(order)).numpy()


@contextmanager
def located(where: object) -> Iterator[None]:
    """Turns errors about malformed input into a ``ValueError`` that says where it is."""
    try:
        yield
    except (pa.ArrowException, OSError, *STRANGE) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where}: {text}") from error


# -- one row ---------------------------------------------------------------------------------------


def checked_row(row: Any, settings: ImportSettings) -> dict[str, Any]:
    """Returns the row with its lists as arrays, and missing fields from the settings."""
    checked = {**json_object("row", row), "tokenizer": settings.tokenizer}
    for name, kind in _FIELDS.items():
        if row.get(name) is None:
            checked[name] = getattr(settings, name, None)
            continue
        try:
            values = pa.array([row[name]], kind)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise ValueError(f"{name}: expected {kind}: {error}") from error
        is_list = kind == _IDS
        # Arrow cuts fractions off and takes texts of digits, so the values are compared as well.
        is_same = values.to_pylist() == [row[name]]
        has_nulls = is_list and values.flatten().null_count
        if (
            has_nulls or not is_same
        ):  # no call of expect: it would write out every list of every row
            raise ValueError(f"{name}: expected {kind}, got {row[name]!r}")
        (checked[name],) = values.to_pylist()
        if is_list:
            checked[name] = values.flatten().to_numpy().astype(np.int64)
    return checked


def _record(
    row: Mapping[str, Any], name: str, prompt: Any, tokens: Any, order: Any, given: Any
) -> Trajectory:
    """Builds a record from one row; positions with step -1 become masks unless they are given."""
    mask_id = required(row, "mask_id")
    order = np.where(given, -1, order)
    tokens = np.where((order < 0) & ~given, mask_id, tokens)
    is_full = bool((tokens != mask_id).all())
    uid, steps, status = row.get("id"), row["num_steps"], row.get("status")
    record = Trajectory(
        # Rows of others have no names; that of their file and line is stable.
        uid=name if uid is None else str(uid),
        prompt_ids=prompt,
        tokens=tokens,
        commit_step=order,
        num_steps=int(order.max(initial=-1)) + 1 if steps is None else steps,
        mask_id=mask_id,
        vocab_size=required(row, "vocab_size"),
        seed=row["seed"] or 0,
        status=status if status in STATUSES else "complete" if is_full else "step_limit",
        given=given,
        meta=_meta(row),
    )
    record.validate()
    return record


def _meta(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``meta`` of our own exports, else what the other tools' fields say."""
    if row.get("meta") is not None:
        return dict(row["meta"])
    named = (("method", "method"), ("data_source", "task"), ("reward", "score"))
    meta = {name: row[key] for key, name in named if row.get(key) not in (None, "")}
    correct = row.get("correct")
    expect(correct in (0, 1, None), f"correct must be true, false or null, got {correct!r}")
    return meta if correct is None else {**meta, "correct": bool(correct)}


def _is_listed(row: Mapping[str, Any], name: str, length: int) -> NDArray[np.bool_]:
    """``(length,)`` bool, ``True`` at the positions that a field lists."""
    positions = np.empty(0, np.int64) if row[name] is None else row[name]
    outside = positions[(positions < 0) | (positions >= length)]
    if len(outside):
        refuse(name, f"positions below {length}", outside[0])
    listed = np.zeros(length, dtype=bool)
    listed[positions] = True
    return listed


def required(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field that the row or an option must supply."""
    hint = f"; give --{name}" if name in vars(ImportSettings()) else ""
    expect(row[name] is not None, f"the row has no {name}{hint}")
    return row[name]


def ids_of(row: Mapping[str, Any], name: str, role: str, *, template: bool = False) -> Any:
    """Token ids of a row, or of its first text of ``role``, in the chat template on request."""
    if row[name] is not None:
        return row[name]
    texts = [row[key] for key in _TEXT_KEYS[role] if row.get(key) is not None]
    turns = row.get("messages") or []
    texts += [turn.get("content") for turn in turns if turn.get("role") == role]
    keys = ", ".join(_TEXT_KEYS[role])
    expect(
        texts and isinstance(texts[0], str),
        f"expected one of the texts {keys}, or a turn of the {role} in messages",
    )
    tokenizer = required(row, "tokenizer")
    if template and getattr(tokenizer, "chat_template", None) is not None:
        chat = [{"role": role, "content": texts[0]}]
        options = {"add_generation_prompt": True, "return_dict": False}
        ids = apply_chat_template(tokenizer, chat, **options)
    else:
        ids = tokenizer.encode(texts[0], add_special_tokens=False)
    return np.array(ids, dtype=np.int64)
