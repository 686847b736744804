"""Decoding as a Lightning predict loop, in the base class of all modules but the autoencoder."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import Backbone, tokenizer_of
from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder, DecodeResult, FillCurves, Observer, RegionFill
from lit_dlm.decoding.api import (
    DecodedRows,
    DecodePrompt,
    Detokenizer,
    WorkQueue,
    decode_stream,
    text_cells,
)
from lit_dlm.decoding.decoder import Sweep, expanded
from lit_dlm.decoding.state import DecodeState, QueueObserver, StepRecord
from lit_dlm.system.files import fitting
from lit_dlm.system.options import refuse
from lit_dlm.tasks import PromptExample
from lit_dlm.tasks.base import template_text
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.training.checkpoint import (
    ADAPTERS_KEY,
    adapter_settings,
    require_own_checkpoint,
    use_own_files,
)
from lit_dlm.training.fit_loop import drop_half_update
from lit_dlm.training.sharding import (
    drop_frozen_decoders,
    miss_no_frozen_decoders,
    shard_trained,
    whole_weights,
)
from lit_dlm.training.steps import require_finite_gradients, seed_batch
from lit_dlm.trajectories.capture import CapturedDecode, FeatureCapture, Level, TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import vision_of
from lit_dlm.vision.pictures import Picture

logger = logging.getLogger(__name__)
# Lightning's advertisements for other services, in scripts, too.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "Tip:" not in record.getMessage()
)


@dataclass
class PromptBatch:
    """Prompts of one task for one decoding method."""

    examples: list[PromptExample]
    prompt_ids: list[list[int]]  # token ids after the chat template, one list per example
    method: str  # name of the decoder to use
    response_length: int  # cells to fill


def default_batch(response_length: int) -> int:
    """Returns the default number of prompts decoded together: as many as have 8,192 cells."""
    return max(8192 // response_length, 1)


class PromptStream:
    """Prompts of one task for one decoder, taken by each process when it has room.

    It is the batch of every ``predict_step`` until its responses are decoded. So it is no
    dataclass: of those Lightning would make a copy for each batch.
    """

    def __init__(
        self,
        examples: Sequence[PromptExample],
        encode: Callable[[PromptExample], list[int]],
        *,
        method: str,
        response_length: int,
        batch_size: int,
    ) -> None:
        # Longest prompts first: the canvas shrinks with them, and short ones end the work.
        self.examples = sorted(examples, key=lambda example: -len(example.text))
        self.encode = encode
        self.method = method
        self.response_length = response_length
        self.batch_size = batch_size
        # Processes draw from one queue, since rows need different numbers of steps: prompts that
        # were dealt out beforehand would leave some processes idle.
        self.queue = WorkQueue(len(self.examples), shared=True)
        self.decoded: Iterator[DecodedBatch] | None = None  # finished responses, set by the module
        self.is_done = False  # whether this process has returned its last batch


class StreamCalls(IterableDataset[PromptStream]):
    """The calls of ``predict_step`` for a stream: one for each batch of results."""

    def __init__(self, stream: PromptStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[PromptStream]:
        # A process that comes when others have taken all prompts makes no call.
        if self.stream.queue.reserve(self.stream.queue.slots(self.stream.batch_size)):
            while not self.stream.is_done:
                yield self.stream

    def __len__(self) -> int:
        """Returns the largest number of calls that a process can make."""
        return -(-len(self.stream.examples) // self.stream.batch_size)


@dataclass
class DecodedBatch:
    """What ``predict_step`` returns: one entry per example in every list and tensor."""

    examples: list[PromptExample]
    method: str
    decoder: Mapping[str, Any]  # settings of the decoder, as JSON types
    result: DecodeResult
    # Text of each response, cut at its first end of text if the module has cut_at_eos
    completions: list[str]
    num_tokens: list[int]  # response tokens before the first end of text (the useful ones)
    captured: CapturedDecode | None = None  # what records are made of, if the module captures
    fill: list[FillCurves] | None = None  # how regions were filled, if there is a layout

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """One record per example; made at first use, by the thread that needs them."""
        if self.captured is None:
            return []
        return self.captured.trajectories(
            [self.uid(row) for row in range(len(self.examples))],
            [
                {"task": one.task, "method": self.method, "problem": one.digest, **image_facts(one)}
                for one in self.examples
            ],
        )

    def uid(self, row: int) -> str:
        return decode_uid(self.examples[row], self.method)


class StepReports(QueueObserver):
    """Notifies callbacks of every step of ``predict``; any of them may end the decode.

    It calls ``on_decode_step(trainer, batch, done)``; ``True`` ends the decode. ``done()`` waits
    for the device and returns the filled part of all ``trainer.num_predict_batches``, in batches.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self, trainer: Trainer, stream: PromptStream, number: int) -> None:
        # ``number`` is the index of the stream among all streams of the run.
        self._trainer, self._stream, self._number = trainer, stream, number
        # An expectation: what the queue gives to this process is known only at its end.
        self._num_rows = len(stream.examples) / stream.queue.num_processes
        self._num_begun = 0
        self._takers: list[Callable[[Trainer, PromptStream, Callable[[], float]], bool | None]] = [
            taker
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if callable(taker := getattr(callback, "on_decode_step", None))
        ]

    def on_start(self, state: DecodeState) -> None:
        self._num_begun = len(state.rows)

    def on_step(self, record: StepRecord) -> bool:
        def done() -> float:
            cells = record.new_ids[:, record.state.start :]
            filled = float((cells != record.state.mask_id).float().mean(1).sum())
            rows = self._num_begun - len(cells) + filled
            counts = self._trainer.num_predict_batches
            # A process may get more prompts than its share.
            share = min(rows / self._num_rows, 1.0)
            return sum(counts[: self._number]) + share * counts[self._number]

        # A list, since all are called, whichever of them ends the decode.
        endings = [take(self._trainer, self._stream, done) for take in self._takers]
        return any(endings)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        self._num_begun += len(state.rows)


def encoded_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[dict[str, str]],
    pictures: Sequence[Picture] = (),
    *,
    backbone: Any,
    uid: str,
) -> list[int]:
    """Returns token ids of a chat up to where the model answers; the last turn is the user's.

    ``pictures`` are in the order of their marks in the text; the backbone numbers them.
    """

    def render(content: str) -> str:
        chat = [*turns[:-1], {**turns[-1], "content": content}]
        return str(apply_chat_template(tokenizer, chat, add_generation_prompt=True, tokenize=False))

    if not pictures:
        options = {"add_generation_prompt": True, "return_dict": False}
        return list(apply_chat_template(tokenizer, turns, **options))
    tokenize = partial(tokenizer.encode, add_special_tokens=False)
    # The vision tower's own encoder places the marks of pictures, which a tokenizer would split.
    content = turns[-1]["content"]
    with _named(uid):
        ids = vision_of(backbone, uid).encode(content, pictures, render=render, tokenize=tokenize)
    return list(ids)


@contextmanager
def _named(uid: str) -> Iterator[None]:
    """Adds the sample's uid to errors about its pictures."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{uid}: {str(error).removeprefix(f'{uid}: ')}") from error


def image_facts(example: PromptExample) -> dict[str, Any]:
    """Returns what a record says about the pictures of its prompt: their digests, if it has any."""
    return {"images": [one.digest for one in example.images]} if example.images else {}


def decode_uid(example: PromptExample, method: str) -> str:
    """Key of one decode, ``{example uid}@{method}``."""
    return f"{example.uid}@{method}"


class CheckedModule(LightningModule):
    """Base of all modules: repeatable steps, finite gradients, checkpoints of trained weights."""

    strict_loading = False
    seed: int
    """Base seed."""

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **options: Any) -> Any:
        """Builds a module from its own arguments, and loads the checkpoint's weights into it."""
        try:
            with warnings.catch_warnings():  # a checkpoint has no place for what is frozen
                warnings.filterwarnings("ignore", message="Found keys that are in the model")
                return super().load_from_checkpoint(*args, **options)
        except TypeError as error:
            raise ValueError(
                f"{cls.__name__}.load_from_checkpoint: expected the module's own arguments, such "
                "as backbone=load_backbone(...), beside a file of what was trained; to decode, "
                f"load what module.export(FOLDER) wrote ({error})"
            ) from error

    def setup(self, stage: str) -> None:
        # Other "true" precisions set torch's default dtype and cast every module: heads and their
        # optimisers would be rounded along with the decoder.
        precision = str(self.trainer.precision)
        if precision.endswith("-true") and precision != "32-true":
            hint = "; decoders have a dtype of their own (backbone: dtype: bfloat16)"
            refuse("trainer.precision", "32-true, bf16-mixed or 16-mixed", precision, hint)
        use_own_files(self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_batch(self, self.seed, batch_idx)  # for dropout, so that a resumed run repeats it

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        require_finite_gradients(self)  # in all processes, before any weight changes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._trainer
        with fitting(Path("ckpt_path" if trainer is None else str(trainer.ckpt_path))):
            drop_half_update(self, checkpoint)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Loads weights; those of a network of another size are refused in one line."""
        try:
            return super().load_state_dict(*args, **options)
        except RuntimeError as error:  # torch lists every weight, after a heading
            reason = (str(error).split("\n")[1:2] or [str(error)])[0].strip()
            raise ValueError(f"ckpt_path: expected weights of this model ({reason})") from error

    def on_train_start(self) -> None:
        # Here the states are restored. Torch takes those of any optimiser that has as many
        # parameters, and fails in its first step only.
        for optimizer in self.trainer.optimizers:
            kind = type(optimizer).__name__
            # Switches may be absent: torch adds them, and sharded checkpoints leave some out.
            switches = (bool, type(None))
            needed = {k for k, v in optimizer.defaults.items() if not isinstance(v, switches)}
            for group in optimizer.param_groups:
                if missing := sorted(needed - group.keys()):
                    got = f"that of another optimiser, without {missing[0]}"
                    refuse("ckpt_path", f"the state of {kind}", got)


class DecodeModule(CheckedModule):
    """A frozen backbone and named decoders, run by ``predict``.

    Args:
        backbone: the denoiser.
        decoders: decoding methods by name.
        tokenizer: folder, embedded name or hub id of the tokenizer.
        seed: base seed; every sample's own seed follows from it and the sample's uid.
        level: what ``predict`` keeps of every decode: ``tokens`` (its trajectory, from which it can
            be replayed), ``signals`` (also the scores of every step), or nothing.
        sweep: more decoding methods: a decoder for each of several values of one option.
        chat_template: the text around the turns of a prompt: a shipped name such as
            ``dllm-rl-trado-thinking``, a file or a Jinja text; the tokenizer's own by default.
        cut_at_eos: whether a completion is cut at its first end of text. The TraceLock release
            (arXiv 2605.24697) grades all cells instead, without special tokens.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        tokenizer: str,
        decoders: dict[str, Decoder] | None = None,
        seed: int = 0,
        level: Literal["tokens", "signals"] | None = None,
        sweep: dict[str, Sweep] | None = None,
        chat_template: str | None = None,
        cut_at_eos: bool = True,
    ) -> None:
        super().__init__()
        self.cut_at_eos = cut_at_eos
        self.chat_template = chat_template and template_text(
            chat_template, kind="chat", option="chat_template"
        )
        self.backbone = backbone
        self.tokenizer_path = tokenizer
        self.decoders = {
            name: decoder.on(backbone.spec).encoded(self.marker_ids)
            for name, decoder in expanded(decoders or {}, sweep or {}).items()
        }
        self.seed = seed
        # Checkpoints hold what is trained: a frozen decoder of 16 GB comes from its own files.
        self.register_state_dict_post_hook(drop_frozen_decoders)
        self.register_load_state_dict_post_hook(miss_no_frozen_decoders)
        self.level: Level | None = level
        self._features: FeatureCapture | None = None  # with level ``features``
        self._whole = ExitStack()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = tokenizer_of(self.backbone, self.tokenizer_path, option="model.tokenizer")
        if self.chat_template:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    def marker_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the settings of the trained adapters, which their weights alone do not show."""
        checkpoint[ADAPTERS_KEY] = adapter_settings(self, trained_only=True)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        require_own_checkpoint(self, checkpoint)
        super().on_load_checkpoint(checkpoint)

    def configure_model(self) -> None:
        """Shards what is trained if the strategy is FSDP2 (``ModelParallelStrategy``)."""
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        # Outside of fit, a model without anything to train stays whole on every process.
        if self.device_mesh is not None and (is_trained or self.trainer.state.fn == "fit"):
            mesh = self.device_mesh
            # With replicas the strategy's mesh has two axes, both of data; otherwise Lightning's
            # second axis is for tensor parallelism, which is not used.
            if "replicate" not in (mesh.mesh_dim_names or ()):
                mesh = mesh["data_parallel"]
            shard_trained(self, mesh, precision=str(self.trainer.precision))
        # Weights whose conversion was deferred get their dtype now, before a checkpoint is read.
        for part in self.modules():
            if isinstance(part, HFBackbone):
                part.convert()

    def on_predict_start(self) -> None:
        # Sharded weights are gathered: processes decode different numbers of steps.
        self._whole.enter_context(whole_weights(self))

    def on_predict_end(self) -> None:
        # The time shows whether the work was shared out well.
        done = time.perf_counter()
        self.trainer.strategy.barrier("decoded")
        if self.trainer.world_size > 1:
            logger.info("waited %.1f s for the other processes", time.perf_counter() - done)
        self._whole.close()

    def capture(self) -> TrajectoryCapture | None:
        if self.level is None:
            return None
        return TrajectoryCapture(
            vocab_size=self.backbone.vocab_size, level=self.level, features=self._features
        )

    def describe_capture(self) -> dict[str, Any]:
        """What a run record says of :meth:`capture`."""
        return {"level": self.level}

    @property
    def detokenizer(self) -> Detokenizer:
        """Turns responses into the texts that graders receive."""
        return Detokenizer(self.backbone, self.tokenizer, cut_at_eos=self.cut_at_eos)

    def decode(self, batch: PromptBatch, observers: Sequence[Observer] = ()) -> DecodedRows:
        def prompt(number: int) -> DecodePrompt:
            return self._prompt(batch.examples[number], batch.prompt_ids[number], batch.method)

        (rows,) = decode_stream(
            self.backbone,
            self.decoders[batch.method],
            WorkQueue(len(batch.examples)),
            prompt,
            response_length=batch.response_length,
            batch_size=len(batch.examples),
            detokenizer=self.detokenizer,
            observers=observers,
        )
        return rows

    def _prompt(self, example: PromptExample, ids: list[int], method: str) -> DecodePrompt:
        return DecodePrompt(decode_uid(example, method), ids, sample_seed(self.seed, example.uid))

    def predict_step(
        self, batch: PromptStream, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> DecodedBatch:
        """Decodes until a batch of responses has ended; the others continue in the next call."""
        # The first call of a stream begins its decode, which the later ones continue: rows that are
        # not finished stay on the device between them.
        if batch.decoded is None:
            reports = StepReports(self.trainer, batch, dataloader_idx)
            batch.decoded = self._decoded(batch, reports)
        # If a decode is ended before its first response, Lightning's loop takes the StopIteration
        # for the end of the data.
        return next(batch.decoded)

    def _decoded(self, stream: PromptStream, reports: StepReports) -> Iterator[DecodedBatch]:
        decoder = self.decoders[stream.method]
        capture = self.capture()
        fill = None if decoder.layout is None else RegionFill()

        def prompt(number: int) -> DecodePrompt:
            example = stream.examples[number]
            return self._prompt(example, stream.encode(example), stream.method)

        num_ended = num_tokens = 0
        seconds = 0.0
        for rows in decode_stream(
            self.backbone,
            decoder,
            stream.queue,
            prompt,
            response_length=stream.response_length,
            batch_size=stream.batch_size,
            detokenizer=self.detokenizer,
            observers=[one for one in (capture, fill, reports) if one is not None],
        ):
            num_ended += len(rows.numbers)
            num_tokens += sum(rows.responses.num_tokens)
            seconds += float(rows.result.seconds.sum())
            # Set before the batch is handed over: the data set looks at it for the next call.
            stream.is_done = rows.is_last
            if rows.is_last:
                speed = num_tokens / max(seconds, 1e-9)
                message = "%s, %s: %d prompts, %.0f tokens/s"
                logger.info(message, stream.examples[0].task, stream.method, num_ended, speed)
            yield DecodedBatch(
                examples=[stream.examples[number] for number in rows.numbers],
                method=stream.method,
                decoder=decoder.describe(),
                result=rows.result,
                completions=rows.responses.texts,
                num_tokens=rows.responses.num_tokens,
                captured=None if capture is None else capture.captured(),
                fill=None if fill is None else fill.curves(),
            )

    def prompt_ids(self, example: PromptExample) -> list[int]:
        """Returns the templated chat and the answer's start, as ids; pictures are numbered."""
        tokenizer = self.tokenizer
        ids = encoded_turns(
            tokenizer, example.turns, example.images, backbone=self.backbone, uid=example.uid
        )
        if example.answer_start:
            ids = [*ids, *tokenizer.encode(example.answer_start, add_special_tokens=False)]
        return ids

    def placed(self, example: PromptExample, ids: list[int]) -> list[int]:
        """Returns a prompt for decoding; its pictures are registered until the decode has ended."""
        if not example.images:
            return ids
        with _named(example.uid):
            placed: list[int] = vision_of(self.backbone, example.uid).insert(ids, example.images)
        return placed

    def encode(self, example: PromptExample) -> list[int]:
        return self.placed(example, self.prompt_ids(example))

    def texts(self, records: Sequence[Trajectory]) -> tuple[list[str], list[int]]:
        """Returns texts and lengths in cells of recorded decodes with equally long responses."""
        tokens = torch.from_numpy(np.stack([record.tokens for record in records])).long()
        # Template cells were never decoded and count neither as text nor as length.
        given = [np.zeros_like(r.tokens) if r.given is None else r.given for r in records]
        is_given = torch.from_numpy(np.stack(given)).bool()
        cells = text_cells(tokens, self.backbone.spec.eos_ids, is_given).sum(1)
        return self.detokenizer(tokens, is_given).texts, cells.tolist()
