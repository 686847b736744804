"""How the regions of a recorded response were filled; no model is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_dlm.decoding.description import layout_from_description
from lit_dlm.decoding.layout import Layout
from lit_dlm.decoding.region_fill import FillCurves, fill_curves
from lit_dlm.decoding.regions import PlacedRegions
from lit_dlm.trajectories.record import Trajectory


def regions_of(record: Trajectory, decoder: Mapping[str, Any] | Layout) -> PlacedRegions | None:
    """Returns where the regions of a record are, or ``None`` for a decoder without a layout.

    Markers are looked up in the response before step 0. ``decoder`` is a layout, or what
    ``Decoder.describe`` returned: an entry of ``methods`` in a run record, or ``decoder`` in the
    settings of a result folder.
    """
    # From the run's description: the decoder may need components that are not installed.
    layout = decoder if isinstance(decoder, Layout) else layout_from_description(decoder)
    if layout is None:
        return None
    try:
        return layout.placed(torch.from_numpy(record.initial()).long())
    except ValueError as error:
        raise ValueError(f"trajectory {record.uid!r}: {error}") from error


def fill_curves_of(record: Trajectory, regions: PlacedRegions) -> FillCurves:
    """Returns how far each region (:func:`regions_of`) was filled before each step and at the end.

    Positions outside the regions form the region ``rest``. The ``lockstep_score`` of the curves
    measures how evenly the regions were filled.
    """
    masked = torch.from_numpy(record.all_states() == record.mask_id)
    names = (*(region.name for region in regions.regions), "rest")
    return fill_curves(masked, regions.region_ids(), names)
