"""A new advantage for reinforcement learning: rewards ranked within their group.

In the folder of this file a run takes it by one line of YAML::

    data:
      init_args:
        advantage: advantage.RankAdvantage

or with settings of its own::

        advantage: {class_path: advantage.RankAdvantage, init_args: {scale: 2.0}}

or as a flag: ``lit-dlm fit --config configs/exp/tracerl_tiny.yaml --data.advantage
advantage.RankAdvantage``.
"""

from __future__ import annotations

from torch import Tensor


class RankAdvantage:
    """Where a response stands in its group, from ``-scale`` (worst) to ``scale`` (best).

    Unlike a z-score it does not care how far rewards lie apart. Equal rewards share a rank.

    Args:
        scale: advantage of the best response.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def compute(self, rewards: Tensor) -> Tensor:
        """Advantages ``(n,)`` of the responses to one prompt."""
        above = (rewards[:, None] > rewards).sum(1)
        below = (rewards[:, None] < rewards).sum(1)
        return self.scale * (above - below) / max(len(rewards) - 1, 1)
