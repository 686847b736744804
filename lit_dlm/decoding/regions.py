"""Named regions of a response: their rules, their places, and both as tensors.

Coordinates are those of the response: 0 is its first cell, whatever the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_dlm.system.options import at_least, refuse, within


@dataclass(frozen=True, kw_only=True)
class Region:
    """The rules of one region of a layout, and what defines its place."""

    name: str = ""
    """Unique in a layout; in a mapping of regions, the key."""
    tau: float = 0.9
    """Smallest probability with which a proposal is committed."""
    max_fill_frac: float = 0.4
    """Largest share of the region's masks that one pass commits; it may always commit one."""
    weight: float = 1.0
    """Weight of the region's tokens in ``PlacedRegions.weights()``, for losses of your own."""
    length: int | None = None
    """In cells; ``None`` with a fraction or a marker, or to take the rest of the response."""
    fraction: float | None = None
    """Share of the response, above 0."""
    marker: list[int] | str | None = None
    """Token ids in front of the region, which are not part of it; text is encoded once, with the
    tokenizer of the module that decodes."""

    def __post_init__(self) -> None:
        where = f"layout: region {self.name!r}: "
        within("[0, 1]", of=where, tau=self.tau)
        within("(0, 1]", of=where, max_fill_frac=self.max_fill_frac, fraction=self.fraction)
        at_least(0, of=where, weight=self.weight)
        size = None if self.marker is None else len(self.marker)
        at_least(1, of=where, length=self.length, marker=size)

    def marker_ids(self) -> list[int]:
        if isinstance(self.marker, str):
            got = f"the text {self.marker!r} and no tokenizer that encodes it"
            refuse(f"layout: region {self.name!r}: marker", "token ids", got)
        return self.marker or []

    def describe(self) -> dict[str, Any]:
        """Returns the settings as JSON types; length, fraction and marker only where given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


Regions = dict[str, Region] | list[Region]
"""Regions by name, or a list of named ones, from left to right."""


def as_regions(
    regions: Mapping[str, Region | Mapping[str, Any]] | Sequence[Region | Mapping[str, Any]],
) -> list[Region]:
    """Returns regions from a configuration or description: a mapping by name or a named list."""
    if isinstance(regions, Mapping):
        regions = [
            {**(one if isinstance(one, Mapping) else asdict(one)), "name": name}
            for name, one in regions.items()
        ]
    try:
        made = [one if isinstance(one, Region) else Region(**one) for one in regions]
    except TypeError as error:  # a setting that no region has, in a description
        raise ValueError(f"layout: {error}") from None
    names = [region.name for region in made]
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"layout: expected regions with different names, got {names}")
    return made


@dataclass(frozen=True, kw_only=True)
class PlacedRegion:
    """One region in its place: response cells ``start`` to ``end - 1``."""

    name: str
    start: int
    end: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PlacedRegions:
    """The regions of one response: ordered, disjoint, covering all of it or a part."""

    regions: tuple[PlacedRegion, ...]  # from left to right
    length: int  # cells of the response

    def __post_init__(self) -> None:
        behind = 0
        for region in self.regions:
            if not behind <= region.start < region.end <= self.length:
                wanted = f"some of the cells {behind} to {self.length - 1}"
                got = f"{region.start} to {region.end - 1}"
                refuse(f"layout: region {region.name!r}", wanted, got)
            behind = region.end

    def region_ids(self) -> Tensor:
        """``(G,)`` int64: the index of each cell's region, ``len(regions)`` outside all of them."""
        ids = torch.full((self.length,), len(self.regions))
        for index, region in enumerate(self.regions):
            ids[region.start : region.end] = index
        return ids

    def weights(self, rest: float = 1.0) -> Tensor:
        """``(G,)`` float32 weights of the cells; ``rest`` outside all regions."""
        weights = [*(region.weight for region in self.regions), rest]
        return torch.tensor(weights, dtype=torch.float32)[self.region_ids()]


@dataclass(frozen=True, eq=False)
class RegionMap:
    """The regions of a batch on the device. The last one is the rest of the response."""

    ids: Tensor  # (B, L) int64 region of every column; the rest's number on prompt columns too
    rules: tuple[Region, ...]  # the rules of every region, the rest's last
    tau: Tensor  # (R,) float64
    max_fill_frac: Tensor  # (R,) float64

    @classmethod
    def of(cls, ids: Tensor, rules: tuple[Region, ...]) -> RegionMap:
        # float64: a cap is a product that must round down as Python's does.
        limits = [[rule.tau for rule in rules], [rule.max_fill_frac for rule in rules]]
        tau, most = torch.tensor(limits, dtype=torch.float64, device=ids.device)
        return cls(ids, rules, tau, most)

    def __len__(self) -> int:
        """R, the number of regions, the rest included."""
        return len(self.rules)

    def __getitem__(self, rows: Tensor) -> RegionMap:
        return replace(self, ids=self.ids[rows])

    def counts(self, cells: Tensor) -> Tensor:
        """``(B, R)`` int64: how many of the ``(B, L)`` bool cells are in each region."""
        zeros = torch.zeros(len(cells), len(self), dtype=torch.long, device=cells.device)
        return zeros.scatter_add_(1, self.ids, cells.long())
