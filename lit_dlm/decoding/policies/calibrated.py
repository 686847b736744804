"""Confidence weighted by position and by how rare a token is in a background corpus."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import TopQuotaPolicy
from lit_dlm.decoding.state import DecodeState, Proposal
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.batches import DeviceTable


class PCSamplerPolicy(TopQuotaPolicy):
    """Informative tokens first, from the left (PC-Sampler, arXiv 2508.13021).

    The score of cell ``i`` is ``exp(-decay i) min(-p log f, clip)`` with the probability ``p`` of
    its token and the token's frequency ``f`` in a background corpus; the code uses its logarithm,
    which does not underflow. The release adds 1e-9 to ``f``, and counts ``i`` from the start of a
    block, which does not change the order inside the block. The counts are read at first use.

    Args:
        background: JSON file of counts in the release's format: ``num_token`` and, by token id,
            ``p_baseline_dict``; an id that is missing has the count 1. Or ``tiny``, for the
            answers that the embedded model was trained on.
        decay: lambda in the paper: 0 for Sudoku, 0.5 for Countdown, 0.25 for other tasks.
        clip: alpha in the paper, nats.
        sha256: what the digest of the file must be; ``None`` accepts any.
    """

    def __init__(
        self,
        background: str | Path,
        *,
        decay: float = 0.25,
        clip: float = 10.0,
        sha256: str | None = None,
    ) -> None:
        at_least(0, decay=decay)
        within("(0, inf)", clip=clip)
        self.background = str(background)
        self.decay = decay
        self.clip = clip
        self.sha256 = sha256

    @cached_property
    def _counts(self) -> tuple[DeviceTable, str]:
        """``(n + 1,)`` float64 ``-log f`` by id, the last for ``n`` and above; and the digest."""
        path = Path(self.background)
        if self.background == "tiny":
            path = Path(str(files("lit_dlm"))) / "assets" / "tiny" / "token_counts.json"
        try:
            content = path.read_bytes()
            counts = json.loads(content)
            known = {int(token): count for token, count in counts["p_baseline_dict"].items()}
            table = torch.ones(max(known) + 2, dtype=torch.float64)
            table[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
            rarity = -(table / counts["num_token"]).log()
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"background: expected a JSON file with num_token and p_baseline_dict, or 'tiny', "
                f"got {self.background!r} ({error!r})"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256 not in (None, digest):
            raise ValueError(f"background: {path} has sha256 {digest}, expected {self.sha256}")
        return DeviceTable(rarity), digest

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        rarity, _ = self._counts
        salience = proposal.prob * rarity[proposal.ids.clamp_max(len(rarity) - 1)]
        columns = torch.arange(proposal.ids.shape[1], device=proposal.ids.device)
        return salience.clamp_max(self.clip).log() - self.decay * (columns - state.start)

    def describe(self) -> dict[str, Any]:
        names = ("background", "decay", "clip")
        return {name: getattr(self, name) for name in names} | {"sha256": self._counts[1]}
