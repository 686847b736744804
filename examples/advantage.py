"""An advantage of your own for reinforcement learning: rewards ranked within their group.

A run in the folder of this file uses it with one line of YAML::

    data:
      init_args:
        advantage: advantage.RankAdvantage

or with settings::

        advantage: {class_path: advantage.RankAdvantage, init_args: {scale: 2.0}}

or with a flag: ``lit-dlm fit --config exp/tracerl_tiny --data.advantage advantage.RankAdvantage``.
"""

from __future__ import annotations

from torch import Tensor


class RankAdvantage:
    """Ranks a response within its group, from ``-scale`` (worst) to ``scale`` (best).

    Unlike a z-score, it ignores how far apart the rewards are. Equal rewards share a rank.

    Args:
        scale: advantage of the best response.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def compute(self, rewards: Tensor) -> Tensor:
        """Returns the advantages ``(n,)`` of the responses to one prompt."""
        above = (rewards[:, None] > rewards).sum(1)
        below = (rewards[:, None] < rewards).sum(1)
        return self.scale * (above - below) / max(len(rewards) - 1, 1)
