"""Training of the acceptance network on outcomes, against loops over records, steps and cells."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dlm.decoding import BlockWindow, Decoder, DecodeSettings, NoQuota, Sampler, prompt_canvas
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig, PositionState
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.ops.sampling import confidence, entropy, margin
from lit_dlm.rl.advantages import GroupMean
from lit_dlm.rl.commits import TraceLockRLModule
from lit_dlm.rl.rollout import gathered, Ranks
from lit_dlm.rl.step import fill_advantages, fill_old_scores, shard_items
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import MASK, VOCAB, G, policy

HEAD = AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16, dropout=0.5)
PROJECTOR = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)


def actor(window: BlockWindow | None = None, **options: object) -> TraceLockRLModule:
    torch.manual_seed(3)
    backbone = policy(lora=False)
    drawn = TraceLockPolicy("none", threshold=0.6, temperature=0.7, max_accept_per_step=None)
    decoder = Decoder(
        policy=drawn,
        window=window,
        quota=NoQuota(),
        sampler=Sampler(),
        settings=DecodeSettings(eos_rule="fill", eos_gate=True),
    )
    return TraceLockRLModule(
        backbone,
        tokenizer="tiny",
        decoders={"drawn": decoder},
        projector=Projector.random_orthogonal(
            ProjectorConfig(hidden_size=backbone.hidden_size, hidden_rank=6, delta_rank=3)
        ),
        head=HEAD,
        **options,  # type: ignore[arg-type]
    )


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
    module.decoders["drawn"](module.backbone, canvas, [capture])
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
        ids = torch.from_numpy(record.canvas(step).astype(np.int64))[None]
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
        best = max(cells, key=lambda c: (float(odds[c]), -c))
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
    items = module.rows.items(records)
    estimates = fill_advantages(module, items, advantage=GroupMean(0.25, 1.5), batch_size=4)
    assert sorted(set(items.advantage.tolist())) == [-1.5, 1.5]  # +-0.5 / 0.25, clipped
    batches = shard_items(items.size.numpy(), batch_size=len(items))
    mismatch = fill_old_scores(module, batches, items)
    assert mismatch[0] / mismatch[2] < 2e-3  # features of float16 against those of the decode
    batch = items.batch(torch.arange(len(items)), num_slots=len(items))
    module.train()
    loss = module.training_step(batch)
    loss.backward()
    expected = [reference(module, record) for record in records]
    torch.testing.assert_close(
        module.score(batch).log_prob, torch.stack(sum(expected, [])), atol=2e-5, rtol=2e-5
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


def test_draws_do_not_depend_on_the_batch_and_features_travel_with_records() -> None:
    module = actor()
    records = decoded(module)
    alone = [decoded(module, range(n, n + 1))[0] for n in range(8)]
    for one, other in zip(records, alone, strict=True):
        np.testing.assert_array_equal(one.commit_step, other.commit_step)
    assert len({tuple(record.commit_step) for record in records}) > 4

    class Two(Ranks):
        def gather(self, data: bytes) -> list[bytes]:
            return [data, b""]

    for one, other in zip(gathered(records, Two(0, 2)), records, strict=True):
        assert one.features is not None
        assert other.features is not None
        np.testing.assert_array_equal(one.features.features, other.features.features)


def test_a_policy_folder_decodes_as_the_module_did(tmp_path: Path) -> None:
    module = actor()
    module.export(tmp_path / "policy")
    loaded = AcceptanceScorer.load(tmp_path / "policy")
    assert loaded.digest() == module.scorer.digest()
    again = actor(policy=str(tmp_path / "policy"))
    for one, other in zip(decoded(module), decoded(again), strict=True):
        np.testing.assert_array_equal(one.commit_step, other.commit_step)
