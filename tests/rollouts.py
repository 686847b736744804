"""Small policies and their rollouts, for tests of reinforcement learning."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_dlm.backbones import HFBackbone
from lit_dlm.datamodules.rollouts import RolloutDataModule
from lit_dlm.decoding import (
    BlockWindow,
    CacheScheme,
    Decoder,
    DecodeSettings,
    FixedQuota,
    RandomPolicy,
    Sampler,
    decode,
    prompt_canvas,
)
from lit_dlm.decoding.api import SampledWrites
from lit_dlm.rewards import GroupFilter, Reward, RewardScore, Rollout
from lit_dlm.rl.advantages import Advantage, GroupZScore
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.rollout import SAMPLED, ScoredRollout
from lit_dlm.rl.step import Estimates, MicroBatch, estimate_advantages, score_batches, shard_samples
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from tests.finetuning.runs import EOS, EXPERTS, MASK, PAD, VOCAB, G, quiet, small  # noqa: F401 - for others

FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {},
    "dream": {"shift": 1},
    "block from the sequence": {"attention": "block", "block_size": 3},
    "shifted block": {"attention": "block", "block_size": 3, "shift": 1},
    "block from the response": {"attention": "block", "block_size": 3, "block_origin": "response"},
    "causal context": {"attention": "block", "block_size": 3, "causal_context": True},
    "experts": EXPERTS,
}
"""Architecture settings of every kind of attention and alignment."""


def policy(*, lora: bool = True, **changes: Any) -> HFBackbone:
    """Two layers in float64; adapters are not the identity, so nothing hides behind zeros."""
    return small(lora=lora, is_double=True, **{"initializer_range": 0.4, **changes})


def decoder(
    backbone: HFBackbone,
    *,
    temperature: float = 1.0,
    per_step: int = 2,
    cache: CacheScheme | None = None,
) -> Decoder:
    """Random order, some tokens a step; ends when an end of text has nothing open before it."""
    spec = backbone.spec
    window = None
    if spec.attention == "block":
        window = BlockWindow(spec.block_size or 1, origin=spec.block_origin)
    elif cache is not None:
        window = BlockWindow(4)
    return Decoder(
        policy=RandomPolicy(),
        window=window,
        quota=FixedQuota(per_step),
        cache=cache,
        sampler=Sampler(temperature=temperature, score_on="filtered", score_dtype="float64"),
        settings=DecodeSettings(eos_rule="fill"),
    )


def module(backbone: HFBackbone, **options: Any) -> TraceRLModule:
    """A module whose tokenizer is never loaded."""
    cache = options.pop("cache", None)
    options.setdefault("decoders", {"random": decoder(backbone, cache=cache)})
    return TraceRLModule(backbone, tokenizer="tiny", **options)


def decoded(
    backbone: HFBackbone,
    count: int = 6,
    *,
    step: int = 0,
    per_step: int = 2,
    cache: CacheScheme | None = None,
) -> list[Trajectory]:
    """Rollouts of prompts of one to four tokens, two responses each, with rewards 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB, (1 + row % 4,), generator=generator) for row in range(count // 2)
    ]
    capture, sampled = TrajectoryCapture(vocab_size=VOCAB), SampledWrites()
    canvas = prompt_canvas(
        [prompt for prompt in prompts for _ in range(2)],
        response_length=G,
        spec=backbone.spec,
        seeds=range(100 * step, 100 * step + count // 2 * 2),
    )
    decode(
        backbone,
        decoder(backbone, per_step=per_step, cache=cache),
        canvas,
        [capture, sampled],
    )
    metas = [
        {"rl_step": step, "prompt": row // 2, "response": row % 2}
        | {"reward": float(row % 2), "correct": row % 2 > 0, "kept": True}
        for row in range(count // 2 * 2)
    ]
    records = capture.trajectories([f"r{step}.{row}" for row in range(len(metas))], metas)
    return [
        replace(record, signals={SAMPLED: row})
        for record, row in zip(records, sampled.ended()[..., 0].numpy(), strict=True)
    ]


def scored(records: Iterable[Trajectory]) -> list[ScoredRollout]:
    """Rollouts of records that have their scores."""
    return [ScoredRollout.from_record(record) for record in records]


def last_records(rl: TraceRLModule) -> list[Trajectory]:
    """Those of the last RL step of a run, as files hold them."""
    return [one.to_record() for one in rl.loop.current.rollouts]


def direct_log_probs(
    backbone: HFBackbone, record: Trajectory, *, temperature: float = 1.0
) -> Tensor:
    """``(G,)`` log-probability of each token at the state its step saw, by a forward per step.

    No padding, no packing, no fused head; NaN where no step wrote.
    """
    found = torch.full((record.num_generated,), torch.nan, dtype=torch.float64)
    for step in range(record.num_steps):
        ids = torch.tensor([*record.prompt_ids.tolist(), *record.state_at(step).tolist()])[None]
        with torch.no_grad():
            logits = backbone.denoise(ids, response_start=record.num_prompt).logits[0]
        if (words := backbone.spec.text_vocab_size) is not None:  # pictures are never proposed
            logits[:, words:] = -torch.inf
        log_probs = (logits[record.num_prompt :] / temperature).log_softmax(-1)
        for cell in record.committed_at(step).tolist():
            found[cell] = log_probs[cell, record.tokens[cell]]
    return found


def answer_cells(record: Trajectory) -> list[int]:
    """Cells up to the first end of text."""
    ends = np.flatnonzero(record.tokens == EOS)
    return list(range(ends[0] + 1 if len(ends) else record.num_generated))


def every(samples: RolloutBatch) -> Tensor:
    """Numbers of all samples."""
    return torch.arange(len(samples))


def token_table(samples: RolloutBatch, name: str) -> Tensor:
    """``(B, G)`` of a value of all tokens, NaN where there is none; each token at most once."""
    at = samples.tokens.response, samples.tokens.position
    assert torch.stack(at).unique(dim=1).shape[1] == len(at[0])
    table = torch.full(samples.responses.steps.shape, torch.nan, dtype=torch.float64)
    table[at] = getattr(samples.tokens, name).double()
    return table


def with_old_scores(
    rl: TraceRLModule, batches: Sequence[MicroBatch], samples: RolloutBatch
) -> tuple[RolloutBatch, Tensor]:
    """The samples of all batches, with scores, and what the sampler's differ by."""
    found, sums = score_batches(rl, batches, samples)
    known: dict[str, Tensor] = {}
    for (numbers, _), scores in zip(batches, found, strict=True):
        for name, values in scores._asdict().items():
            if values is not None:
                table = known.setdefault(name, values.new_zeros(len(samples.tokens.weight)))
                table[samples.tokens_of(numbers)] = values
    return samples.with_tokens(**known), sums


def prepared(
    rl: TraceRLModule,
    records: Sequence[Trajectory],
    *,
    advantage: Advantage | None = None,
    batch_size: int = 8,
) -> tuple[RolloutBatch, list[MicroBatch]]:
    """Samples and batches with everything that training needs."""
    rl.eval()
    samples, _ = advantaged(rl, records, advantage=advantage)
    batches = shard_samples(samples.size.numpy(), batch_size=batch_size)
    return with_old_scores(rl, batches, samples)[0], batches


def advantaged(
    rl: TraceRLModule,
    records: Sequence[Trajectory],
    *,
    advantage: Advantage | None = None,
    batch_size: int = 8,
) -> tuple[RolloutBatch, Estimates]:
    """Samples with advantages, and what these were estimated to be."""
    samples = rl.rows.samples(records)
    options: Any = {"advantage": advantage or GroupZScore(), "batch_size": batch_size}
    estimates = estimate_advantages(rl, scored(records), samples, **options)
    return estimates.filled_in(samples), estimates


class DigitReward(Reward):
    """Pays for the share of response tokens that are digits: what any policy can learn."""

    name = "digits"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [
            RewardScore(total=sum(map(str.isdigit, r.text)) / max(len(r.text), 1)) for r in group
        ]


class DropAll(GroupFilter):
    """Keeps nothing."""

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        return False


def learner(**options: Any) -> TraceRLModule:
    """A small random policy over the tokens of the embedded tokenizer, in float64."""
    family = options.pop("family", {})
    backbone = policy(
        vocab_size=462,
        forbidden_ids=(PAD, 3, 4),
        lora=options.pop("lora", True),
        **family,
    )
    torch.manual_seed(1)
    return module(
        backbone,
        optimizer=options.pop("optimizer", lambda params: torch.optim.AdamW(params, lr=3e-3)),
        **options,
    )


def rollout_data(**options: Any) -> RolloutDataModule:
    """Four prompts of three responses an RL step."""
    values: dict[str, Any] = {
        "rewards": [DigitReward()],
        "prompts_per_step": 4,
        "responses_per_prompt": 3,
        "response_length": G,
        "rollout_batch_size": 6,
        "batch_size": 8,
        **options,
    }
    return RolloutDataModule([WordProblems("train", num_examples=20)], **values)


def fit(
    rl: TraceRLModule,
    data: RolloutDataModule,
    folder: Path,
    *,
    steps: int = 2,
    resume: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """Trains for some RL steps."""
    saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    settings = {"gradient_clip_val": 1.0, "enable_checkpointing": saves, **options}
    trainer = quiet(folder, max_epochs=steps, callbacks=list(callbacks), **settings)
    trainer.fit(rl, data, ckpt_path=resume, weights_only=True if resume else None)
    return trainer
