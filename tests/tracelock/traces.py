"""Traces made by hand."""

import numpy as np

from lit_dlm.trajectories.record import Trajectory
from tests.traces import MASK, VOCAB


def trace(prompt: list[int], tokens: list[int], commit_step: list[int]) -> Trajectory:
    return Trajectory(
        uid="x",
        prompt_ids=np.array(prompt),
        tokens=np.array(tokens, np.int32),
        commit_step=np.array(commit_step),
        num_steps=max(commit_step) + 1,
        mask_id=MASK,
        vocab_size=VOCAB,
    )
