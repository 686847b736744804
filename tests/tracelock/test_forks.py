"""Decodes that differ in one decision, against the decisions that records hold."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.decoding import BlockWindow, Sampler
from lit_dlm.rl.advantages import LessFirst
from lit_dlm.rl.rollout import ScoredRollout
from lit_dlm.tracelock.forks import FORK, ForkedRollouts, open_decisions
from lit_dlm.tracelock.outcome import RolloutWindow, TraceLockRLModule, draw_log_prob
from lit_dlm.training.ranks import ALONE
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import fit, rollout_data
from tests.tracelock.actors import WORDS, actor


def collected(module: TraceLockRLModule, **options: object) -> list[ScoredRollout]:
    """One RL step of four prompts with a greedy decode and five forks each."""
    data = rollout_data(responses_per_prompt=6, **options)
    source = ForkedRollouts(module, module.rollout_methods, data)
    with torch.no_grad():
        return source.collect(0, 0, version=0, ranks=ALONE).scored


def decisions(record: Trajectory) -> dict[tuple[int, int], tuple[bool, float]]:
    """Commit and log-odds of every candidate by step and position."""
    done, odds = (record.signals[f"step_{name}"] for name in ("commit", "log_odds"))
    return {
        (int(step), int(position)): (bool(done[n]), float(odds[n]))
        for n, (step, position) in enumerate(record.masked_rows())
        if done[n] >= 0
    }


@pytest.mark.parametrize("window", [None, BlockWindow(4)], ids=["whole", "blocks"])
def test_a_fork_is_the_greedy_decode_but_for_one_decision(window: BlockWindow | None) -> None:
    module = actor(window, family=WORDS, forks=True).eval()
    rollouts, effects = collected(module), Counter[bool]()
    for at in range(0, len(rollouts), 6):
        first, *others = (decisions(one.record) for one in rollouts[at : at + 6])
        places = [one.record.meta.get(FORK) for one in rollouts[at : at + 6]]
        assert places[0] is None
        assert len({place for place in places[1:] if place}) == 5  # without replacement
        for place, fork in zip(places[1:], others, strict=True):
            step, position = place
            before = {key: value for key, value in first.items() if key[0] < step}
            assert before.keys() == {key for key in fork if key[0] < step}
            for key, value in before.items():
                assert fork[key] == pytest.approx(value, abs=1e-5)
            here = [key for key in first if key[0] == step]
            changed = [key for key in here if first[key][0] != fork[key][0]]
            best = max(here, key=lambda key: first[key][1])
            greedy = {key: first[key][1] > 0 for key in here}
            greedy[step, position] ^= True
            if not any(greedy.values()):  # the stall rule commits the best one
                greedy[best] = True
            assert {key: fork[key][0] for key in here} == greedy
            effects[bool(changed)] += 1
            for (later, _), (is_committed, odds) in fork.items():
                rest = [value for key, value in fork.items() if key[0] == later]
                if later > step and any(value[1] > 0 for value in rest):
                    assert is_committed == (odds > 0)
    assert effects[True] > 10


def test_only_the_changed_decision_is_trained() -> None:
    module = actor(family=WORDS, forks=True).eval()
    rollouts = collected(module)
    batch = module.rows.samples([one.record for one in rollouts])
    expected = []
    for number, one in enumerate(rollouts):
        found = decisions(one.record)
        if (place := one.record.meta.get(FORK)) is None:
            continue
        step = {key: value for key, value in found.items() if key[0] == place[0]}
        best = max(step, key=lambda key: step[key][1])
        committed = [key for key, value in step.items() if value[0]]
        if committed == [best] and place == best:  # drawn or left to the stall rule: not known
            continue
        done, odds = found[place]
        value = draw_log_prob(torch.tensor(odds), torch.tensor(done))
        expected.append((number, place[1], float(value)))
    tokens = batch.tokens
    assert len(expected) > 10
    assert tokens.response.tolist() == [number for number, *_ in expected]
    assert tokens.position.tolist() == [position for _, position, _ in expected]
    torch.testing.assert_close(tokens.sampled, torch.tensor([value for *_, value in expected]))


def test_open_decisions_are_drawn_by_how_open_they_are() -> None:
    """Odds of 1, 3 and 1/3 to one: p (1 - p) is 4/16, 3/16 and 3/16, so 0.4, 0.3 and 0.3."""
    record = collected(actor(family=WORDS, forks=True).eval())[0].record
    size = len(record.masked_rows())
    log_odds, commit = np.full(size, np.nan, np.float32), np.full(size, -1, np.int8)
    log_odds[:3], commit[:3] = np.log([1.0, 3.0, 1 / 3]), [0, 1, 0]
    signals = {**record.signals, "step_log_odds": log_odds, "step_commit": commit}
    record = ScoredRollout.from_record(record, reward=0.0, kept=True).record
    record.signals.update(signals)
    rows = [tuple(row) for row in record.masked_rows()[:3].tolist()]
    drawn = [open_decisions(record, 1, seed=seed)[0] for seed in range(2000)]
    shares = [drawn.count(row) / len(drawn) for row in rows]
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.3], atol=0.04)
    every = open_decisions(record, 5, seed=0)
    assert sorted(every[:3]) == sorted(rows)
    assert every[3:] == [None, None]


def test_less_first() -> None:
    rewards = torch.tensor([0.5, 0.75, -0.5])
    found = LessFirst(scale=0.25, clip=3.0).compute(rewards)
    assert found.tolist() == [0.0, 1.0, -3.0]


def test_forks_are_of_greedy_decodes_and_compared_with_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^with forks, sampler\.temperature: expected 0\.0, got"):
        actor(forks=True, sampler=Sampler(temperature=1.0))
    message = r"^with model\.forks, data\.advantage: expected LessFirst, got GroupZScore$"
    with pytest.raises(ValueError, match=message):
        fit(actor(family=WORDS, forks=True), rollout_data(), tmp_path, steps=1)


def test_training_with_forks_resumes_and_takes_windows_in_turn(tmp_path: Path) -> None:
    windows = {"whole": RolloutWindow(), "blocks": RolloutWindow(window=BlockWindow(4))}

    def trained(folder: Path, steps: int, resume: Path | None = None) -> str:
        module = actor(family=WORDS, forks=True, windows=windows)
        data = rollout_data(advantage=LessFirst())
        saver = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
        fit(module, data, folder, steps=steps, resume=resume, callbacks=[saver])
        return module.scorer.digest()

    whole = trained(tmp_path / "whole", 4)
    trained(tmp_path / "part", 3)
    assert trained(tmp_path / "part", 4, tmp_path / "part" / "last.ckpt") == whole
    assert whole != actor(family=WORDS).scorer.digest()
