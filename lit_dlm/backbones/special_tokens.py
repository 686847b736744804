"""Ids of special tokens: from the configuration and the tokenizer, checked against the release.

One id may mean different tokens in sister vocabularies (151666 is Dream's mask and a tool tag in
SDAR's), so whatever names an id must agree, or loading stops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.backbones.families import SpecialIds
from lit_dlm.backbones.location import read_json_object

logger = logging.getLogger(__name__)


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Collects the added tokens of a folder's tokenizer files without building a tokenizer.

    Args:
        folder: model folder; tokenizer files may be absent.

    Returns:
        Token text to id, from ``tokenizer_config.json``, ``added_tokens.json`` and
        ``tokenizer.json``, the later file winning.
    """
    found: dict[str, int] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        for token_id, entry in read_json_object(path).get("added_tokens_decoder", {}).items():
            found[entry["content"]] = int(token_id)
    path = folder / "added_tokens.json"
    if path.is_file():
        found |= read_json_object(path)
    path = folder / "tokenizer.json"
    if path.is_file():
        for entry in read_json_object(path).get("added_tokens", []):
            found[entry["content"]] = int(entry["id"])
    return found


def listed(value: Any) -> tuple[int, ...]:
    """An id option, which may be absent, one id or several, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def ids_without_table(
    config: Mapping[str, Any],
    *,
    mask_tokens: tuple[str, ...] = (),
    added_tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """Ids of a vocabulary that no release is known for.

    Args:
        config: contents of ``config.json``.
        mask_tokens: how the family writes its mask token.
        added_tokens: text to id of the tokenizer's added tokens.
        overrides: fields that the user gives; they are not looked for.
        source: for error texts.

    Returns:
        ``mask_id``, ``pad_id``, ``eos_ids`` and ``bos_id``. What nothing names is ``UNKNOWN_ID``,
        with a warning; padding is hidden from attention, so it falls back to another id.

    Raises:
        ValueError: the configuration and the tokenizer name different mask ids.
    """
    mask = config.get("mask_token_id")
    for token in mask_tokens:
        if token in added_tokens and "mask_id" not in overrides:
            mask = added_tokens[token] if mask is None else mask
            if mask != added_tokens[token]:
                raise ValueError(
                    f"{source}mask_id is {mask} in config.json, but the tokenizer gives {token!r} "
                    f"the id {added_tokens[token]}; set spec_overrides.mask_id to the right one"
                )
    eos = listed(config.get("eos_token_id"))
    pad = config.get("pad_token_id")
    for field, found in (("mask_id", mask is not None), ("eos_ids", bool(eos))):
        if not found and field not in overrides:
            logger.warning(
                "%sthe files name no %s; decoding needs it as spec_overrides.%s",
                source,
                field,
                field,
            )
    return {
        "mask_id": UNKNOWN_ID if mask is None else mask,
        "pad_id": (eos[0] if eos else 0) if pad is None else pad,
        "eos_ids": eos or (UNKNOWN_ID,),
        "bos_id": config.get("bos_token_id"),
    }


def ids_of_family(
    config: Mapping[str, Any],
    *,
    name: str,
    table: SpecialIds,
    vocab_size: int,
    added_tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """Ids of a known family: configuration, tokenizer and the released vocabulary must agree.

    Args:
        config: contents of ``config.json``.
        name: the family, for error texts.
        table: its special tokens.
        vocab_size: rows of the embedding. One too small for the released ids (test models) is
            taken for a vocabulary of its own.
        added_tokens: text to id of the tokenizer's added tokens; empty without a tokenizer.
        overrides: fields that the user gives; they are not checked.
        source: for error texts.

    Returns:
        ``mask_id``, ``pad_id``, ``eos_ids`` and ``bos_id``.

    Raises:
        ValueError: two of the sources disagree.
    """
    if vocab_size <= max(table.mask, *table.eos):
        return ids_without_table(
            config,
            mask_tokens=table.mask_tokens,
            added_tokens=added_tokens,
            overrides=overrides,
            source=source,
        )

    def check(field: str, value: Any, expected: Any, agrees: bool, where: str) -> None:
        if not agrees and field not in overrides:
            raise ValueError(
                f"{source}{field} is {value} in {where} but {expected} in the released {name} "
                f"vocabulary; set spec_overrides.{field} if the files are right"
            )

    mask = config.get("mask_token_id", table.mask)
    pad = config.get("pad_token_id")
    eos = listed(config.get("eos_token_id"))
    table_pad = table.eos[0] if table.pad is None else table.pad
    check("mask_id", mask, table.mask, mask == table.mask, "config.json")
    pads = (None, table_pad, *table.pad_also)
    check("pad_id", pad, table_pad, pad in pads, "config.json")
    check("eos_ids", eos, table.eos, set(eos) <= set(table.eos), "config.json")
    if added_tokens:
        written = [token for token in table.mask_tokens if token in added_tokens]
        if not written and "mask_id" not in overrides:
            taken = [text for text, number in added_tokens.items() if number == table.mask]
            raise ValueError(
                f"{source}mask_id: the tokenizer has no {table.mask_tokens[0]!r}"
                + (f", and id {table.mask} is {taken[0]!r} there" if taken else "")
                + f"; is it the tokenizer of a {name} model?"
            )
        for token in written:
            found = added_tokens[token]
            check("mask_id", found, table.mask, found == table.mask, "the tokenizer")
        for token, expected in zip(table.eos_tokens, table.eos, strict=True):
            found = added_tokens.get(token, expected)
            check("eos_ids", found, expected, found == expected, f"the tokenizer ({token})")
    return {
        "mask_id": mask,
        "pad_id": table_pad if pad is None else pad,
        "eos_ids": table.eos,
        "bos_id": table.bos,
    }
