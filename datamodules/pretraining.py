"""Endless pre-training batches from task generators, drawn on the fly.

Batch ``n`` is a function of ``n`` and the seed, and processes take batches in turn: a resumed run
continues with what it would have seen, and nothing has to be stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import load_tokenizer
from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.datamodules.resuming import ResumableDataModule
from lit_dlm.finetuning.pretrain import DrillBatch, PretrainBatch
from lit_dlm.system.options import at_least, refuse
from lit_dlm.tensors.schedules import hidden_cells
from lit_dlm.toy.generated import DrillSource, TrainingSource

POOL_STEPS = 8
"""Batches whose problems are drawn together and sorted by prompt length, to save padding."""

DRILL_EVERY = 5  # one in this many steps has drills, throughout the run

RESULT_HIDE_CHANCE, OTHER_HIDE_CHANCE = 0.8, 0.1
"""Probability that a drill hides a token of a result, and any other token."""

SUFFIX_SHARE = 0.25  # share of rows that hide a suffix instead of uniform cells


@dataclass(eq=False, kw_only=True)
class PretrainDataModule(ResumableDataModule):
    """Endless batches for ``fit``, dealt to the processes in turn.

    Args:
        sources: tasks that provide prompts and completions of their training split.
        tokenizer: folder, embedded name or hub id.
        shares: share of each source; equal by default.
        batch_size: rows of a batch and process.
        response_length: cells of every response.
        drills: task that provides drills, if any.
        dense_drill_steps: until this step also every second step has drills, not only every fifth.
        seed: seed of problems, styles and masks.
    """

    sources: list[TrainingSource]
    tokenizer: str
    shares: list[float] | None = None
    batch_size: int = 64
    response_length: int = 32
    drills: DrillSource | None = None
    dense_drill_steps: int = 700
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        at_least(1, sources=len(self.sources))
        shares = self.shares
        if shares is not None and (len(shares) != len(self.sources) or min(shares) <= 0):
            refuse("shares", f"{len(self.sources)} positive numbers", shares)
        self._pool: tuple[int, list[list[tuple[list[int], list[int]]]]] | None = None

    def train_dataloader(self) -> DataLoader[PretrainBatch]:
        """Returns the endless stream from the trainer's step on; ``trainer.max_steps`` ends it."""
        return DataLoader(_Batches(self), batch_size=None)

    @property
    def batches_per_step(self) -> int:
        """Batches of all processes in an optimiser step; 1 without a trainer."""
        trainer = self.trainer
        return 1 if trainer is None else trainer.accumulate_grad_batches * trainer.world_size

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer)

    def batch(self, number: int) -> PretrainBatch:
        """Draws one batch, numbered over all processes; every call returns the same one."""
        pool, place = divmod(number, POOL_STEPS)
        # One pool is kept: a process takes its batches in ascending order, and a resumed one begins
        # in the middle of a pool by drawing all of it.
        if self._pool is None or self._pool[0] != pool:
            self._pool = (pool, self._draw_pool(pool))
        rows = self._pool[1][place]
        # The number alone decides, not what was drawn before it: the first batch after a resume is
        # the one that would have come.
        seed = hashlib.blake2b(f"masks/{self.seed}/0/{number}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        ids, pad_mask, start = self._layout(rows)
        hidden = hidden_cells(
            len(rows), self.response_length, suffix_share=SUFFIX_SHARE, generator=generator
        )
        # Processes that share weights must run equally many forwards.
        step = number // self.batches_per_step
        has_drill = (step < self.dense_drill_steps and step % 2 == 0) or (step % DRILL_EVERY == 0)
        drill = self._draw_drills(number, generator) if self.drills and has_drill else None
        return PretrainBatch(ids=ids, pad_mask=pad_mask, start=start, hidden=hidden, drill=drill)

    def _draw_pool(self, number: int) -> list[list[tuple[list[int], list[int]]]]:
        """Token ids of prompts and completions of :data:`POOL_STEPS` batches."""
        shares = self.shares or [1.0] * len(self.sources)
        rng = random.Random(f"problems/{self.seed}/0/{number}")
        pairs = [
            rng.choices(self.sources, shares)[0].draw_pair(rng)
            for _ in range(self.batch_size * POOL_STEPS)
        ]
        chats = [[{"role": "user", "content": prompt}] for prompt, _ in pairs]
        template = partial(apply_chat_template, self._tokenizer, add_generation_prompt=True)
        texts = [template(chat, tokenize=False) for chat in chats]
        prompts = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        completions = self._tokenizer([completion for _, completion in pairs])["input_ids"]
        # Sorted and then cut: rows of a batch have similar prompts; batches are shuffled again.
        rows = sorted(zip(prompts, completions, strict=True), key=lambda row: len(row[0]))
        batches = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        rng.shuffle(batches)
        return batches

    def _layout(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, int]:
        """Canvas of prompts, left-padded, and completions, filled with end of text."""
        start = max(len(prompt) for prompt, _ in rows)
        width = start + self.response_length
        ids = torch.full((len(rows), width), self._tokenizer.eos_token_id)
        pad_mask = torch.ones(len(rows), width, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(rows):
            # One cell is for the end of text, without which the model would learn never to stop.
            if len(completion) >= self.response_length:
                raise ValueError(
                    f"response_length: a completion of {len(completion)} tokens and its end do not "
                    f"fit into {self.response_length}"
                )
            first = start - len(prompt)
            ids[row, :first] = self._tokenizer.pad_token_id
            pad_mask[row, :first] = False
            ids[row, first : start + len(completion)] = torch.tensor(prompt + completion)
        return ids, pad_mask, start

    def _draw_drills(self, number: int, generator: torch.Generator) -> DrillBatch:
        assert self.drills is not None
        rng = random.Random(f"drills/{self.seed}/0/{number}")
        texts = [self.drills.draw_drill(rng) for _ in range(self.batch_size)]
        lines = self._tokenizer(texts)["input_ids"]
        pad_id = self._tokenizer.pad_token_id
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad([torch.tensor(line) for line in lines], padding_value=pad_id)
        chances = [self._hide_chances(line) for line in lines]
        chance = pad([torch.tensor(row, dtype=torch.float32) for row in chances])
        hidden = torch.rand(chance.shape, dtype=torch.float32, generator=generator) < chance
        return DrillBatch(ids=ids, pad_mask=ids != pad_id, hidden=hidden)

    def _hide_chances(self, line: Sequence[int]) -> list[float]:
        """Returns the probability of hiding each token: high for what follows an equals sign."""
        chances = []
        in_result = after_digit = False
        for token in self._tokenizer.convert_ids_to_tokens(list(line)):
            # A number ends at the first word; words may include the space after them.
            is_word = token.strip("Ġ").isalpha() and not after_digit
            in_result = token == "=" or (in_result and (token.isdigit() or is_word))
            after_digit = token.isdigit()
            is_result = in_result and token != "="
            chances.append(RESULT_HIDE_CHANCE if is_result else OTHER_HIDE_CHANCE)
        return chances


class _Batches(IterableDataset[PretrainBatch]):
    """This process's batches from the current step on; Lightning does not split them again."""

    def __init__(self, data: PretrainDataModule) -> None:
        self.data = data

    def __iter__(self) -> Iterator[PretrainBatch]:
        trainer = self.data.trainer
        assert trainer is not None
        # Counted from the optimiser's step: a checkpoint needs no position in the data.
        first = trainer.global_step * self.data.batches_per_step + trainer.global_rank
        return map(self.data.batch, count(first, trainer.world_size))
