"""Endless pre-training batches from task generators, drawn on the fly.

Batch ``n`` is a function of the seed alone, and processes take batches in turn: a resumed run
continues with what it would have seen, and nothing has to be stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import load_tokenizer
from lit_dlm.datamodules.resuming import ResumableDataModule, set_accumulation
from lit_dlm.modules.pretrain import DrillBatch, PretrainBatch
from lit_dlm.ops.schedules import hidden_cells
from lit_dlm.toy.generated import DrillSource, TrainingSource

POOL_STEPS = 8
"""Batches whose problems are drawn together and sorted by prompt length, to save padding."""

DRILL_EVERY = 5
"""Every so many steps have drills, throughout."""

RESULT_HIDE_CHANCE, OTHER_HIDE_CHANCE = 0.8, 0.1
"""How often a drill hides a digit of a result, and any other token."""


@dataclass(eq=False)
class PretrainBatches(IterableDataset[PretrainBatch]):
    """Batches without end, dealt to the processes in turn."""

    sources: Sequence[TrainingSource]
    """Tasks that give prompts and completions."""
    tokenizer: PreTrainedTokenizerBase
    """Turns text into tokens."""
    _: KW_ONLY
    shares: Sequence[float] | None = None
    """Share of each source; equal by default."""
    batch_size: int = 64
    """Rows of a batch ``B``."""
    response_length: int = 32
    """Cells of every response ``G``."""
    suffix_share: float = 0.25
    """Share of rows that hide a suffix."""
    drills: DrillSource | None = None
    """Task that gives drills, if any."""
    dense_drill_steps: int = 700
    """Until this step those of every second step have drills, then those of every fifth."""
    seed: int = 0
    """Of problems, styles and masks."""
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    """Batches of each rank in an optimiser step."""
    first_step: Callable[[], int] = lambda: 0
    """Optimiser steps that are done, asked at each start of iteration."""

    def __post_init__(self) -> None:
        self._pool: tuple[int, list[list[tuple[list[int], list[int]]]]] | None = None

    def __iter__(self) -> Iterator[PretrainBatch]:
        first = self.first_step() * self.accumulate * self.world_size + self.rank
        for number in count(first, self.world_size):
            yield self.batch(number)

    def batch(self, number: int) -> PretrainBatch:
        """Draws one batch.

        Args:
            number: of the batch, those of all processes counted.

        Returns:
            The batch, equal on every call.

        Raises:
            ValueError: a completion does not fit into the response.
        """
        pool, place = divmod(number, POOL_STEPS)
        if self._pool is None or self._pool[0] != pool:
            self._pool = (pool, self._draw_pool(pool))
        rows = self._pool[1][place]
        generator = torch.Generator().manual_seed(self._mask_seed(number))
        ids, pad_mask, start = self._layout(rows)
        hidden = hidden_cells(
            len(rows), self.response_length, suffix_share=self.suffix_share, generator=generator
        )
        # Processes that share weights must run equally many forwards.
        step = number // (self.accumulate * self.world_size)
        has_drill = (step < self.dense_drill_steps and step % 2 == 0) or (step % DRILL_EVERY == 0)
        drill = self._draw_drills(number, generator) if self.drills and has_drill else None
        return PretrainBatch(ids=ids, pad_mask=pad_mask, start=start, hidden=hidden, drill=drill)

    def _mask_seed(self, number: int) -> int:
        """Seed of the masks of one batch."""
        text = f"masks/{self.seed}/0/{number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def _draw_pool(self, number: int) -> list[list[tuple[list[int], list[int]]]]:
        """Token ids of prompts and completions of :data:`POOL_STEPS` batches."""
        shares = self.shares or [1.0] * len(self.sources)
        rng = random.Random(f"problems/{self.seed}/0/{number}")
        pairs = [
            rng.choices(self.sources, shares)[0].draw_pair(rng)
            for _ in range(self.batch_size * POOL_STEPS)
        ]
        prompts = self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt, _ in pairs],
            add_generation_prompt=True,
            return_dict=False,
        )
        completions = self.tokenizer([completion for _, completion in pairs])["input_ids"]
        rows = sorted(zip(prompts, completions, strict=True), key=lambda row: len(row[0]))
        batches = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        rng.shuffle(batches)
        return batches

    def _layout(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, int]:
        """Canvas of prompts, left-padded, and completions, filled with end of text."""
        start = max(len(prompt) for prompt, _ in rows)
        width = start + self.response_length
        ids = torch.full((len(rows), width), self.tokenizer.eos_token_id)
        pad_mask = torch.ones(len(rows), width, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(rows):
            if len(completion) >= self.response_length:
                raise ValueError(
                    f"response_length: a completion of {len(completion)} tokens and its end do not "
                    f"fit into {self.response_length}"
                )
            first = start - len(prompt)
            ids[row, :first] = self.tokenizer.pad_token_id
            pad_mask[row, :first] = False
            ids[row, first : start + len(completion)] = torch.tensor(prompt + completion)
        return ids, pad_mask, start

    def _draw_drills(self, number: int, generator: torch.Generator) -> DrillBatch:
        """Lines of equations whose results are mostly hidden."""
        assert self.drills is not None
        rng = random.Random(f"drills/{self.seed}/0/{number}")
        texts = [self.drills.draw_drill(rng) for _ in range(self.batch_size)]
        lines = self.tokenizer(texts)["input_ids"]
        width = max(len(line) for line in lines)
        ids = torch.full((len(lines), width), self.tokenizer.pad_token_id)
        chance = torch.zeros(len(lines), width, dtype=torch.float32)
        for row, line in enumerate(lines):
            first = width - len(line)
            ids[row, first:] = torch.tensor(line)
            chance[row, first:] = torch.tensor(self._hide_chances(line))
        hidden = torch.rand(chance.shape, dtype=torch.float32, generator=generator) < chance
        return DrillBatch(ids=ids, pad_mask=ids != self.tokenizer.pad_token_id, hidden=hidden)

    def _hide_chances(self, line: Sequence[int]) -> list[float]:
        """Chance of each token to be hidden: high for what an equals sign is followed by."""
        chances = []
        in_result = after_digit = False
        for token in self.tokenizer.convert_ids_to_tokens(list(line)):
            # A number ends at the first word; words may carry the space behind them.
            is_word = token.strip("Ġ").isalpha() and not after_digit
            in_result = token == "=" or (in_result and (token.isdigit() or is_word))
            after_digit = token.isdigit()
            is_result = in_result and token != "="
            chances.append(RESULT_HIDE_CHANCE if is_result else OTHER_HIDE_CHANCE)
        return chances


class PretrainDataModule(ResumableDataModule):
    """The stream of :class:`PretrainBatches` for ``fit``; it resumes at the trainer's step.

    Args:
        sources: tasks that give prompts and completions of their training split.
        tokenizer: folder, embedded name or hub id.
        shares: share of each source; equal by default.
        batch_size: rows of a batch and process.
        rows_per_update: rows of one update over all processes, from which the trainer's
            ``accumulate_grad_batches`` follows for any number of them; ``null`` leaves it alone.
        response_length: cells of every response.
        suffix_share: share of rows that hide a suffix instead of uniform cells.
        drills: task that gives drills, if any.
        dense_drill_steps: until this step every second batch has drills, then every fifth.
        seed: seed of problems, styles and masks.

    Raises:
        ValueError: there is no source, or ``shares`` does not fit.
    """

    def __init__(
        self,
        sources: list[TrainingSource],
        *,
        tokenizer: str,
        shares: list[float] | None = None,
        batch_size: int = 64,
        rows_per_update: int | None = None,
        response_length: int = 32,
        suffix_share: float = 0.25,
        drills: DrillSource | None = None,
        dense_drill_steps: int = 700,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not sources:
            raise ValueError("sources: expected at least one task, got none")
        if shares is not None and (len(shares) != len(sources) or min(shares) <= 0):
            raise ValueError(f"shares: expected {len(sources)} positive numbers, got {shares}")
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.rows_per_update = rows_per_update
        self._settings: dict[str, Any] = {
            "sources": sources,
            "shares": shares,
            "batch_size": batch_size,
            "response_length": response_length,
            "suffix_share": suffix_share,
            "drills": drills,
            "dense_drill_steps": dense_drill_steps,
            "seed": seed,
        }

    def setup(self, stage: str | None = None) -> None:
        """Sets the batches of an update.

        Raises:
            ValueError: the rows of an update do not divide.
        """
        assert self.trainer is not None
        set_accumulation(self.trainer, self.rows_per_update, batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[PretrainBatch]:
        """The endless stream; ``trainer.max_steps`` ends it."""
        trainer = self.trainer
        assert trainer is not None
        batches = PretrainBatches(
            **self._settings,
            tokenizer=load_tokenizer(self.tokenizer),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulate=trainer.accumulate_grad_batches,
            first_step=lambda: trainer.global_step,
        )
        return DataLoader(batches, batch_size=None)
