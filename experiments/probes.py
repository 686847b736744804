"""What results do not hold: CPU time, order of writing, and how well scores tell what stands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import HFBackbone
from lit_dlm.decoding import BlockWindow, Decoder, NoQuota, ThresholdPolicy
from lit_dlm.decoding.caches import DualCache, NoCache
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord
from lit_dlm.generation import Generations, generate
from lit_dlm.ops.sampling import sample_seed
from lit_dlm.reports.order import left_to_rightness, text_positions
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.tasks.base import Task
from lit_dlm.trajectories.store.reader import TrajectoryShardReader


@dataclass
class Proposals:
    """Every proposal of decodes of whole responses, with its scores; watches several batches."""

    requires: frozenset[str] = frozenset({"raw_prob"})
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of each step: seeds, whether they stood in the end, probabilities, scores of the policy; all
    ``(M,)``."""

    def on_start(self, state: DecodeState) -> None:
        """Forgets the steps of the batch before."""
        self._steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        """Keeps a step until the end is known."""
        self._steps.append(record)

    def on_end(self, result: DecodeResult) -> None:
        """Compares what was proposed with what came."""
        for record in self._steps:
            rows, looked = record.state.rows, record.candidates
            assert record.proposal.raw_prob is not None
            stood = record.proposal.ids == result.ids[rows]
            seeds = result.seeds[rows][:, None].expand_as(stood)
            scores = (seeds, stood, record.proposal.raw_prob, record.scores)
            self.rows.append(tuple(values[looked] for values in scores))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Probe:
    """A model and problems that it decodes.

    Args:
        backbone: the model.
        tokenizer: its tokenizer.
        task: the problems.
        response_length: cells.
        policy: folder of a TraceLock policy.
    """

    backbone: HFBackbone
    tokenizer: PreTrainedTokenizerBase
    task: Task
    response_length: int
    policy: Path

    def decoder(self, family: str, threshold: float) -> Decoder:
        """A decoder of ``stack_tiny.yaml``.

        Args:
            family: ``threshold`` or ``tracelock``, with ``_dual`` for a cache.
            threshold: of probability or of acceptance.
        """
        is_dual = family.endswith("_dual")
        return Decoder(
            policy=TraceLockPolicy(self.policy, threshold=threshold, max_accept_per_step=None)
            if family.startswith("tracelock")
            else ThresholdPolicy(threshold),
            quota=NoQuota(),
            window=BlockWindow(8) if is_dual else None,
            cache=DualCache() if is_dual else NoCache(),
        )

    def decode(
        self, decoder: Decoder, count: int, watching: Sequence[Proposals] = ()
    ) -> Generations:
        """Decodes the first problems in batches of 100."""
        return generate(
            self.backbone,
            [example.text for example in self.task.examples()[:count]],
            decode=decoder,
            tokenizer=self.tokenizer,
            response_length=self.response_length,
            batch_size=100,
            observers=watching,
        )

    def cpu_time(self, decoder: Decoder, count: int = 200) -> float:
        """CPU milliseconds a problem."""
        self.decode(decoder, 1)  # loads the policy
        began = time.process_time()
        self.decode(decoder, count)
        return 1000 * (time.process_time() - began) / count

    def order(self, threshold: float = 0.9, count: int = 500) -> dict[str, float]:
        """How well probability and policy tell which proposals stand.

        Of all that TraceLock looks at in decodes that end right. A proposal stands if its cell
        holds it in the end.

        Args:
            threshold: of acceptance.
            count: of problems.

        Returns:
            ``probability_auroc`` and ``policy_auroc``: how often a proposal that stands scores
            above one that does not. ``stand``: the share that stands; ``probability``: what the
            model gave them on average.
        """
        proposals = Proposals()
        done = self.decode(self.decoder("tracelock", threshold), count, [proposals])
        right = [
            sample_seed(0, str(number))
            for number, (example, text) in enumerate(
                zip(self.task.examples(), done.texts, strict=False)
            )
            if self.task.grade(example, text).is_correct
        ]
        seeds, stood, probability, scores = map(torch.cat, zip(*proposals.rows, strict=True))
        kept = torch.isin(seeds, torch.tensor(right))
        stood, probability, scores = stood[kept], probability[kept], scores[kept]
        return {
            "probability_auroc": float(binary_auroc(probability, stood.int())),
            "policy_auroc": float(binary_auroc(scores.sigmoid(), stood.int())),
            "stand": float(stood.float().mean()),
            "probability": float(probability.mean()),
        }

    def left_to_right(self, records: Path, count: int = 200) -> float:
        """Kendall's tau between position and step in entropy order, one token a step.

        Args:
            records: of ``stack_tiny.yaml``.
            count: of them.

        Returns:
            The mean over the texts: 1 is left to right, 0 no order.
        """
        reader = TrajectoryShardReader(records)
        uids = [uid for uid in reader.uids if uid.endswith("@entropy_1")][:count]
        pieces = TokenPieces(self.tokenizer)
        taus = [
            left_to_rightness(record, positions=text_positions(record, pieces))
            for record in reader.find(uids)
        ]
        return statistics.mean(tau for tau in taus if tau is not None)
