"""What is written of a run on rollouts; resuming and refusals are in the data module's tests."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lit_dlm.callbacks import RolloutWriter
from lit_dlm.rewards import SpreadFilter
from tests.rollouts import fit, learner, rollout_data


@pytest.mark.slow
def test_a_replay_writes_nothing_and_may_begin_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three RL steps of the two that are stored: the third is the first once more."""
    folder = tmp_path / "rollouts"
    fit(learner(), rollout_data(), tmp_path, callbacks=[RolloutWriter(str(folder))])
    stored = {path: path.read_bytes() for path in folder.iterdir()}
    data = rollout_data(source="shards", shards=str(folder), filters=[SpreadFilter()])
    with caplog.at_level(logging.INFO):
        rl = learner()
        fit(rl, data, tmp_path, steps=3, callbacks=[RolloutWriter(str(folder))])
    assert {record.meta["rl_step"] for record in rl.current.records} == {0}
    assert {path: path.read_bytes() for path in folder.iterdir()} == stored
    assert caplog.text.count("writes nothing, the rollouts are those of") == 1
    assert caplog.text.count("filters, overlong_is_wrong and overlong_margin are not read") == 1
