"""Records played back: the canvases of a batch, and how the regions of a response were filled.

These are functions of the record; nothing is run and nothing is compared, so nothing here can say
that a model would do the same. That is :mod:`lit_dlm.trajectories.verify`.
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
    """``(B, G)`` int64 response canvases before a step; a record that has ended keeps its last."""
    states = [record.state_at(min(step, record.num_steps)) for record in records]
    return torch.from_numpy(np.stack(states)).long()


def regions_of(record: Trajectory, decoder: Mapping[str, Any] | Layout) -> BlockLayout | None:
    """The blocks of a record's response, or ``None`` for a decoder without a layout.

    Markers are searched in the response as it stood before step 0.

    Args:
        record: the record.
        decoder: what ``Decoder.describe`` returned: an entry of ``methods`` in a run record, or
            ``decoder`` in the settings of a result folder. A layout does as well.
    """
    layout = decoder if isinstance(decoder, Layout) else layout_from_description(decoder)
    if layout is None:
        return None
    try:
        return layout.blocks(torch.from_numpy(record.initial()).long())
    except ValueError as error:
        raise ValueError(f"trajectory {record.uid!r}: {error}") from error


def fill_curves_of(record: Trajectory, blocks: BlockLayout) -> FillCurves:
    """How far each of a record's regions (:func:`regions_of`) was filled after every step.

    Cells outside of them are the region ``rest``. The ``lockstep_score`` of the curves tells how
    evenly the regions were filled.
    """
    masked = torch.from_numpy(record.all_states() == record.mask_id)
    names = (*(block.name for block in blocks.blocks), "rest")
    return fill_curves(masked, blocks.region_ids(), names)
