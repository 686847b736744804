"""Trace generation: the decode loop of ``predict`` with capture.

At level ``features`` a run first fits the projector on a few of its own prompts. The projector is
kept in a folder, so that a resumed run, training and decoding all use the same one.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lit_dlm.backbones import Backbone
from lit_dlm.backbones.projection import (
    PCAFitter,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
)
from lit_dlm.predict.decode import DecodeModule, image_facts
from lit_dlm.tracelock.scorer import ScorerSettings
from lit_dlm.tracelock.states import (
    STATES_PER_TRACE,
    cached_projector,
    state_snapshots,
    trace_states,
)
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, Level, TrajectoryCapture
from lit_dlm.trajectories.features import FeatureScheme
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import add_pictures

logger = logging.getLogger(__name__)


class TraceModule(DecodeModule):
    """Decodes prompts and captures every decode as a trajectory.

    Args:
        backbone: the denoiser.
        level: how much to keep: ``tokens`` (the record alone), ``signals`` (also scores of every
            step), ``features`` (also what the TraceLock policy is trained on) or ``logits`` (also
            the logits of masked positions); the last two without a cache.
        step_ratio: fraction of steps that keep features or logits.
        scheme: how features or logits are stored; their errors: :meth:`StepFeatures.quantize`.
        settings: what the TraceLock policy will be shown.
        hidden_rank: features kept of each hidden snapshot (256 in arXiv 2605.24697).
        delta_rank: features kept of each difference of snapshots (32 there).
        projector_dir: folder of the projector, which is fitted if the folder does not exist; or
            the TraceLock release's ``best_val_loss.pt``. Needed at level ``features``.
        projector_prompts: number of prompts that it is fitted on.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        level: Level = "tokens",
        step_ratio: float = 0.1,
        scheme: FeatureScheme = "int8",
        settings: ScorerSettings | None = None,
        hidden_rank: int = 256,
        delta_rank: int = 32,
        projector_dir: str | None = None,
        projector_prompts: int = 64,
        **common: Any,
    ) -> None:
        super().__init__(backbone, **common)
        if (level == "features") != (projector_dir is not None):
            raise ValueError(
                f"projector_dir: needed at level 'features' and only there, got {projector_dir!r} "
                f"at level '{level}'"
            )
        cached = [name for name, one in self.decoders.items() if one.cache.keeps]
        if level in ("features", "logits") and cached:
            raise ValueError(
                f"decoders.{cached[0]}.cache: expected NoCache at level '{level}', which keeps "
                "positions that a step with a cache does not compute"
            )
        self.level = level
        self.step_ratio = step_ratio
        self.scheme = scheme
        self.settings = settings or ScorerSettings()
        self.hidden_rank = hidden_rank
        self.delta_rank = delta_rank
        self.projector_dir = projector_dir
        self.projector_prompts = projector_prompts

    def describe_capture(self) -> dict[str, Any]:
        return super().describe_capture() | {
            "step_ratio": self.step_ratio,
            "scheme": self.scheme,
            "layout": "logits" if self.level == "logits" else self.settings.layout,
            "hidden_layers": list(self.settings.hidden_layers),
        }

    def on_predict_start(self) -> None:
        super().on_predict_start()
        if self.level == "logits":
            self._features = FeatureCapture(
                function=None,
                hidden_layers=(),
                groups=(self.backbone.vocab_size,),
                projector_digest="",
                steps=partial(KeptSteps, ratio=self.step_ratio),
                scheme=self.scheme,
                layout="logits",
            )
        if self.level != "features":
            return
        assert self.projector_dir is not None
        # One process fits it and the others read its file: two fits would differ by rounding.
        if self.trainer.is_global_zero:
            cached_projector(self.projector_dir, self._fit_projector)
        self.trainer.strategy.barrier("projector")
        projector = Projector.load(self.projector_dir).to(self.device)
        self._features = FeatureCapture(
            function=partial(acceptance_features, projector, settings=self.settings.features),
            hidden_layers=self.settings.hidden_layers,
            groups=feature_groups(projector.config, self.settings.features),
            projector_digest=projector.digest(),
            steps=partial(KeptSteps, ratio=self.step_ratio),
            scheme=self.scheme,
            layout=self.settings.layout,
            scores=self.settings.features.scores,
        )

    def _fit_projector(self) -> Projector:
        """Fits principal components on states of a few prompts, decoded by the first method."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        method = next(iter(self.decoders))
        config = ProjectorConfig(
            hidden_size=self.backbone.hidden_size,
            num_snapshots=len(self.settings.hidden_layers),
            hidden_rank=self.hidden_rank,
            delta_rank=self.delta_rank,
        )
        batches = list(datamodule.first_batches(self.projector_prompts, method))
        with_prompt = self.settings.layout == "all"
        positions = [
            one.response_length + with_prompt * len(p) for one in batches for p in one.prompt_ids
        ]
        config.check_positions(STATES_PER_TRACE * sum(positions))  # refuses too few before decoding
        traces: list[Trajectory] = []
        for batch in batches:
            capture = TrajectoryCapture(vocab_size=self.backbone.vocab_size)
            self.decode(batch, [capture])
            for example in batch.examples:
                add_pictures(self.backbone, example.uid, example.images)
            traces += capture.trajectories(
                [example.uid for example in batch.examples], list(map(image_facts, batch.examples))
            )
            wanted = self.projector_prompts
            logger.info("projector: decoded %d of %d prompts by %s", len(traces), wanted, method)
        fitter = PCAFitter(config)
        for states in trace_states(traces, seed=self.seed):
            states = states.to(self.device)
            layers = self.settings.hidden_layers
            fitter.update(
                state_snapshots(
                    self.backbone, states, hidden_layers=layers, with_prompt=with_prompt
                )
            )
        return fitter.finish()
