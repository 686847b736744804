"""Length buckets: which prompts are decoded together, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence


def length_buckets(
    lengths: Sequence[int], *, batch_size: int, max_spread: int | None = None
) -> list[list[int]]:
    """Groups samples of similar length.

    Args:
        lengths: tokens of every prompt.
        batch_size: most samples of a bucket.
        max_spread: most tokens by which lengths inside a bucket may differ; ``None``: any.

    Returns:
        Indices into ``lengths``, each exactly once; buckets from short to long, equal lengths in
        their order. Results of a decode do not depend on the buckets, only its speed does.

    Raises:
        ValueError: a limit is out of range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    if max_spread is not None and max_spread < 0:
        raise ValueError(f"max_spread: expected 0 or more, got {max_spread}")
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        last = buckets[-1] if buckets else None
        if (
            last is None
            or len(last) == batch_size
            or (max_spread is not None and lengths[index] - lengths[last[0]] > max_spread)
        ):
            buckets.append([index])
        else:
            last.append(index)
    return buckets
