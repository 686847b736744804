"""The base of policies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.plugs import Plug


class CommitPolicy(Plug):
    """Says which candidates become final. It never writes the canvas and never runs the model.

    A class with the method ``select`` is one; see ``examples/commit_policy.py``.
    """

    requires: frozenset[str] = frozenset()
    """What it reads of a proposal beyond tokens and probabilities: ``hidden``, ``entropy``,
    ``margin``, ``drawn``, ``raw_prob``, ``raw_entropy``, ``raw_margin``, or ``region`` (proposals
    for the whole response, not only for the window).
    A policy that asks for ``hidden`` also has an attribute ``hidden_layers: tuple[int, ...]``."""
    needs_quota: bool = False
    needs_layout: bool = False
    forwards_per_step: int = 0
    """Forwards of a learned head in one step: 0 for heuristics."""

    @property
    def trained_on(self) -> Sequence[str]:
        """Names of the tasks that a learned policy saw; empty for heuristics, and where unknown."""
        return ()

    @abstractmethod
    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Chooses among the candidates.

        Args:
            candidates: ``(b, L)`` bool cells that may be committed.
            quota: ``(b,)`` int64 how many to commit, or ``None``.

        Returns:
            The commits and the scores that rank all candidates. A row without a commit is left
            to the stall rule of the loop, which uses the scores.
        """
