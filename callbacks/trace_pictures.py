"""Writes pictures of decodes: the first ones of a predict run, and fixed prompts in training.

The training prompts are decoded with the weights of the moment after each validation, so that one
can watch a model learn; the pictures go to files and to every logger that takes images.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lit_dlm.modules.decode import DecodedBatch, DecodeModule, PromptBatch
from lit_dlm.ops.options import at_least
from lit_dlm.reports.pictures import write_pictures
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.samples import Sample, SampleSet
from lit_dlm.reports.viewer import ViewedSet, write_viewer
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.capture import TrajectoryCapture

logger = logging.getLogger(__name__)

Kind = Literal["gif", "fill_order", "order", "statistics"]
SUFFIXES: dict[str, str] = {
    "gif": ".gif",
    "fill_order": "-fill_order.png",
    "order": "-order.png",
    "statistics": "-statistics.png",
}


class TracePictures(Callback):
    """Animation, fill-order heat map, order plot and statistics of decodes.

    In ``predict``, of the first samples of each method that the first process decodes, each in
    ``{folder}/{method}/``, and a viewer page of them, ``{folder}/traces.html``. The module must
    capture its decodes (``model.level``); at level ``signals`` the pictures show confidences too.

    In ``fit`` and ``validate``, of ``prompts``: after each validation they are decoded and written
    to ``{folder}/step-{step}/{method}/``.

    TensorBoard and W&B loggers get all of them but the animations as images; with a CSV logger
    there are only the files.

    Args:
        folder: where the pictures go.
        num_samples: samples of each method in ``predict``.
        kinds: which pictures: ``gif``, ``fill_order``, ``order``, ``statistics``.
        prompts: user turns to decode after validations; none by default.
        response_length: cells to fill for them.
        method: decoder to use for them; the module's first by default.
        every_n_validations: leave out the others.
        theme: ``light`` or ``dark``.
    """

    def __init__(
        self,
        folder: str,
        *,
        num_samples: int = 2,
        kinds: list[Kind] | None = None,
        prompts: list[str] | None = None,
        response_length: int = 32,
        method: str | None = None,
        every_n_validations: int = 1,
        theme: Literal["light", "dark"] = "light",
    ) -> None:
        super().__init__()
        chosen = list(SUFFIXES) if kinds is None else list(kinds)
        unknown = sorted(set(chosen) - set(SUFFIXES))
        if unknown or not chosen:
            raise ValueError(f"kinds: expected some of {', '.join(SUFFIXES)}, got {chosen}")
        at_least(
            1,
            num_samples=num_samples,
            response_length=response_length,
            every_n_validations=every_n_validations,
        )
        self.folder = Path(folder)
        self.num_samples = num_samples
        self.kinds = chosen
        self.prompts = list(prompts or [])
        self.response_length = response_length
        self.method = method
        self.every_n_validations = every_n_validations
        self.theme = theme
        self._num_validations = 0
        self._num_seen: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._methods: dict[str, Mapping[str, Any]] = {}

    # -- predict -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there will be something to draw.

        Raises:
            ValueError: the module cannot decode, does not capture, or lacks the method.
        """
        if not isinstance(pl_module, DecodeModule):
            raise ValueError(f"model: expected a DecodeModule, got {type(pl_module).__name__}")
        if stage == "predict":
            if pl_module.capture() is None:
                raise ValueError(
                    "TracePictures: the module captures no trajectories; set model.level"
                )
            self._num_seen.clear()
            self._samples, self._methods = [], {}
        elif self.prompts:
            self._decoder_name(pl_module)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draws the samples of a batch that are among the first of their method."""
        if not trainer.is_global_zero or not isinstance(outputs, DecodedBatch):
            return
        left = self.num_samples - self._num_seen[outputs.method]
        if left <= 0:
            return
        assert isinstance(pl_module, DecodeModule)
        samples = _samples_of(outputs)[:left]
        self._num_seen[outputs.method] += len(samples)
        self._samples += samples
        self._methods[outputs.method] = outputs.decoder
        written = self._draw(samples, _pieces(pl_module), self.folder)
        for target in trainer.loggers:
            log_images(target, written, step=0)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the viewer page of the samples of a predict run."""
        if stage != "predict" or not self._samples:
            return
        assert isinstance(pl_module, DecodeModule)
        shown = SampleSet(
            label=self.folder.name,
            source=self.folder,
            shards=[],
            samples=self._samples,
            num_available=len(self._samples),
            methods=self._methods,
        )
        pieces = _pieces(pl_module)
        write_viewer(
            self.folder / "traces.html",
            [ViewedSet(samples=shown, pieces=pieces)],
            title="First samples of each method",
        )
        logger.info("Pictures and viewer page of %d decodes: %s", len(self._samples), self.folder)
        self._samples = []

    # -- fit and validate ----------------------------------------------------------------------

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decodes the prompts with the weights as they are, draws and logs them.

        All processes decode, since sharded weights need all of them; the first one draws.
        """
        if trainer.sanity_checking or not self.prompts:
            return
        self._num_validations += 1
        if (self._num_validations - 1) % self.every_n_validations:
            return
        assert isinstance(pl_module, DecodeModule)
        method = self._decoder_name(pl_module)
        samples = self._decode(pl_module, method)
        if not trainer.is_global_zero:
            return
        self._methods[method] = pl_module.decoders[method].describe()
        folder = self.folder / f"step-{trainer.global_step:07d}"
        written = self._draw(samples, _pieces(pl_module), folder)
        for target in trainer.loggers:
            log_images(target, written, step=trainer.global_step)

    def _decoder_name(self, module: DecodeModule) -> str:
        name = self.method or next(iter(module.decoders), None)
        if name is None or name not in module.decoders:
            raise ValueError(
                f"TracePictures: method: expected one of the module's decoders "
                f"({', '.join(module.decoders) or 'it has none'}), got {name!r}"
            )
        return name

    def _decode(self, module: DecodeModule, method: str) -> list[Sample]:
        examples = [
            PromptExample(uid=f"prompt/{number:02d}", task="prompt", text=text)
            for number, text in enumerate(self.prompts)
        ]
        batch = PromptBatch(
            examples=examples,
            prompt_ids=[module.encode(example) for example in examples],
            method=method,
            response_length=self.response_length,
        )
        capture = TrajectoryCapture(vocab_size=module.backbone.vocab_size, level="signals")
        module.decode(batch, [capture])  # in evaluation mode, without gradients: Lightning's hook
        records = capture.trajectories([f"{example.uid}@{method}" for example in examples])
        return [
            Sample(record=record, example=example.uid, task="prompt", method=method, correct=None)
            for record, example in zip(records, examples, strict=True)
        ]

    def _draw(
        self, samples: Sequence[Sample], pieces: TokenPieces, folder: Path
    ) -> dict[str, Path]:
        """Pictures by the tag under which loggers show them: animations have none."""
        tagged: dict[str, Path] = {}
        for sample in samples:
            base = folder / file_name(sample.method) / file_name(sample.example)
            paths = {
                kind: base.with_name(base.name + suffix)
                for kind, suffix in SUFFIXES.items()
                if kind in self.kinds
            }
            write_pictures(
                [sample],
                pieces,
                paths,
                method=self._methods.get(sample.method),
                theme=self.theme,
            )
            for kind, path in paths.items():
                if kind != "gif":
                    tagged[f"decode/{sample.method}/{sample.example}/{kind}"] = path
        return tagged

    def state_dict(self) -> dict[str, Any]:
        """How many validations there were, so that a resumed run keeps its rhythm."""
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the rhythm of an earlier run."""
        self._num_validations = int(state_dict["num_validations"])


def log_images(target: Any, images: Mapping[str, Path], *, step: int) -> None:
    """Gives pictures, by tag, to a logger, if it takes any.

    TensorBoard's writer has ``add_image``, Lightning's W&B logger has ``log_image``; others, such
    as the CSV logger, have neither and are left alone.
    """
    if hasattr(target, "log_image"):
        for tag, path in images.items():
            target.log_image(key=tag, images=[str(path)], step=step)
    elif hasattr(target.experiment, "add_image"):
        for tag, path in images.items():
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            target.experiment.add_image(tag, pixels, step, dataformats="HWC")


def _samples_of(decoded: DecodedBatch) -> list[Sample]:
    return [
        Sample(
            record=record,
            example=example.uid,
            task=example.task,
            method=decoded.method,
            correct=None,
        )
        for record, example in zip(decoded.trajectories, decoded.examples, strict=True)
    ]


def _pieces(module: DecodeModule) -> TokenPieces:
    return TokenPieces(module.tokenizer, getattr(module.backbone, "vision", None))


def file_name(name: str) -> str:
    """A uid or method as a file name."""
    return re.sub(r"[^\w.+-]+", "_", name).strip(".") or "_"
