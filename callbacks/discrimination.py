"""Measures during fine-tuning how well a model tells certain from uncertain positions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.decoding import decode_prompts
from lit_dlm.modules.discrimination import DiscriminationObserver, score_curve
from lit_dlm.modules.finetune import TrainableModule
from lit_dlm.modules.sharding import whole_weights
from lit_dlm.ops.noise import sample_seed
from lit_dlm.ops.options import at_least
from lit_dlm.reports.plots import plot_steps
from lit_dlm.reports.results import write_json
from lit_dlm.vision.prompts import insert_pictures

SCORE = "val/tds"
"""Name under which the score is logged."""

logger = logging.getLogger(__name__)


class DiscriminationScore(Callback):
    """Decodes some prompts before training, after epochs and in ``validate``; draws the curves.

    The Trajectory Discrimination Score is the variance of the entropies of open positions, see
    :mod:`lit_dlm.modules.discrimination`. It is logged as ``val/tds``; the curves over the steps go
    to ``discrimination.json`` and ``discrimination.png``.

    Args:
        folder: where the two files go.
        method: decoder of the module; its first one by default.
        num_prompts: prompts to decode, of all processes together (64 in the paper).
        batch_size: prompts decoded together.
        every_n_epochs: epochs between two measurements.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        folder: str,
        *,
        method: str | None = None,
        num_prompts: int = 64,
        batch_size: int = 32,
        every_n_epochs: int = 1,
    ) -> None:
        at_least(1, num_prompts=num_prompts, batch_size=batch_size, every_n_epochs=every_n_epochs)
        self.folder = Path(folder)
        self.method = method
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.every_n_epochs = every_n_epochs
        self.curves: dict[str, list[float]] = {}
        self.scores: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks module and decoder before anything is trained.

        Puts itself in front of the other callbacks, so that one which monitors the score is given
        that of the epoch at hand wherever it stands in the list.
        """
        if stage not in ("fit", "validate"):
            return
        # A new list: the trainer is walking along the old one.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda one: one is not self)  # type: ignore[attr-defined]
        if not isinstance(pl_module, TrainableModule):
            raise ValueError(
                f"DiscriminationScore: expected a TrainableModule, got {type(pl_module).__name__}"
            )
        method = self.method or next(iter(pl_module.decoders), None)
        if method not in pl_module.decoders:
            raise ValueError(
                f"DiscriminationScore.method: expected one of the module's decoders "
                f"({', '.join(pl_module.decoders) or 'none'}), got {method!r}"
            )
        self.method = method

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the model as it is, unless a resumed run did so before."""
        if not self.scores:
            self._measure(trainer, pl_module, "start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures after an epoch."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            score = self._measure(trainer, pl_module, f"epoch {trainer.current_epoch}")
            # Equal on all processes; Lightning warns about values of epochs that are not reduced.
            pl_module.log(SCORE, score, sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures at the end of the ``validate`` command; ``fit`` has its own times."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._measure(trainer, pl_module, "validate")

    def _measure(self, trainer: Trainer, module: LightningModule, label: str) -> float:
        assert isinstance(module, TrainableModule)
        assert self.method is not None
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        examples = datamodule.probe_prompts(self.num_prompts)[
            trainer.global_rank :: trainer.world_size
        ]
        observer = DiscriminationObserver()
        training = module.training
        module.eval()
        with whole_weights(module.backbone):
            for first in range(0, len(examples), self.batch_size):
                chosen = examples[first : first + self.batch_size]
                numbers = range(first, first + len(chosen))
                decode_prompts(
                    module.backbone,
                    module.decoders[self.method],
                    [
                        insert_pictures(
                            module.backbone,
                            one.prompt_ids.tolist(),
                            one.pictures.digests if one.pictures else (),
                        )
                        for one in chosen
                    ],
                    response_length=datamodule.response_length,
                    seeds=[sample_seed(module.seed, f"probe:{number}") for number in numbers],
                    observers=[observer],
                )
        module.train(training)
        sums, counts = self._totals(trainer, module, observer, datamodule.response_length)
        score, curve = score_curve(sums, counts)
        self.scores[label], self.curves[label] = score, curve
        if trainer.is_global_zero:
            logger.info("discrimination score, %s: %.4f", label, score)
            found = {"scores": self.scores, "curves": self.curves}
            write_json(self.folder / "discrimination.json", found)
            plot_steps(
                self.curves,
                self.folder / "discrimination.png",
                ylabel="variance of open entropies, nats²",
            )
        return score

    @staticmethod
    def _totals(
        trainer: Trainer, module: TrainableModule, observer: DiscriminationObserver, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums and counts of all processes; a decode has at most one step for each cell."""
        sums, counts = observer.totals()
        both = torch.zeros(2, num_steps, dtype=torch.float64)
        both[0, : len(sums)], both[1, : len(counts)] = sums, counts.double()
        if trainer.world_size > 1:
            both = trainer.strategy.reduce(both.to(module.device), reduce_op="sum").cpu()
        steps = int((both[1] > 0).nonzero().max()) + 1 if bool((both[1] > 0).any()) else 0
        return both[0, :steps], both[1, :steps].long()

    def state_dict(self) -> dict[str, Any]:
        """Scores and curves so far, for a resumed run."""
        return {"scores": dict(self.scores), "curves": dict(self.curves)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them up again."""
        self.scores, self.curves = dict(state_dict["scores"]), dict(state_dict["curves"])
