"""Features of kept steps: what a commit policy saw, or the logits, in a compact form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lit_dlm.system.options import refuse

FeatureLayout = Literal["generation", "all", "masked", "logits"]
FeatureScheme = Literal["fp16", "int8"]
ONLY_MASKED = ("masked", "logits")
"""Layouts that store only rows that are masked before the step."""
_FORBIDDEN = -128
"""Code of ``-inf`` in int8 logits; values have the codes -127 to 127."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFeatures:
    """Features of kept steps: what a commit policy saw, in a compact form.

    A response position at a kept step has ``F`` features (projected hidden snapshots and scores).
    They are stored as float16, or as int8 with one float16 scale per row and feature group, since
    groups have different ranges, and outliers in one row must not cost the others precision.
    """

    kept_steps: NDArray[np.int32]  # (S,) int32, strictly ascending
    features: NDArray[Any]  # (S, R, F) float16, or int8 with scales
    scales: NDArray[np.float16] | None = None
    """``(S, R, number of groups)`` float16 for int8 features; ``None`` for float16."""
    groups: tuple[int, ...]  # sizes of the feature groups, in order; they sum to F
    proposals: NDArray[np.int32]  # (S, R) int32: the token proposed for each row
    layout: FeatureLayout = "generation"
    """``generation``: R = G response rows; ``all``: R = P + G, prompt rows first; ``masked``:
    R = G, of which only rows that are masked before the step are stored (half of them on average,
    and the only ones that enter a loss); the others are zeros, and their proposals are the tokens
    already there. ``logits``: such rows, of the V logits of the step as one group, ``-inf`` for ids
    that may not be proposed."""
    projector_digest: str = ""
    """Digest of the function that made the features; readers must use the same one."""

    @property
    def scheme(self) -> FeatureScheme:
        return "fp16" if self.scales is None else "int8"

    @property
    def kind(self) -> tuple[object, ...]:
        """What all features of a block must share."""
        return self.layout, self.scheme, self.groups, self.projector_digest

    @property
    def nbytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.features.nbytes + scales + self.proposals.nbytes + self.kept_steps.nbytes

    def dequantized(self, kept: int | slice = slice(None)) -> NDArray[np.float32]:
        """``(S, R, F)`` float32, or ``(R, F)`` for a single index into the kept steps."""
        values = self.features[kept].astype(np.float32)
        if self.scales is not None:
            values *= np.repeat(self.scales[kept].astype(np.float32), self.groups, axis=-1)
            if self.layout == "logits":
                values[self.features[kept] == _FORBIDDEN] = -np.inf
        return values

    @classmethod
    def quantize(
        cls,
        features: NDArray[np.floating[Any]],
        *,
        kept_steps: NDArray[np.integer[Any]],
        proposals: NDArray[np.integer[Any]],
        groups: Sequence[int],
        scheme: FeatureScheme = "int8",
        layout: FeatureLayout = "generation",
        projector_digest: str = "",
    ) -> StepFeatures:
        """Returns finite floating-point ``features`` ``(S, R, F)`` in compact form.

        int8 is symmetric and rounds to nearest, with ``scale = absmax / 127`` per (step, row,
        group), rounded up to the next float16 so that no value is clipped. For Gaussian groups of
        256 the relative RMSE is 0.7 %. No value ``x`` is off by more than

        - fp16: ``max(|x| / 2048, 2**-25)``; bfloat16 numbers of at least ``2**-17`` are exact;
        - int8: ``absmax / 253 + 2**-25``, where half a scale is ``absmax / 254``, and its own
          rounding adds at most one part in 1024 or, below the normal numbers, ``2**-25``.

        Logits may be ``-inf``, which is kept as it is.
        """
        values = np.asarray(features, dtype=np.float32)
        forbidden = np.isneginf(values) if layout == "logits" else np.zeros((), dtype=bool)
        if forbidden.any():
            values = np.where(forbidden, np.float32(0), values)
        sizes = tuple(int(size) for size in groups)
        largest = float(np.abs(values).max(initial=0.0))
        # The largest float16: of a value itself, or of a scale, which is a 127th of it.
        limit = 65504.0 * (1.0 if scheme == "fp16" else 127.0)
        fits = values.ndim == 3 and min(sizes) > 0 and sum(sizes) == values.shape[2]
        if not fits or not largest <= limit:
            shape = f"shape (S, R, {sum(sizes)}) for groups {sizes}"
            got = f"{values.shape} and {largest:g}"
            refuse("features", f"{shape}, finite and at most {limit:g}", got)
        stored, scales = (
            _int8(values, sizes) if scheme == "int8" else (values.astype(np.float16), None)
        )
        if forbidden.any():
            stored[forbidden] = -np.inf if scales is None else _FORBIDDEN
        return cls(
            kept_steps=np.ascontiguousarray(kept_steps, dtype=np.int32),
            features=stored,
            scales=scales,
            groups=sizes,
            proposals=np.ascontiguousarray(proposals, dtype=np.int32),
            layout=layout,
            projector_digest=projector_digest,
        )

    @classmethod
    def joined(cls, parts: Sequence[StepFeatures]) -> StepFeatures:
        """Returns the features of several steps, all of one kind, as one."""
        scales = [part.scales for part in parts if part.scales is not None]
        return replace(
            parts[0],
            kept_steps=np.concatenate([part.kept_steps for part in parts]),
            features=np.concatenate([part.features for part in parts]),
            scales=np.concatenate(scales) if scales else None,
            proposals=np.concatenate([part.proposals for part in parts]),
        )

    def validate(self, uid: str, num_prompt: int, num_generated: int, num_steps: int) -> None:
        """Checks shapes and ranges against the record ``uid``."""
        rows = num_rows(self.layout, num_prompt, num_generated)
        shape = (len(self.kept_steps), rows)
        values, scales, kept = self.features, self.scales, self.kept_steps
        dtype = np.float16 if scales is None else np.int8
        scale_shape = None if scales is None else scales.shape
        is_ascending = (np.diff([-1, *kept, num_steps]) > 0).all()
        for name, value, fits in (
            ("layout", self.layout, self.layout in get_args(FeatureLayout)),
            ("features", values.shape, values.shape == (*shape, sum(self.groups))),
            ("proposals", self.proposals.shape, self.proposals.shape == shape),
            ("dtype", values.dtype, values.dtype == dtype),
            ("scales", scale_shape, scale_shape in (None, (*shape, len(self.groups)))),
            ("kept_steps", kept, is_ascending),
        ):
            if not fits:
                raise ValueError(
                    f"trajectory {uid!r}: features.{name} does not fit layout {self.layout!r} and "
                    f"{shape} kept steps and rows of {num_steps} steps, got {value}"
                )


def num_rows(layout: str, num_prompt: int, num_generated: int) -> int:
    """R, the number of positions that have features in a layout."""
    return num_generated + (num_prompt if layout == "all" else 0)


def _int8(
    values: NDArray[np.float32], sizes: tuple[int, ...]
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes ``(S, R, F)`` and scales ``(S, R, number of groups)``."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    exact = np.maximum.reduceat(np.abs(values), starts, axis=2) / np.float32(127)
    scales = exact.astype(np.float16)
    # A scale that was rounded down would clip the largest value of its group.
    low = scales.astype(np.float32) < exact
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))
    wide = np.repeat(scales.astype(np.float32), sizes, axis=2)
    # Groups of zeros have the scale 0, by which nothing is divided.
    codes = np.rint(np.divide(values, wide, out=np.zeros_like(values), where=wide > 0))
    return codes.astype(np.int8), scales
