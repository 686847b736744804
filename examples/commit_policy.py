"""A commit policy of your own: commits what is sure, from the left, and stops at the first doubt.

In the folder of this file::

    policy: {class_path: commit_policy.SurePrefix, init_args: {threshold: 0.9}}
    quota: NoQuota

is a decode file for ``lit-dlm generate --config FILE`` and for ``decoders`` of any experiment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.decoding import DecodeState, Proposal, Selection


class SurePrefix:
    """Commits the longest run of candidates from the left whose probability reaches a threshold.

    Args:
        threshold: least probability of a commit.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        self.threshold = threshold

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Candidates before the first doubtful one; where there are none the loop commits one."""
        is_doubtful = candidates & (proposal.prob < self.threshold)
        commit = candidates & (is_doubtful.cumsum(1) == 0)
        # The stall rule takes the candidate of the highest score: the leftmost.
        columns = torch.arange(candidates.shape[1], device=candidates.device, dtype=torch.float32)
        return Selection(commit, -columns.expand_as(candidates))
