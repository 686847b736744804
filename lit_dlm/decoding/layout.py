"""Layouts: where the named regions of a response are, and which marker tokens it contains.

A layout works on the canvas before the first step: it writes its template, if it has one, and
numbers the regions, whatever the policy is. Markers are token ids; text is encoded only once, since
encoding a decoded text need not return the same ids.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from lit_dlm.config.components import Component
from lit_dlm.decoding.regions import (
    PlacedRegion,
    PlacedRegions,
    Region,
    RegionMap,
    Regions,
    as_regions,
)
from lit_dlm.decoding.state import Canvas


class Layout(Component):
    """Decides where regions are: has them, and numbers the columns of a canvas."""

    needs: tuple[str, ...] = ()  # what every region must have; the last one needs no length
    takes: tuple[str, ...] = ()  # what a region may have; anything else would have no effect
    ends_by_region: bool = False  # whether an end of text ends a region and not the response

    def __init__(self, regions: Regions, *, rest: Region | None = None) -> None:
        """Sets the regions.

        Args:
            regions: by name, from left to right.
            rest: rules of the cells outside all regions.
        """
        self.regions = as_regions(regions)
        *_, self.rest = as_regions([*self.regions, rest or Region(name="rest")])
        for region in self.regions:
            given = region.describe().keys() & {"length", "fraction", "marker"}
            needs = set(self.needs) - ({"length"} if region is self.regions[-1] else set())
            if not needs <= given <= {*self.needs, *self.takes}:
                raise ValueError(
                    f"layout: region {region.name!r}: {type(self).__name__} expects "
                    f"{' and '.join((*self.needs, *self.takes))}, got "
                    f"{' and '.join(sorted(given)) or 'neither'}"
                )

    @abstractmethod
    def placed(self, response: Tensor) -> PlacedRegions:
        """Returns where the regions are, by the ``(G,)`` int64 response before step 0."""

    def on(self, canvas: Canvas, *, mask_id: int) -> Canvas:
        """Returns the canvas with the template, if any, written and the regions numbered."""
        # All columns count as the rest at first, those of prompts and padding, too.
        regions = torch.full_like(canvas.ids, len(self.regions))
        rows = []
        for row, cells in enumerate(canvas.ids[:, canvas.start :].cpu()):  # once per decode
            try:
                rows.append(self.placed(cells).region_ids())
            except ValueError as error:
                message = str(error).removeprefix("layout: ")
                raise ValueError(f"layout: row {row}: {message}") from error
        regions[:, canvas.start :] = torch.stack(rows).to(regions.device)
        return replace(canvas, regions=RegionMap.of(regions, (*self.regions, self.rest)))

    def describe(self) -> dict[str, Any]:
        return {
            "regions": [region.describe() for region in self.regions],
            "rest": self.rest.describe(),
        }

    def encoded(self, encode: Callable[[str], list[int]]) -> Self:
        """Returns the layout with its text markers encoded as token ids."""
        made = copy.copy(self)
        made.regions = [
            replace(region, marker=encode(region.marker))
            if isinstance(region.marker, str)
            else region
            for region in self.regions
        ]
        return made

    def _placed(self, spans: Sequence[tuple[int, int]], length: int) -> PlacedRegions:
        regions = tuple(
            PlacedRegion(name=region.name, start=start, end=end, weight=region.weight)
            for region, (start, end) in zip(self.regions, spans, strict=True)
        )
        return PlacedRegions(regions=regions, length=length)


class FixedLayout(Layout):
    """Regions of given lengths, one after the other; the last one may take what is left."""

    needs = ("length",)

    def placed(self, response: Tensor) -> PlacedRegions:
        places = self._places(len(response))
        return self._placed([(begin, end) for _, begin, end in places], len(response))

    def _places(self, length: int) -> list[tuple[int, int, int]]:
        """Returns where each region's marker begins, where the region begins, and where it ends."""
        places = []
        at = 0
        for region in self.regions:
            begin = at + len(region.marker_ids())
            end = length if region.length is None else begin + region.length
            places.append((at, begin, end))
            at = end
        return places


class FractionLayout(Layout):
    """Regions that each take a share of the response; what is left is the rest."""

    needs = ("fraction",)

    def placed(self, response: Tensor) -> PlacedRegions:
        length = len(response)
        shares = accumulate((region.fraction or 0.0 for region in self.regions), initial=0.0)
        # Borders are rounded, not lengths: no cell is lost between two regions.
        borders = [int(share * length + 0.5) for share in shares]
        return self._placed(list(pairwise(borders)), length)


class TemplateLayout(FixedLayout):
    """Regions whose markers are written on the canvas in front of them and never change.

    The model reads the markers like a prompt, which gives the regions their meaning.
    """

    takes = ("marker",)
    ends_by_region = True

    def on(self, canvas: Canvas, *, mask_id: int) -> Canvas:
        canvas = super().on(canvas, mask_id=mask_id)
        length = canvas.ids.shape[1] - canvas.start
        ids, editable = canvas.ids.clone(), canvas.editable.clone()
        for region, (at, begin, _) in zip(self.regions, self._places(length), strict=True):
            cells = slice(canvas.start + at, canvas.start + begin)
            marker = torch.tensor(region.marker_ids(), dtype=ids.dtype, device=ids.device)
            taken = (ids[:, cells] != mask_id) & (ids[:, cells] != marker)
            if bool(taken.any()):
                row = int(taken.any(1).nonzero()[0])
                raise ValueError(
                    f"layout: row {row}: other tokens stand in the cells {at} to {begin - 1}, "
                    f"where the marker of region {region.name!r} belongs"
                )
            ids[:, cells], editable[:, cells] = marker, False
        return replace(canvas, ids=ids, editable=editable)


class PictureLayout(Layout):
    """The tokens of a picture, followed by the token that marks its end.

    The sampler's ``allowed_ids`` restrict the proposals to picture tokens.
    """

    def __init__(self, end_id: int) -> None:
        """Sets the token id of the last cell (MMaDA: 126085, ``<|eoi|>``)."""
        super().__init__([Region(name="picture")])
        self.end_id = end_id

    def describe(self) -> dict[str, Any]:
        return {"end_id": self.end_id}

    def placed(self, response: Tensor) -> PlacedRegions:
        return self._placed([(0, len(response) - 1)], len(response))

    def on(self, canvas: Canvas, *, mask_id: int) -> Canvas:
        canvas = super().on(canvas, mask_id=mask_id)
        ids, editable = canvas.ids.clone(), canvas.editable.clone()
        ids[:, -1], editable[:, -1] = self.end_id, False
        return replace(canvas, ids=ids, editable=editable)


class MarkerLayout(Layout):
    """Regions that begin after markers already on the canvas, wherever each row has them.

    Only the response is searched, as it is before the first step: a marker in the prompt, where
    nothing is decoded, does not begin a region. A region ends where the next marker begins; cells
    before the first marker are the rest.
    """

    needs = ("marker",)
    ends_by_region = True

    def placed(self, response: Tensor) -> PlacedRegions:
        markers = []
        for region in self.regions:
            marker = torch.tensor(region.marker_ids(), device=response.device)
            size, places = len(marker), []
            if size <= len(response):
                windows = response.unfold(0, size, 1)  # (G - size + 1, size)
                places = (windows == marker).all(1).nonzero()[:, 0].tolist()
            if len(places) != 1:
                raise ValueError(
                    f"layout: the marker {region.marker} of region {region.name!r} must stand in "
                    f"the response once, got {len(places)} times"
                )
            markers.append((places[0], places[0] + size))
        ends = [begin for begin, _ in markers[1:]] + [len(response)]
        spans = [(behind, end) for (_, behind), end in zip(markers, ends, strict=True)]
        return self._placed(spans, len(response))
