"""Prompts with finished responses for fine-tuning, in an order that survives a restart."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.config.components import checked_component
from lit_dlm.datamodules.resuming import ExampleRef, ResumableDataModule, refuse_overfit_batches
from lit_dlm.datamodules.supervised_sources import ModelFacts, ResponsesFile, SupervisedSource
from lit_dlm.datamodules.trajectories import is_validation
from lit_dlm.decoding.api import prompt_limit
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import at_least, of_kind, refuse, within
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample, collate, needed_positions
from lit_dlm.training.fit_loop import set_accumulation
from lit_dlm.training.layout import row_tokens

logger = logging.getLogger(__name__)

_VALIDATION_SEED = 1_000_003  # added to the seed: validation has fixed noise that is not trained on


@dataclass(eq=False)
class SupervisedDataModule(ResumableDataModule):
    """Training and validation batches from any sources, held in memory as token ids.

    The order depends only on the seed and the optimiser step, noise only on the seed, the pass and
    the sample's uid: a run that is stopped and resumed trains on what an uninterrupted one would
    have trained on.

    Args:
        sources: where examples come from.
        path: a file of answered prompts: short for a ``ResponsesFile`` behind the sources.
        response_length: cells of every response. With a block model, a batch leaves out blocks
            after those of its last targets.
        batch_size: examples per batch and process.
        group_by_length: puts examples of similar length into one batch, so that less of it is
            padding (transformers' option of that name): runs of 50 batches of the shuffled order
            are sorted by length, and their batches shuffled. Useful with ``batch_size`` above 1 on
            block models, whose rows end with their answers.
        rows_per_update: examples of one update over any number of processes; the trainer's
            ``accumulate_grad_batches`` is set to match. ``null`` leaves it alone.
        max_prompt_length: examples with longer prompts are left out, as are those whose prompts do
            not fit the model's positions beside a response.
        overlong: what happens to responses longer than ``response_length``: ``cut`` (as in the
            releases) or ``drop``.
        limit: most examples of all sources together; all by default.
        val_fraction: share of prompts kept for validation, by a hash of their uids; 0 for none. In
            files these are row numbers, so further answers to a prompt may be on the other side.
        val_batch_size: examples per validation batch; ``batch_size`` by default.
        seed: seed of split and order.
        num_workers: loader processes.
    """

    sources: list[SupervisedSource] = field(default_factory=list)
    _: KW_ONLY
    path: str | None = None
    response_length: int = 256
    batch_size: int = 8
    group_by_length: bool = False
    rows_per_update: int | None = None
    max_prompt_length: int = 256
    overlong: Literal["cut", "drop"] = "cut"
    limit: int | None = None
    val_fraction: float = 0.0
    val_batch_size: int | None = None
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        if self.path is not None:
            self.sources = [*self.sources, ResponsesFile(self.path)]
        at_least(1, sources=len(self.sources), response_length=self.response_length)
        at_least(1, batch_size=self.batch_size, limit=self.limit)
        at_least(1, max_prompt_length=self.max_prompt_length)
        within("[0, 1)", val_fraction=self.val_fraction)
        for source in self.sources:
            checked_component(source, SupervisedSource, option="sources")
        self.examples: list[SupervisedExample] = []
        """What is trained and validated on; read by ``setup``."""

    def setup(self, stage: str | None = None) -> None:
        refuse_overfit_batches(self.trainer, instead="data.limit")
        if stage == "fit" and self.trainer is not None:
            set_accumulation(self.trainer, self.rows_per_update, batch_size=self.batch_size)
        if self.examples:
            return
        module = self.trainer.lightning_module if self.trainer is not None else None
        module = of_kind(module, SFTModule, option="model")
        spec = module.backbone.spec
        if UNKNOWN_ID in (spec.mask_id, *spec.eos_ids):
            name = "mask_id" if spec.mask_id == UNKNOWN_ID else "eos_ids"
            raise ValueError(
                f"model.backbone.spec_overrides: expected {name}, as the model's files name none"
            )
        facts = ModelFacts(
            tokenizer=module.tokenizer,
            spec=spec,
            vocab_size=module.backbone.vocab_size,
            backbone=module.backbone,
            takes_rewrites=module.masking.takes_rewrites,
        )
        examples = list(self._read(facts))
        for row in chain.from_iterable(example.rows() for example in examples):
            check_learnable(
                row, facts.spec, vocab_size=facts.vocab_size, num_padding=module.num_padding
            )
        check_pairs(examples, module)
        check_decodes(examples, module, response_length=self.response_length)
        self.set_examples(
            examples, facts.spec, num_padding=module.num_padding, noise_seed=module.seed
        )

    def set_examples(
        self,
        examples: list[SupervisedExample],
        spec: BackboneSpec,
        *,
        num_padding: int | None = None,
        noise_seed: int = 0,
    ) -> None:
        """Splits examples into a training and a validation side.

        ``num_padding`` positions of fill after an answer are supervised; ``None`` for all.
        """
        is_val = np.array(
            [is_validation(e.uid, seed=self.seed, fraction=self.val_fraction) for e in examples],
            dtype=bool,
        )
        self.train_numbers = np.flatnonzero(~is_val)
        self.val_numbers = np.flatnonzero(is_val)
        for name, part, wanted in (
            ("training", self.train_numbers, True),
            ("validation", self.val_numbers, self.val_fraction > 0.0),
        ):
            if wanted and not len(part):
                raise ValueError(
                    f"sources: no {name} example is left of {len(examples)} that pass the filters; "
                    f"give more data, or other limits or val_fraction ({self.val_fraction})"
                )
        self.examples = examples
        self._shape: dict[str, Any] = {
            "response_length": self.response_length,
            "spec": spec,
            "num_padding": num_padding,
        }
        self._noise_seed = noise_seed

    def batch(self, refs: Sequence[ExampleRef], *, seed: int | None = None) -> SupervisedBatch:
        """Returns examples as a batch, whose noise is that of training by default."""
        examples = [
            replace(self.examples[ref.number], epoch=ref.epoch, is_real=ref.is_real) for ref in refs
        ]
        seed = self._noise_seed if seed is None else seed
        return collate(examples, seed=seed, cut=True, **self._shape)

    def _read(self, facts: ModelFacts) -> Iterator[SupervisedExample]:
        dropped: Counter[str] = Counter()
        seen: set[str] = set()
        most, limit = prompt_limit(facts.backbone, self.response_length, self.max_prompt_length)
        for example in chain.from_iterable(one.examples(facts) for one in self.sources):
            if self.limit is not None and len(seen) == self.limit:
                break
            if len(example.prompt_ids) > most:
                dropped["prompt"] += 1
                continue
            if max(len(row.response_ids) for row in example.rows()) > self.response_length:
                if self.overlong == "drop":
                    dropped["response"] += 1
                    continue
                example = _cut(example, self.response_length)
                dropped["cut"] += 1
                dropped["end"] += not np.isin(example.response_ids, facts.spec.eos_ids).any()
            if example.uid in seen:
                raise ValueError(f"sources: two examples have the uid {example.uid!r}")
            seen.add(example.uid)
            yield example
        budget = f"response_length = {self.response_length} tokens"
        for what, bound in (("prompt", limit), ("response", budget)):
            if dropped[what]:
                reason = f"whose {what} has more than {bound}"
                logger.warning("left out %d examples %s", dropped[what], reason)
        if dropped["cut"]:
            message = "cut %d responses to response_length, %d tokens, %d of them before their end"
            logger.warning(message, dropped["cut"], self.response_length, dropped["end"])

    def train_dataloader(self) -> DataLoader[Any]:
        trainer, count = self.trainer, len(self.train_numbers)
        batches = 1 if trainer is None else trainer.world_size * trainer.accumulate_grad_batches
        if count < self.batch_size * batches:
            message = "batch_size: an update of %d x %d repeats some of the %d training examples"
            logger.warning(message, batches, self.batch_size, count)
        lengths = None
        if self.group_by_length:
            lengths = np.array([self._num_tokens(n) for n in self.train_numbers.tolist()])
        blocks = np.zeros(count, dtype=np.int64)  # one block: all is in memory
        return self.planned_training(self.batch, blocks, self.train_numbers, lengths=lengths)

    def _num_tokens(self, number: int) -> int:
        example, spec = self.examples[number], self._shape["spec"]
        cells = max(needed_positions(row, **self._shape) for row in example.rows())
        return sum(row_tokens(len(example.prompt_ids), cells, spec))

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        if not len(self.val_numbers):
            if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
                wanted = "a number above 0, the share that validate reads"
                refuse("data.val_fraction", wanted, self.val_fraction)
            # An empty list tells Lightning that there is no validation; it warns about that anyway.
            warnings.filterwarnings(
                "ignore", message=r"Total length of `list` across ranks is zero"
            )
            return []
        batch = partial(self.batch, seed=self._noise_seed + _VALIDATION_SEED)
        return self.planned_validation(
            batch, self.val_numbers, batch_size=self.val_batch_size or self.batch_size
        )

    def probe_prompts(self, count: int) -> list[SupervisedExample]:
        """Returns examples whose prompts are decoded for scores, the same ones at every call.

        They are from the validation side, or from training if there is no validation.
        """
        numbers = self.val_numbers if len(self.val_numbers) else self.train_numbers
        return [self.examples[number] for number in numbers[:count].tolist()]


def _cut(example: SupervisedExample, length: int) -> SupervisedExample:
    arrays = {
        name: getattr(example, name)[:length]
        for name in ("response_ids", "steps", "decode_entropy", "non_ltr")
        if getattr(example, name) is not None
    }
    rejected = None if example.rejected is None else _cut(example.rejected, length)
    return replace(example, rejected=rejected, **arrays)


def check_learnable(
    example: SupervisedExample, spec: BackboneSpec, *, vocab_size: int, num_padding: int | None
) -> None:
    """Refuses ids that the model does not have and targets of probability zero.

    Done before training: the sample can be named here, and a process that failed in the middle of
    an epoch would leave the others waiting.
    """
    for what, ids in (("prompt", example.prompt_ids), ("response", example.response_ids)):
        has_pictures = what == "prompt" and example.pictures is not None
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size) & ~np.bool_(has_pictures))
        if len(outside):
            wanted = f"token ids from 0 to {vocab_size - 1}, which the model has"
            got = f"{ids[outside[0]]} at {what} position {outside[0]}"
            refuse(example.uid, wanted, got, "; were they made with another tokenizer?")
    ids = example.response_ids
    if num_padding is not None:
        ids = ids[: example.answer_length(spec) + num_padding]
    # A mask in a response is a cell that was never written, and is never a target.
    impossible = [token for token in spec.forbidden_ids if token != spec.mask_id]
    found = np.flatnonzero(np.isin(ids, impossible))
    if len(found):
        raise ValueError(
            f"{example.uid}: token {ids[found[0]]} at response position {found[0]} is one that the "
            "model may not produce (forbidden_ids), so it cannot be learnt"
        )


def check_pairs(examples: Sequence[SupervisedExample], module: SFTModule) -> None:
    """Refuses single responses where pairs are trained on, and pairs elsewhere."""
    wants_pairs = module.trains_on_pairs
    texts = ("one response", "a chosen and a rejected response")
    for example in examples:
        if (example.rejected is not None) != wants_pairs:
            wanted = f"{texts[wants_pairs]} for {type(module).__name__}"
            refuse(example.uid, wanted, texts[not wants_pairs])


_ROWS = 256  # number of examples checked together


def check_decodes(
    examples: Sequence[SupervisedExample], module: SFTModule, *, response_length: int
) -> None:
    """Refuses examples that lack something that the module's states or losses are made from.

    Responses have at most ``response_length`` tokens.
    """
    for name, message in module.needs().items():
        lacking = next((one.uid for one in examples if getattr(one, name) is None), None)
        if lacking is not None:
            raise ValueError(f"{lacking}: {message}; the {name} of a decode are expected, got none")
    module.masking.check(
        collate(
            examples[first : first + _ROWS],
            response_length=response_length,
            spec=module.backbone.spec,
            seed=module.seed,
            num_padding=module.num_padding,
        )
        for first in range(0, len(examples), _ROWS)
    )
