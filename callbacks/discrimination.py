"""Measures during fine-tuning how well a model tells certain from uncertain positions.

The Trajectory Discrimination Score (TABOM, arXiv:2605.11854) is the population variance of the
predictive entropies of positions still masked, excluding those after the first end of text already
written, averaged at every step over the decodes that have at least two such positions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_dlm.decoding.api import DecodePrompt, WorkQueue, decode_stream
from lit_dlm.decoding.state import DecodeState, Observer, StepRecord
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.reports.plots import plot_steps
from lit_dlm.system.files import write_json
from lit_dlm.system.options import at_least, of_kind
from lit_dlm.tensors.precision import evaluating
from lit_dlm.tensors.sampling import entropy_variance, sample_seed
from lit_dlm.training.sharding import whole_weights
from lit_dlm.vision.base import insert_pictures

SCORE = "val/tds"  # name under which the score is logged

_BATCH_SIZE = 32  # prompts decoded together

logger = logging.getLogger(__name__)


class DiscriminationObserver(Observer):
    """Sums the variance of entropies over the rows of every step; watches any number of decodes."""

    # Entropies of the whole response, also outside the decoder's window, under the model's own
    # distribution, whatever the sampler scores.
    requires: frozenset[str] = frozenset({"raw_entropy", "region"})

    def __init__(self) -> None:
        self.steps: dict[int, Tensor] = {}
        """``(2,)`` float32 of each step: sum of variances, number of rows that were averaged."""

    def on_start(self, state: DecodeState) -> None:
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        state, entropy = record.state, record.proposal.raw_entropy
        assert entropy is not None
        is_end = state.editable & torch.isin(state.ids, state.eos_ids)
        # Cells behind an end that is written are filled with more ends, of which the model is
        # certain: they would make every late step look alike.
        behind_end = is_end.cumsum(1) > 0
        variance, counts = entropy_variance(entropy, state.masked & ~behind_end)
        step, self._step = self._step, self._step + 1
        # Kept on the device: an observer that waits for it would slow every decode down.
        both = torch.stack([variance.float().sum(), counts.sum().float()])
        self.steps[step] = self.steps.get(step, 0.0) + both

    def totals(self) -> Tensor:
        """``(2, T)`` float64 sums of variances and numbers of rows, on the CPU."""
        steps = [step.double().cpu()[:, None] for step in self.steps.values()]
        return torch.cat([torch.zeros(2, 0, dtype=torch.float64), *steps], 1)


def score_curve(totals: Tensor) -> tuple[float, list[float]]:
    """Returns the mean over all steps that count, and that of each step (0 where none counts).

    The curve ends with the last step that counts.
    """
    sums, counts = totals
    curve = sums / counts.clamp_min(1)
    counted = (counts > 0).nonzero()[:, 0].tolist()
    score = float(curve[counted].mean()) if counted else 0.0
    return score, curve[: max(counted, default=-1) + 1].tolist()


class DiscriminationScore(Callback):
    """Scores decodes of some prompts before training, after epochs and in ``validate``.

    The module's first decoder decodes them. The score is logged as ``val/tds``; the curves over the
    steps go to ``discrimination.json`` and ``discrimination.png``.

    Args:
        folder: where the two files go.
        num_prompts: prompts to decode, over all processes together (64 in the paper).
    """

    writes_files = True

    def __init__(self, folder: str, *, num_prompts: int = 64) -> None:
        at_least(1, num_prompts=num_prompts)
        self.folder = Path(folder)
        self.num_prompts = num_prompts
        self.curves: dict[str, list[float]] = {}
        self.scores: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        # Before all others, so that a callback that monitors the score sees that of this epoch.
        # A new list, since the trainer is iterating over the old one.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda one: one is not self)  # type: ignore[attr-defined]
        module = of_kind(pl_module, TrainableModule, option="model")
        at_least(1, of="DiscriminationScore: model.", decoders=len(module.decoders))
        name, decoder = next(iter(module.decoders.items()))
        if module.backbone.spec.attention == "block" and decoder.cache.keeps:
            raise ValueError(
                f"DiscriminationScore: model.decoders.{name}.cache: expected NoCache, because a "
                "block model with a cache does not compute later blocks"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.scores:
            self._measure(trainer, pl_module, "start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        score = self._measure(trainer, pl_module, f"epoch {trainer.current_epoch}")
        # Equal on all processes; Lightning warns about values of epochs that are not reduced.
        pl_module.log(SCORE, score, sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._measure(trainer, pl_module, "validate")

    def _measure(self, trainer: Trainer, module: LightningModule, label: str) -> float:
        assert isinstance(module, TrainableModule)
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        examples = list(enumerate(datamodule.probe_prompts(self.num_prompts)))
        # Seeds follow from the prompt's number: the score does not depend on who shares the work.
        examples = examples[trainer.global_rank :: trainer.world_size]
        observer = DiscriminationObserver()
        # Gathered weights: processes run different numbers of forwards, and one that waits for a
        # shard would wait for ever.
        with evaluating(module), whole_weights(module.backbone):
            for first in range(0, len(examples), _BATCH_SIZE):
                prompts = []
                for number, one in examples[first : first + _BATCH_SIZE]:
                    uid = f"probe:{number}"
                    digests = one.pictures.digests if one.pictures else ()
                    ids = insert_pictures(module.backbone, one.prompt_ids.tolist(), digests)
                    prompts.append(DecodePrompt(uid, ids, sample_seed(module.seed, uid)))
                for _ in decode_stream(
                    module.backbone,
                    next(iter(module.decoders.values())),
                    WorkQueue(len(prompts)),
                    prompts.__getitem__,
                    response_length=datamodule.response_length,
                    batch_size=len(prompts),
                    observers=[observer],
                ):
                    pass
        both = observer.totals()
        if trainer.world_size > 1:
            own = torch.tensor(both.shape[1], device=module.device)
            # Processes decode different numbers of steps; sums need equal shapes.
            most = int(trainer.strategy.reduce(own, reduce_op="max"))
            both = torch.nn.functional.pad(both, (0, most - both.shape[1])).to(module.device)
            both = trainer.strategy.reduce(both, reduce_op="sum").cpu()
        score, curve = score_curve(both)
        self.scores[label], self.curves[label] = score, curve
        if trainer.is_global_zero:
            logger.info("discrimination score, %s: %.4f", label, score)
            report = {"scores": self.scores, "curves": self.curves}
            write_json(self.folder / "discrimination.json", report)
            unit = "variance of open entropies, nats²"
            plot_steps(self.curves, self.folder / "discrimination.png", ylabel=unit)
        return score

    def state_dict(self) -> dict[str, Any]:
        return {"scores": dict(self.scores), "curves": dict(self.curves)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores, self.curves = dict(state_dict["scores"]), dict(state_dict["curves"])
