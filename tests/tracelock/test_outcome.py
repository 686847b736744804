"""Training of the acceptance network on outcomes, against loops over records, steps and cells."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.callbacks import AdapterCheckpoint, RolloutWriter
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Decoder,
    DecodeSettings,
    DualCache,
    NoQuota,
    SlidingWindow,
    decode,
    prompt_canvas,
)
from lit_dlm.rewards import Graded
from lit_dlm.rewards.speed import ForwardPrice, PriceConstraint
from lit_dlm.rl.advantages import GroupMean
from lit_dlm.rl.metrics import RolloutValidation
from lit_dlm.rl.rollout import gathered
from lit_dlm.rl.rollout_files import RolloutFiles
from lit_dlm.rl.settings import PolicyObjective
from lit_dlm.rl.step import estimate_advantages, shard_samples
from lit_dlm.tensors.sampling import confidence, entropy, margin
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.tracelock import outcome
from lit_dlm.tracelock.network import PositionState
from lit_dlm.tracelock.outcome import RolloutWindow, TraceLockRLModule
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.tracelock.scorer import AcceptanceScorer, CommitSettings
from lit_dlm.training.ranks import Ranks
from lit_dlm.trajectories import format as blocks
from lit_dlm.trajectories.members import encode_members
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.finetuning.runs import two_processes
from tests.processes import in_two_processes
from tests.rollouts import (
    MASK,
    VOCAB,
    DigitReward,
    G,
    advantaged,
    fit,
    policy,
    rollout_data,
    scored,
    with_old_scores,
)
from tests.tracelock.actors import HEAD, WORDS, actor


def decoded(module: TraceLockRLModule, numbers: range = range(8)) -> list[Trajectory]:
    """Two responses each to prompts of one to four tokens, with rewards 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (1 + n % 4,), generator=generator) for n in range(4)]
    capture = module.rollout_capture("drawn")
    canvas = prompt_canvas(
        [prompts[number // 2] for number in numbers],
        response_length=G,
        spec=module.backbone.spec,
        seeds=list(numbers),
    )
    decode(module.backbone, module.decoders["drawn"], canvas, [capture])
    facts = {"rl_step": 0, "kept": True}
    metas = [
        {**facts, "prompt": n // 2, "response": n % 2, "reward": float(n % 2), "correct": n % 2 > 0}
        for n in numbers
    ]
    return capture.trajectories([f"r{n}" for n in numbers], metas)


def reference(module: TraceLockRLModule, record: Trajectory) -> list[Tensor]:
    """Log-probability of what every step did with each candidate; a forward per step."""
    found, scorer, P = [], module.scorer, record.num_prompt
    drawn = module.decoders["drawn"]
    assert isinstance(drawn.policy, TraceLockPolicy)
    for step in range(record.num_steps):
        ids = torch.tensor([*record.prompt_ids.tolist(), *record.state_at(step).tolist()])[None]
        masked = ids[0, P:] == MASK
        with torch.no_grad():
            layers = scorer.settings.hidden_layers
            out = module.backbone.denoise(ids, response_start=P, hidden_layers=layers)
        logits = out.logits[0, P:]
        logits[:, MASK] = -torch.inf
        proposal = logits.argmax(-1)
        scores = {"entropy": entropy(logits), "margin": margin(logits)}
        features = scorer.features(out.hidden[0, P:], confidence(logits, proposal), **scores)
        features = features.half().float()  # as records keep them
        cells = masked.nonzero()[:, 0].tolist()
        if isinstance(drawn.window, BlockWindow):
            block = cells[0] // drawn.window.block_length
            cells = [c for c in cells if c // drawn.window.block_length == block]
        visible = torch.zeros(1, G, dtype=torch.bool)
        state = torch.where(masked, int(PositionState.GEN), int(PositionState.LOCKED))[None]
        ends = torch.isin(ids[0, P:], torch.tensor(module.backbone.spec.eos_ids))
        proposes_end = torch.isin(proposal, torch.tensor(module.backbone.spec.eos_ids))
        if not ends.any() and not all(proposes_end[c] for c in cells):
            cells = [c for c in cells if not proposes_end[c]]
        # The window is known by its last candidate: what lies right of it is not seen.
        open_cells = masked.nonzero()[:, 0].tolist()
        visible[0, [c for c in open_cells if c <= cells[-1]]] = True
        output = scorer.head(features[None].masked_fill(~visible[..., None], 0.0), state, visible)
        odds = drawn.policy.log_odds(output.decision_logits[0])
        written = set(record.committed_at(step).tolist())
        best = max(cells, key=lambda c: (odds[c].item(), -c))
        committed = [c for c in cells if c in written and record.tokens[c] == proposal[c]]
        if committed == [best]:
            cells = [c for c in cells if c != best]
        found += [
            torch.log(odds[c].sigmoid() if c in committed else 1 - odds[c].sigmoid()) for c in cells
        ]
    return found


@pytest.mark.parametrize("window", [None, BlockWindow(3)], ids=["whole", "blocks"])
def test_scores_losses_and_gradients_equal_a_loop_over_steps(window: BlockWindow | None) -> None:
    module = actor(window)
    records = decoded(module)
    samples, estimates = advantaged(module, records, advantage=GroupMean(0.25, 1.5))
    assert sorted(set(samples.tokens.advantage.tolist())) == [-1.5, 1.5]  # +-0.5 / 0.25, clipped
    batches = shard_samples(samples.size.numpy(), batch_size=len(samples))
    samples, mismatch = with_old_scores(module, batches, samples)
    assert mismatch[0] / mismatch[2] < 2e-3  # features of float16 against those of the decode
    batch = samples.select(torch.arange(len(samples)), num_slots=len(samples))
    module.train()
    loss = module.training_step(batch)
    loss.backward()
    expected = [reference(module, record) for record in records]
    torch.testing.assert_close(
        module.score(batch).log_prob,
        torch.stack([*chain.from_iterable(expected)]),
        atol=2e-5,
        rtol=2e-5,
    )
    found = {name: value.grad for name, value in module.scorer.head.named_parameters()}
    module.scorer.head.zero_grad()
    sign = [1.5 if record.meta["reward"] else -1.5 for record in records]
    slow = -sum(a * torch.stack(own).sum() for a, own in zip(sign, expected, strict=True))
    (slow / len(records)).backward()
    for name, value in module.scorer.head.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(found[name], value.grad, atol=1e-4, rtol=1e-4)
    assert estimates.members.any()


def test_draws_do_not_depend_on_the_batch_and_features_travel_with_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = actor()
    records = decoded(module)
    alone = [decoded(module, range(n, n + 1))[0] for n in range(8)]
    for one, other in zip(records, alone, strict=True):
        np.testing.assert_array_equal(one.commit_step, other.commit_step)
    assert len({tuple(record.commit_step) for record in records}) > 4

    class Two(Ranks):
        def gather(self, data: bytes) -> list[bytes]:
            return [data, b""]

    monkeypatch.setattr(outcome, "HELD_BYTES", records[0].features.nbytes)
    open_files = len(os.listdir("/proc/self/fd"))
    spilled = decoded(module)
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # the file, and its map
    assert isinstance(spilled[-1].features.features, np.memmap)
    # Sixteen records would not fit into one block.
    limit = 12 * blocks.unpack(encode_members(records)[1]).nbytes // 8
    monkeypatch.setattr(blocks, "MAX_RAW_BYTES", limit)
    for one, other in zip(gathered(spilled * 2, Two(0, 2)), records * 2, strict=True):
        assert one.features is not None
        assert other.features is not None
        np.testing.assert_array_equal(one.features.features, other.features.features)


def test_a_policy_folder_decodes_as_the_module_did(tmp_path: Path) -> None:
    module = actor()
    module.export(tmp_path / "policy")
    loaded = AcceptanceScorer.load(tmp_path / "policy")
    assert loaded.digest() == module.scorer.digest()
    assert loaded.commits == CommitSettings(threshold=0.6, max_accept_per_step=None)
    assert module.scorer.commits == CommitSettings()  # of draws that name no threshold
    again = actor(policy=str(tmp_path / "policy"))
    for one, other in zip(decoded(module), decoded(again), strict=True):
        np.testing.assert_array_equal(one.commit_step, other.commit_step)
    loaded.commits = CommitSettings(threshold=1.0)
    loaded.save(tmp_path / "sure")
    with pytest.raises(ValueError, match=r"policy\.threshold: expected a number in \(0, 1\)"):
        actor(policy=str(tmp_path / "sure"), threshold=None)


def learning(folder: Path, *, steps: int, resume: Path | None = None, **options: Any) -> Any:
    module = actor(family=WORDS, objective=PolicyObjective(kl_to="initial", beta=0.1))
    sizes = {"batch_size": 6, "rows_per_update": 12, "passes": 2}
    rewards = [DigitReward(), ForwardPrice(0.01)]
    data = rollout_data(rewards=rewards, advantage=GroupMean(0.1, 3.0), **sizes)
    saver = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    module.scorer.training_facts = {"tasks": ["sudoku"]}
    before = module.scorer.digest()
    savers = [saver, AdapterCheckpoint(str(folder / "policy"))]
    fit(module, data, folder, steps=steps, resume=resume, callbacks=savers, **options)
    assert module.scorer.digest() != before
    facts = AcceptanceScorer.load(folder / "policy" / "last").training_facts
    assert (facts["rl_steps"], facts["tasks"]) == (steps, ["sudoku", "word_problems"])
    state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("scorer.") or "initial" in name for name in state)
    return {name: value.detach().numpy().copy() for name, value in module.scorer.named_parameters()}


def on_two_processes(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    return learning(folder, steps=2, devices=2, strategy=two_processes("ddp"))


@pytest.mark.slow
@pytest.mark.ddp
def test_resumed_and_divided_training_end_in_the_same_policy(tmp_path: Path) -> None:
    whole = learning(tmp_path / "whole", steps=2)
    learning(tmp_path / "part", steps=1)
    resumed = learning(tmp_path / "part", steps=2, resume=tmp_path / "part" / "last.ckpt")
    both = in_two_processes(on_two_processes, tmp_path / "both")
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name])
        np.testing.assert_allclose(value, both[0][name], atol=2e-5)
        np.testing.assert_array_equal(both[0][name], both[1][name])


TASKS = [WordProblems("train", num_examples=3, seed=1)]
WINDOWS = {
    "whole": RolloutWindow(),
    "blocks": RolloutWindow(window=BlockWindow(3)),
    "cache": RolloutWindow(window=BlockWindow(3), cache=DualCache()),
}


def in_windows(folder: Path, *, steps: int, resume: Path | None = None) -> Any:
    """Trains in three windows in turn; returns the weights and the windows of RL steps."""
    module = actor(family=WORDS, windows=WINDOWS)
    data = rollout_data(val_tasks=TASKS)
    saver = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    callbacks = [saver, RolloutWriter(str(folder / "rollouts"))]
    trainer = fit(module, data, folder, steps=steps, resume=resume, callbacks=callbacks)
    names = {"num_steps", "reward", *(f"drawn_{one}/num_steps" for one in WINDOWS)}
    assert {f"val/{name}" for name in names} <= trainer.callback_metrics.keys()
    records = TrajectoryShardReader(folder / "rollouts", features=False)
    methods = {record.meta["rl_step"]: record.meta["method"] for record in records}
    return module.scorer.head.state_dict(), [methods[step] for step in sorted(methods)]


def test_windows_take_turns_and_a_resumed_run_goes_on_with_the_next(tmp_path: Path) -> None:
    whole, order = in_windows(tmp_path / "whole", steps=4)
    assert order == ["drawn_whole", "drawn_blocks", "drawn_cache", "drawn_whole"]
    in_windows(tmp_path / "part", steps=2)
    resumed, again = in_windows(tmp_path / "part", steps=4, resume=tmp_path / "part" / "last.ckpt")
    assert again == order
    for name, value in whole.items():
        assert torch.equal(value, resumed[name])


@pytest.mark.parametrize(
    ("windows", "family", "message"),
    [
        ({}, {}, r"^windows: expected at least 1, got 0$"),
        (
            {"ahead": RolloutWindow(window=BlockWindow(4, origin="sequence"))},
            {"attention": "block", "block_size": 3},
            r"^windows\.ahead\.window: \w+ writes block after block, so expected .*$",
        ),
        (
            {"exact": RolloutWindow(window=BlockWindow(3), cache=BlockCache())},
            {},
            r"^windows\.exact\.cache: BlockCache is for block attention, .*$",
        ),
        (
            {"slid": RolloutWindow(window=SlidingWindow(3), cache=DualCache())},
            {},
            r"^windows\.slid\.cache: SlidingWindow has no blocks .*$",
        ),
    ],
)
def test_windows_that_the_model_cannot_have_are_refused(
    windows: dict[str, RolloutWindow], family: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        actor(windows=windows, family=family)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("policy.temperature", {"policy": TraceLockPolicy("none", max_accept_per_step=None)}),
        ("settings.max_commits_per_step", {"settings": DecodeSettings(max_commits_per_step=2)}),
    ],
)
def test_rollouts_are_draws_alone(name: str, change: dict[str, Any]) -> None:
    drawn = TraceLockPolicy("none", temperature=1.0, max_accept_per_step=None)
    components = {"policy": drawn, "quota": NoQuota(), **change}
    with pytest.raises(ValueError, match=rf"decoders\.drawn\.{re.escape(name)}: expected"):
        TraceLockRLModule(
            policy(lora=False),
            tokenizer="tiny",
            decoders={"drawn": Decoder(**components)},
            projector=Projector(ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)),
            head=HEAD,
        )


def test_what_training_of_commits_cannot_have_is_refused(tmp_path: Path) -> None:
    for name, value in (("normalise", "response_length"), ("temperature", 3.0)):
        with pytest.raises(ValueError, match=rf"objective\.{name}: expected .* got {value!r}"):
            actor(objective=PolicyObjective(**{name: value}))
    with pytest.raises(ValueError, match=r"objective\.kl_to: .* with objective\.beta 0"):
        actor(objective=PolicyObjective(kl_to="initial", beta=0.0))
    folder = tmp_path / "rollouts"
    module, data = actor(family=WORDS), rollout_data(prompts_per_step=1)
    saver = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    fit(module, data, tmp_path, steps=1, callbacks=[RolloutWriter(str(folder)), saver])
    stored = rollout_data(source="shards", shards=str(folder))
    with pytest.raises(ValueError, match=r"source: expected online .* got shards"):
        fit(actor(family=WORDS), stored, tmp_path, steps=1)
    elsewhere = rollout_data(engine=RolloutFiles([]))
    with pytest.raises(ValueError, match=r"engine: expected none .* got RolloutFiles"):
        fit(actor(family=WORDS), elsewhere, tmp_path, steps=1)
    # The folder is that of the run that goes on, whose policy is another one by now.
    again, data = actor(family=WORDS), rollout_data(prompts_per_step=1)
    resume = {"callbacks": [RolloutWriter(str(folder))], "resume": tmp_path / "last.ckpt"}
    fit(again, data, tmp_path, steps=2, **resume)
    assert {record.meta["rl_step"] for record in TrajectoryShardReader(folder)} == {0, 1}


def test_rewards_per_token_are_refused() -> None:
    rl = actor()
    records = decoded(rl, range(1))
    samples, rollouts = (
        rl.rows.samples(records),
        [replace(scored(records)[0], token_rewards=[1.0] * G)],
    )
    with pytest.raises(ValueError, match="r0: expected rewards of responses"):
        estimate_advantages(rl, rollouts, samples, advantage=GroupMean(), batch_size=4)


def test_a_decode_that_leaves_no_choice_is_no_item_and_moves_no_other() -> None:
    module = actor()
    records = decoded(module)
    alone = records[0]
    # As if its best candidate alone had been committed in every step.
    done, odds = (alone.signals[name].copy() for name in ("step_commit", "step_log_odds"))
    steps = alone.masked_rows()[:, 0]
    done[:] = -1
    first = np.flatnonzero(np.diff(steps, prepend=-1))
    done[first], odds[first] = 1, 0.0
    forced = replace(alone, signals={"step_commit": done, "step_log_odds": odds})
    samples = module.rows.samples([records[1], forced, records[2]])
    assert samples.sample_response.tolist() == [0, 2]
    expected = [*reference(module, records[1]), *reference(module, records[2])]
    found = module.eval().score(samples.select(torch.arange(2))).log_prob
    torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("rewards", "tasks", "message"),
    [
        ([Graded()], TASKS, r"^data\.rewards: expected ForwardPrice, .*, got none$"),
        ([Graded(), ForwardPrice(0.0)], TASKS, r"^constraint: ForwardPrice\.price: .* got 0\.0$"),
        ([Graded(), ForwardPrice(0.1)], None, r"^constraint: expected graded val_tasks, .* none$"),
        ([DigitReward(), ForwardPrice(0.1)], TASKS, r"^constraint: expected graded val_tasks, .*"),
    ],
)
def test_runs_without_a_price_or_an_accuracy_are_refused(
    tmp_path: Path, rewards: list[Any], tasks: Any, message: str
) -> None:
    module = actor(family=WORDS, constraint=PriceConstraint())
    with pytest.raises(ValueError, match=message):
        fit(module, rollout_data(rewards=rewards, val_tasks=tasks), tmp_path, steps=1)


def held(
    folder: Path, accuracies: list[float], *, steps: int, resume: Path | None = None
) -> tuple[list[float], AcceptanceScorer]:
    """Prices of the RL steps of a run whose validations find these accuracies, and the policy."""
    module = actor(family=WORDS, constraint=PriceConstraint(margin=0.0))
    data = rollout_data(rewards=[DigitReward(), Graded(), ForwardPrice(0.02)], val_tasks=TASKS)
    prices: list[float] = []

    class Watch(ModelCheckpoint):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            one = pl_module.loop.current.rollouts[0]
            prices.append(round(-one.parts["forwards"] / one.record.num_steps, 6))

    found: Iterator[float] = iter(accuracies)

    def result(self: RolloutValidation, ranks: Any) -> dict[str, float]:
        self.last = {"reward": 0.0, "accuracy": next(found)}
        return self.last

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutValidation, "result", result)
        saver = Watch(folder, filename="last", enable_version_counter=False)
        options: Any = {"callbacks": [saver], "num_sanity_val_steps": -1}
        fit(module, data, folder, steps=steps, resume=resume, **options)
    return prices, module.scorer


def test_the_price_of_a_run_falls_rises_back_and_is_resumed(tmp_path: Path) -> None:
    """Accuracy 0.5 at the start, then 0.4, 0.4, 0.6 and 0.6: 0.02 halves twice, and doubles."""
    prices, policy = held(tmp_path / "whole", [0.5, 0.4, 0.4, 0.6, 0.6], steps=4)
    assert prices == [0.02, 0.01, 0.005, 0.01]
    held(tmp_path / "part", [0.5, 0.4, 0.4], steps=2)
    # The check at the start of the second part finds another accuracy, which is none of a start.
    last = tmp_path / "part" / "last.ckpt"
    resumed, other = held(tmp_path / "part", [0.7, 0.6, 0.6], steps=4, resume=last)
    assert resumed == prices[2:]
    assert other.digest() == policy.digest()
