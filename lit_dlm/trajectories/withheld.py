"""Records whose block names the prompt only by its digest.

Some prompts may not be passed on: licensed text, or private questions. Such a block stores 16 bytes
per prompt instead of its ids. Everything about the response can still be replayed; whoever has the
prompt gets the whole record back with :meth:`WithheldTrajectory.with_prompt`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dlm.trajectories.errors import ChecksumError
from lit_dlm.trajectories.record import Trajectory


@dataclass(frozen=True, eq=False, kw_only=True)
class WithheldTrajectory(Trajectory):
    """A record without its prompt: ``prompt_ids`` is empty."""

    prompt_length: int
    """P, the number of prompt tokens."""
    prompt_digest: bytes
    """16 bytes, see :func:`prompt_digest`."""
    content_digest: bytes
    """16 bytes: what :meth:`digest` gives for the record with its prompt. Without the prompt it
    cannot be checked."""

    @property
    def num_prompt(self) -> int:
        """P, the number of prompt tokens, although they are not here."""
        return self.prompt_length

    def digest(self) -> bytes:
        """Content digest (16 bytes) of the record with its prompt, as the block states it."""
        return self.content_digest

    def canvas(self, step: int | None = None) -> NDArray[np.int32]:
        """Refuses: the prompt is not part of this record.

        Raises:
            ValueError: Always; use :meth:`with_prompt` first.
        """
        del step
        raise ValueError(f"trajectory {self.uid!r}: the block withholds its prompt")

    def with_prompt(self, prompt_ids: ArrayLike) -> Trajectory:
        """The whole record.

        Args:
            prompt_ids: ``(P,)`` integer.

        Returns:
            A plain record with these prompt ids.

        Raises:
            ChecksumError: If this is another prompt, or the record does not belong to it.
        """
        ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        if len(ids) != self.prompt_length or prompt_digest(ids) != self.prompt_digest:
            raise ChecksumError(
                f"trajectory {self.uid!r}: this is not the prompt of {self.prompt_length} tokens "
                f"that the block names ({len(ids)} tokens came)",
                record=self.uid,
            )
        values = {field.name: getattr(self, field.name) for field in fields(Trajectory)}
        record = Trajectory(**{**values, "prompt_ids": ids})
        if record.digest() != self.content_digest:
            raise ChecksumError(
                f"trajectory {self.uid!r}: content digest does not match", record=self.uid
            )
        return record


def prompt_digest(prompt_ids: NDArray[np.int32]) -> bytes:
    """The first 16 bytes of SHA-256 over the prompt ids as little-endian unsigned 32-bit numbers.

    Args:
        prompt_ids: ``(P,)`` int32.
    """
    data = np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes()
    return hashlib.sha256(data).digest()[:16]
