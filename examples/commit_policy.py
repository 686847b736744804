"""A commit policy of your own: commits sure tokens from the left, up to the first doubtful one.

In the folder of this file, these lines are a decode file for ``lit-dlm generate --config FILE`` and
for ``decoders`` in any experiment::

    policy: {class_path: commit_policy.SurePrefix, init_args: {threshold: 0.9}}
    quota: NoQuota
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.decoding import DecodeState, Proposal, Selection


class SurePrefix:
    """Commits candidates from the left as long as their probabilities reach a threshold.

    Args:
        threshold: lowest probability that is committed.
    """

    graph_safe = True  # nothing in select asks for the value of a tensor

    def __init__(self, threshold: float = 0.9) -> None:
        self.threshold = threshold

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Commits up to the first doubtful candidate; if that is nothing, the loop commits one."""
        is_doubtful = candidates & (proposal.prob < self.threshold)
        commit = candidates & (is_doubtful.cumsum(1) == 0)
        # The stall rule commits the candidate with the highest score: the leftmost.
        columns = torch.arange(candidates.shape[1], device=candidates.device, dtype=torch.float32)
        return Selection(commit, -columns.expand_as(candidates))
