"""Tokenizers of model folders: loaded without code of theirs, and read without being built."""

from __future__ import annotations

import base64
import math
from itertools import chain
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_dlm.backbones.base import UNKNOWN_ID, Backbone
from lit_dlm.backbones.location import locate
from lit_dlm.system.files import fitting, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_GROWTH = 512
_GROWTH = {
    "NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "ByteLevel": 2.0, "Metaspace": 4.0,
    "BPEDecoder": 3.0, "CTC": 3.0,
}  # fmt: skip
"""Most growth by a step of a tokenizer whose settings do not matter."""


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in a model's folder.

    Custom tokenizer classes named in a checkpoint (Dream, LLaDA) are not needed: a
    ``tokenizer.json`` is complete, and ``vocab.json`` with ``merges.txt`` is read as Qwen2's.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # takes seconds

    folder = locate(path_or_id, weights=False)
    whole, parts = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    if not whole.is_file() and not all(path.is_file() for path in parts):
        raise ValueError(
            f"{path_or_id}: expected tokenizer.json, or vocab.json with merges.txt, in {folder}"
        )
    kind: type[PreTrainedTokenizerBase] = Qwen2Tokenizer
    if whole.is_file():
        kind = PreTrainedTokenizerFast
        with fitting(whole):
            steps = read_json_object(whole)
            # A stranger's tokenizer may turn a word into gigabytes. Steps follow each other, so
            # their growth multiplies: two on the way in, the decoder out, the last frames ids.
            for names in (("normalizer", "pre_tokenizer"), ("decoder",), ("post_processor",)):
                if (growth := math.prod(_growth(steps.get(name)) for name in names)) > _MOST_GROWTH:
                    wanted = f"texts that become at most {_MOST_GROWTH} times as long"
                    raise ValueError(f"{whole}: expected {wanted}, got {growth:.3g} ({names[0]})")
    try:
        with fitting(folder / "tokenizer_config.json" if whole.is_file() else parts[1]):
            # The file that was looked at, whatever tokenizer_config.json names.
            file: dict[str, Any] = {"tokenizer_file": str(whole)} if whole.is_file() else {}
            tokenizer = kind.from_pretrained(folder, local_files_only=True, **file)
            tokenizer("")  # uses settings that nothing has looked at
    except ValueError:  # another file may be the wrong one
        tokenizer_size(folder)
        if whole.is_file():
            with fitting(whole):
                Tokenizer.from_file(str(whole))
        raise
    return tokenizer


def _growth(step: Any) -> float:
    """Returns how many times as many bytes a step of a tokenizer may make of a text."""
    match step:
        case {"type": "Sequence"}:
            lists = [steps for steps in step.values() if isinstance(steps, list)]
            return math.prod(map(_growth, chain(*lists)))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(len(new.encode()) / len(old.encode()), 1.0)
        case {"type": "Replace", "content": str(new)} | {"type": "Prepend", "prepend": str(new)}:
            return 1.0 + 2 * len(new.encode())  # a pattern may match before and after a character
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            data = base64.b64decode(table)
            texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return max(map(len, texts)) / 3  # of one character, mostly of three bytes
        case {"type": "TemplateProcessing", "single": one, "pair": two, "special_tokens": ids}:
            special = [piece.get("SpecialToken") for piece in one + two]  # others repeat the text
            return float(sum(len(ids[piece["id"]]["ids"]) if piece else 1 for piece in special))
        case {"type": str(kind)}:
            return _GROWTH.get(kind, 1.0)
    return 1.0


def tokenizer_of(
    backbone: Backbone, path_or_id: str, *, option: str = "tokenizer"
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer; raises ``ValueError`` if its ids do not fit the model."""
    tokenizer, spec = load_tokenizer(path_or_id), backbone.spec
    used = set(tokenizer.get_vocab().values())
    # An id beyond the embedding would fail in the middle of a forward, on a GPU without a message.
    highest = max(used)
    fault = ""
    if highest >= backbone.vocab_size:
        fault = f"ids below {backbone.vocab_size}, got {highest}"
    for kind, ids in {"mask": (spec.mask_id,), "eos": spec.eos_ids}.items():
        own = getattr(tokenizer, f"{kind}_token_id")
        # LLaDA's tokenizer does not say which of its added tokens is the mask, and the tokenizer of
        # an autoregressive model has none.
        words = used.difference(tokenizer.added_tokens_decoder)
        strange = words.issuperset(ids) if own is None else own not in ids
        if strange and not fault and UNKNOWN_ID not in ids:
            fault = f"{kind}_token {' or '.join(map(str, ids))}, got {own}"
    if fault:
        raise ValueError(f"{option}: {path_or_id} does not fit the model: expected {fault}")
    return tokenizer


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Returns the added tokens of a folder's tokenizer files, if there are any, with their ids.

    Reads ``tokenizer_config.json``, ``added_tokens.json`` and ``tokenizer.json``; the later file
    wins. No tokenizer is built.
    """
    ids: dict[str, int] = {}
    with fitting(path := folder / "tokenizer_config.json"):
        described = read_if_there(path).get("added_tokens_decoder", {})
        ids |= {entry["content"]: int(number) for number, entry in described.items()}
    with fitting(path := folder / "added_tokens.json"):
        ids |= {text: index(number) for text, number in read_if_there(path).items()}
    with fitting(path := folder / "tokenizer.json"):
        listed = read_if_there(path).get("added_tokens", [])
        ids |= {entry["content"]: index(entry["id"]) for entry in listed}
    return ids


def tokenizer_size(folder: Path) -> int | None:
    """Returns a folder's largest token id plus one; ``None`` without a vocabulary file."""
    added = read_added_tokens(folder).values()
    with fitting(path := folder / "tokenizer.json"):
        vocabulary = read_if_there(path).get("model", {}).get("vocab")
    if vocabulary is None:
        vocabulary = read_if_there(path := folder / "vocab.json") or None
    if vocabulary is None:
        return None
    with fitting(path):
        # Unigram models list pairs in the order of their ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return index(max([*ids, *added])) + 1


def named_tokens(folder: Path) -> dict[str, str]:
    """Returns ``eos_token``, ``pad_token`` and ``mask_token`` as far as a folder names them."""
    named = read_if_there(folder / "tokenizer_config.json")
    wanted = {name: named.get(name) for name in ("eos_token", "pad_token", "mask_token")}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in wanted.items()}
    return {name: str(text) for name, text in texts.items() if text}


def read_if_there(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file, empty where there is none."""
    return read_json_object(path) if path.is_file() else {}
