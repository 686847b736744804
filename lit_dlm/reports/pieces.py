"""Token ids as pieces of text, one piece per position of a canvas.

A token that holds only a part of a character has no text of its own; its bytes are shown until its
neighbours complete the character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.provenance import run_of_shard

if TYPE_CHECKING:
    from PIL import Image

_LOST = "\ufffd"  # what decoders write for bytes that are not a character
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"


class TokenPieces:
    """Texts of single tokens (ids without a tokenizer), and the pictures that responses draw.

    ``vision`` is the :class:`~lit_dlm.vision.tokens.TokenVision` of a model that draws.
    """

    def __init__(self, tokenizer: Any | None, vision: Any | None = None) -> None:
        self._vision = vision if hasattr(vision, "draw") else None
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._partial: set[int] = set()
        self._special: frozenset[int] = frozenset()
        self._size = 0
        if tokenizer is not None:
            # ``all_special_ids`` has those with a role alone, not marks such as <|im_start|>.
            added = getattr(tokenizer, "added_tokens_decoder", {})
            marked = (token for token, entry in added.items() if entry.special)
            self._special = frozenset([*tokenizer.all_special_ids, *marked])
            self._size = len(tokenizer)

    def text(self, token: int) -> str:
        """Text with its leading space, bytes of a part of a character, or a strange token's id."""
        if token not in self._texts:
            self._texts[token] = self._decode_one(token)
        return self._texts[token]

    def drawn(self, record: Trajectory) -> list[Image.Image]:
        """The picture that a response draws, at the start and after each step; none for a text."""
        if self._vision is None or not (record.tokens >= self._vision.first_id).any():
            return []
        import torch  # imported here, as the rest of the page does not need it

        states = record.all_states()[:, :-1]  # the end marker is not part of the picture
        return self._vision.draw(torch.from_numpy(states).long())

    def is_special(self, token: int) -> bool:
        return token in self._special

    def is_partial(self, token: int) -> bool:
        self.text(token)
        return token in self._partial

    def joined(self, ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Characters that several tokens form: (first position, number of positions, text)."""
        groups, done = [], 0
        for first in range(len(ids)):
            # A UTF-8 character has at most four bytes, so a fifth token starts another one.
            for end in range(first + 1, min(first + 4, len(ids)) + 1):
                if first < done or not self.is_partial(ids[end - 1]):
                    break
                text = self._decode(ids[first:end])
                if _LOST not in text:
                    groups.append((first, end - first, text))
                    done = end
                    break
        return groups

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each position: none for special tokens, a joined character at its first one."""
        texts = ["" if self.is_special(token) else self.text(token) for token in ids]
        for start, length, text in self.joined(ids):
            texts[start : start + length] = [text, *[""] * (length - 1)]
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        # Cleaning up would remove spaces before punctuation, and pieces would not make up the text.
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _decode_one(self, token: int) -> str:
        if self._tokenizer is None or not 0 <= token < self._size:
            return f" {token}"
        # A name is no text (Ġ for a space, bytes as other letters), but tells what decoding drops.
        text = self._decode([token])
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return text or f"⟨{token}⟩"
        data = _bytes_of(name) if _LOST in text else None
        if data is not None and _LOST in data.decode(errors="replace"):
            self._partial.add(token)
            return f"⟨{data.hex(' ').upper()}⟩"
        # Decoding drops the space before the first word of a text; inside a text it is kept.
        if name.startswith(_METASPACE) and not text.startswith(" "):
            text = " " + text
        return text or name


def _bytes_of(name: str) -> bytes | None:
    """Bytes of a token of a byte-level or byte-fallback vocabulary; ``None`` for other tokens."""
    if fallback := _BYTE_FALLBACK.fullmatch(name):
        return bytes.fromhex(fallback[1])
    # Imported here, as transformers takes seconds to import.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # The printable stand-ins of byte-level vocabularies.
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(alphabet[character] for character in name) if set(name) <= set(alphabet) else None


def tokenizer_of(shards: Sequence[Path], name: str | None) -> Any:
    """Loads a tokenizer by name, or the run's own, which must be on this machine.

    ``None``, which shows ids, for the name ``none`` and for the run of a foreign loop or import.
    """
    # Imported here: tokenizers take seconds to import, and ids need none.
    from lit_dlm.backbones.location import embedded_names
    from lit_dlm.backbones.tokenizer import load_tokenizer

    if name is not None:
        return None if name == "none" else load_tokenizer(name)
    path = run_of_shard(shards[0])[0].tokenizer.get("path")
    if path is None:
        return None
    if isinstance(path, str) and (path in embedded_names() or Path(path).is_dir()):
        return load_tokenizer(path)
    raise ValueError(f"--tokenizer: the run's tokenizer {path!r} is not on this machine; name one")
