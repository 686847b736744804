"""Writes pictures of decodes: the first ones of a predict run, and fixed prompts in training."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from lightning.pytorch import Callback, Trainer
from PIL import Image

from lit_dlm.predict.decode import DecodedBatch, DecodeModule, PromptBatch
from lit_dlm.reports.pictures import write_pictures
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.samples import Sample, SampleSet
from lit_dlm.reports.viewer import ViewedSet, write_viewer
from lit_dlm.system.options import at_least, of_kind, one_of
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)

Kind = Literal["gif", "fill_order", "order", "statistics"]

_NUM_SAMPLES = 2
_CELLS = 32  # response length for prompts, where the data module does not define one


class TracePictures(Callback):
    """Animation, fill-order heat map, order plot and statistics of decodes.

    In ``predict`` they show the first two samples of each method that the first process decodes, in
    ``{folder}/{method}/`` and on a viewer page, ``{folder}/traces.html``. The module must capture
    its decodes (``model.level``); at level ``signals`` the pictures show confidences too.

    In ``fit`` and ``validate`` they show ``prompts``, decoded after each validation, in
    ``{folder}/step-{step}/{method}/``.

    TensorBoard and W&B loggers get all of them but the animations as images; with a CSV logger
    there are only the files.

    Args:
        folder: where the pictures go.
        kinds: which pictures: ``gif``, ``fill_order``, ``order``, ``statistics``.
        prompts: user turns to decode after validations; none by default.
        method: decoder to use for them; the module's first by default.
        every_n_validations: draw only after every n-th validation.
    """

    writes_files = True

    def __init__(
        self,
        folder: str,
        *,
        kinds: list[Kind] | None = None,
        prompts: list[str] | None = None,
        method: str | None = None,
        every_n_validations: int = 1,
    ) -> None:
        super().__init__()
        at_least(1, every_n_validations=every_n_validations)
        self.folder = Path(folder)
        kinds = list(get_args(Kind)) if kinds is None else kinds
        self.endings: dict[str, str] = {
            kind: ".gif" if kind == "gif" else f"-{kind}.png" for kind in kinds
        }
        self.prompts = list(prompts or [])
        self.method = method or ""
        self.every_n_validations = every_n_validations
        self._num_validations = 0
        self._samples: list[Sample] = []
        self._methods: dict[str, Mapping[str, Any]] = {}

    # -- predict -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        module = of_kind(pl_module, DecodeModule, option="model")
        if stage == "predict":
            if module.level is None:
                raise ValueError(
                    "TracePictures: the module captures no trajectories; set model.level"
                )
            self._samples, self._methods = [], {}
        elif self.prompts:
            self.method = self.method or next(iter(module.decoders), "")
            one_of(*module.decoders, of="TracePictures: ", method=self.method)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        # Samples are numbered across processes by a shared queue, so the first ones of one process
        # are as good as any, and only it has a logger.
        if not trainer.is_global_zero or not isinstance(outputs, DecodedBatch):
            return
        method = outputs.method
        left = _NUM_SAMPLES - sum(one.method == method for one in self._samples)
        if left > 0:
            samples = _samples(outputs.trajectories, outputs.examples, method)[:left]
            self._samples += samples
            self._methods[method] = outputs.decoder
            self._draw(trainer, samples, _pieces(pl_module), self.folder, step=0)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage != "predict" or not self._samples:
            return
        shown = SampleSet(
            label=self.folder.name,
            source=self.folder,
            shards=[],
            samples=self._samples,
            num_available=len(self._samples),
            methods=self._methods,
        )
        sets = [ViewedSet(samples=shown, pieces=_pieces(pl_module))]
        write_viewer(self.folder / "traces.html", sets, title="First samples of each method")
        logger.info("Pictures and viewer page of %d decodes: %s", len(self._samples), self.folder)
        self._samples = []

    # -- fit and validate ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_validations = int(state_dict["num_validations"])

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not self.prompts:
            return
        self._num_validations += 1
        if (self._num_validations - 1) % self.every_n_validations:
            return
        length = getattr(trainer.datamodule, "response_length", _CELLS)  # type: ignore[attr-defined]
        # All processes decode, since sharded weights need all of them; the first one draws.
        samples = self._decode(pl_module, length)
        if trainer.is_global_zero:
            self._methods[self.method] = pl_module.decoders[self.method].describe()
            folder = self.folder / f"step-{trainer.global_step:07d}"
            self._draw(trainer, samples, _pieces(pl_module), folder, step=trainer.global_step)

    def _decode(self, module: DecodeModule, length: int) -> list[Sample]:
        examples = [
            PromptExample(uid=f"prompt/{number:02d}", task="prompt", text=text)
            for number, text in enumerate(self.prompts)
        ]
        batch = PromptBatch(
            examples=examples,
            prompt_ids=[module.encode(example) for example in examples],
            method=self.method,
            response_length=length,
        )
        # Whatever the module's own level is: in training it captures nothing.
        capture = TrajectoryCapture(vocab_size=module.backbone.vocab_size, level="signals")
        module.decode(batch, [capture])  # Lightning's hook has set evaluation mode, no gradients
        uids = [f"{example.uid}@{self.method}" for example in examples]
        return _samples(capture.trajectories(uids), examples, self.method)

    def _draw(
        self,
        trainer: Trainer,
        samples: Sequence[Sample],
        pieces: TokenPieces,
        folder: Path,
        *,
        step: int,
    ) -> None:
        """Writes the pictures; loggers get all but the animations."""
        tagged: dict[str, Path] = {}
        for sample in samples:
            base = folder / file_name(sample.method) / file_name(sample.example)
            paths = {k: base.with_name(base.name + end) for k, end in self.endings.items()}
            write_pictures([sample], pieces, paths, method=self._methods.get(sample.method))
            for kind, path in paths.items():
                if kind != "gif":
                    tagged[f"decode/{sample.method}/{sample.example}/{kind}"] = path
        for target in trainer.loggers:
            log_images(target, tagged, step=step)


def log_images(target: Any, images: Mapping[str, Path], *, step: int) -> None:
    """Sends pictures, by tag, to a logger of W&B or TensorBoard; others, such as CSV, take none."""
    if hasattr(target, "log_image"):
        for tag, path in images.items():
            target.log_image(key=tag, images=[str(path)], step=step)
    elif hasattr(target.experiment, "add_image"):
        for tag, path in images.items():
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            target.experiment.add_image(tag, pixels, step, dataformats="HWC")


def _samples(
    records: Sequence[Trajectory], examples: Sequence[PromptExample], method: str
) -> list[Sample]:
    return [
        Sample(record=record, example=one.uid, task=one.task, method=method, correct=None)
        for record, one in zip(records, examples, strict=True)
    ]


def _pieces(module: DecodeModule) -> TokenPieces:
    return TokenPieces(module.tokenizer, getattr(module.backbone, "vision", None))


def file_name(name: str) -> str:
    """Returns a uid or method as a file name."""
    return re.sub(r"[^\w.+-]+", "_", name).strip(".") or "_"
