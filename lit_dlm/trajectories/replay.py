"""Replays records: the canvases of a batch, and how the regions of a response were filled.

These are functions of the record; no model is run and nothing is compared, so nothing here shows
that a model would do the same. :mod:`lit_dlm.trajectories.verify` checks that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dlm.decoding.description import layout_from_description
from lit_dlm.decoding.layout import Layout
from lit_dlm.decoding.region_fill import FillCurves, fill_curves
from lit_dlm.decoding.regions import BlockLayout
from lit_dlm.trajectories.record import Trajectory


def states_at(records: Sequence[Trajectory], step: int) -> Tensor:
    """``(B, G)`` int64 response canvases before a step; the final one if a record has ended."""
    states = [record.state_at(min(step, record.num_steps)) for record in records]
    return torch.from_numpy(np.stack(states)).long()


def regions_of(record: Trajectory, decoder: Mapping[str, Any] | Layout) -> BlockLayout | None:
    """Returns the blocks of a record's response, or ``None`` for a decoder without a layout.

    Markers are looked up in the response before step 0.

    Args:
        record: the record.
        decoder: what ``Decoder.describe`` returned: an entry of ``methods`` in a run record, or
            ``decoder`` in the settings of a result folder; or a layout.
    """
    layout = decoder if isinstance(decoder, Layout) else layout_from_description(decoder)
    if layout is None:
        return None
    try:
        return layout.blocks(torch.from_numpy(record.initial()).long())
    except ValueError as error:
        raise ValueError(f"trajectory {record.uid!r}: {error}") from error


def fill_curves_of(record: Trajectory, blocks: BlockLayout) -> FillCurves:
    """Returns how far each region (:func:`regions_of`) was filled before each step and at the end.

    Cells outside the regions form the region ``rest``. The ``lockstep_score`` of the curves
    measures how evenly the regions were filled.
    """
    masked = torch.from_numpy(record.all_states() == record.mask_id)
    names = (*(block.name for block in blocks.blocks), "rest")
    return fill_curves(masked, blocks.region_ids(), names)
