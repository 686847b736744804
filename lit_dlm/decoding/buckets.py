"""Length buckets: which prompts are decoded together, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], *, batch_size: int) -> list[list[int]]:
    """Groups samples of similar length.

    Returns:
        Indices into ``lengths``, each exactly once; buckets from short to long, equal lengths in
        their order. Results of a decode do not depend on the buckets, only its speed does.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
