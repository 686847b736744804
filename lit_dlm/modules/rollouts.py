"""Rollouts: responses of the policy in training, with the steps and probabilities of sampling.

The engine is a plain class over the module's own decoder and weights, so online training, replay
and validation share it; another engine needs :meth:`RolloutEngine.generate` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_dlm.decoding import DecodeResult, DecodeState, Observer, StepRecord, prompt_canvas
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.ops.noise import sample_seed
from lit_dlm.rewards.base import RewardScore, Rollout
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory

SAMPLED = "commit_log_prob"
"""Signal that holds the sampler's own log-probability of every token."""


@dataclass(frozen=True, kw_only=True)
class RolloutPrompt:
    """One response that is asked for."""

    example: PromptExample
    """The problem."""
    prompt_ids: list[int]
    """Its token ids, chat template included."""
    uid: str
    """Name of the response; its noise follows from it and the module's seed."""
    meta: Mapping[str, Any]
    """Facts for the record: RL step, number of the prompt in it, number of the response."""


def rollout_prompts(
    example: PromptExample,
    prompt_ids: list[int],
    *,
    method: str,
    step: int,
    place: int,
    num_responses: int,
) -> list[RolloutPrompt]:
    """The responses of one prompt in one RL step.

    Args:
        example: the problem.
        prompt_ids: its token ids.
        method: decoder to use, part of the names.
        step: number of the RL step.
        place: number of the prompt in it.
        num_responses: size of the group.

    Returns:
        One entry per response; names differ between RL steps, so responses do.
    """
    return [
        RolloutPrompt(
            example=example,
            prompt_ids=prompt_ids,
            uid=f"{example.uid}@{method}/{step:06d}.{place:04d}.{number:03d}",
            meta={
                "task": example.task,
                "method": method,
                "rl_step": step,
                "place": place,
                "response": number,
            },
        )
        for number in range(num_responses)
    ]


def rl_step_of(uid: str) -> int:
    """The RL step in a name that :func:`rollout_prompts` gave.

    Args:
        uid: name of a response.
    """
    return int(uid.rpartition("/")[2].partition(".")[0])


class RolloutEngine:
    """Decodes in place with the module's weights and one of its decoders.

    Args:
        module: the module; must be in evaluation mode while it generates.
        method: name of the decoder.
        response_length: cells of every response.
        batch_size: responses decoded together; results do not depend on it beyond rounding.
        overlong_margin: cells short of the budget at which a response counts as overlong.

    Raises:
        ValueError: the module has no such decoder, its learned policy is missing or another
            backbone's, or a number is out of range.
    """

    def __init__(
        self,
        module: DecodeModule,
        *,
        method: str,
        response_length: int,
        batch_size: int,
        overlong_margin: int = 0,
    ) -> None:
        if method not in module.decoders:
            raise ValueError(
                f"method: expected one of {', '.join(module.decoders) or '(no decoders)'}, "
                f"got {method!r}"
            )
        module.decoders[method].check(module.backbone)
        if response_length < 1 or batch_size < 1:
            raise ValueError(
                "response_length and batch size of rollouts: expected at least 1, got "
                f"{response_length} and {batch_size}"
            )
        if not 0 <= overlong_margin < response_length:
            raise ValueError(
                f"overlong_margin: expected 0 to {response_length - 1}, less than a response has "
                f"cells, got {overlong_margin}"
            )
        self.module = module
        self.method = method
        self.response_length = response_length
        self.batch_size = batch_size
        self.overlong_margin = overlong_margin

    def generate(
        self, prompts: Sequence[RolloutPrompt], *, report: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """Decodes responses.

        Args:
            prompts: what is asked for.
            report: told after every batch how many responses are done.

        Returns:
            One rollout per entry, in order. Records hold the log-probability under which each token
            was drawn (:data:`SAMPLED`; NaN where an end-of-text fill wrote).
        """
        found: list[Rollout] = []
        for first in range(0, len(prompts), self.batch_size):
            found += self._decode(prompts[first : first + self.batch_size])
            if report is not None:
                report(len(found))
        return found

    def _decode(self, prompts: Sequence[RolloutPrompt]) -> list[Rollout]:
        module = self.module
        canvas = prompt_canvas(
            [prompt.prompt_ids for prompt in prompts],
            response_length=self.response_length,
            spec=module.backbone.spec,
            seeds=[sample_seed(module.seed, prompt.uid) for prompt in prompts],
            device=module.device,
        )
        capture = TrajectoryCapture(vocab_size=module.backbone.vocab_size)
        sampled = SampledLogProb()
        result = module.decoders[self.method](module.backbone, canvas, [capture, sampled])
        texts, lengths = module.completions(result)
        records = capture.trajectories(
            [prompt.uid for prompt in prompts],
            [
                {**prompt.meta, "num_tokens": length}
                for prompt, length in zip(prompts, lengths, strict=True)
            ],
        )
        log_probs = sampled.log_prob.cpu().numpy()
        return [
            Rollout(
                trajectory=replace(record, signals={**record.signals, SAMPLED: log_prob}),
                example=prompt.example,
                text=text,
                is_overlong=length >= self.response_length - self.overlong_margin,
                length=min(length + 1, self.response_length),  # the end of text included
                decode=self._text,
            )
            for record, prompt, text, length, log_prob in zip(
                records, prompts, texts, lengths, log_probs, strict=True
            )
        ]

    def _text(self, ids: Sequence[int]) -> str:
        """Text of response tokens, as completions are made."""
        return str(self.module.tokenizer.decode(list(ids), skip_special_tokens=True))


class SampledLogProb(Observer):
    """Observer that keeps the log-probability under which each response token was drawn.

    It is that of the distribution after temperature and filters, also where the order of writing is
    decided by raw scores. Of greedy decodes, whose tokens are not drawn, it is the model's own.
    """

    requires: frozenset[str] = frozenset({"drawn"})

    def __init__(self) -> None:
        self.log_prob = torch.empty(0, dtype=torch.float32)
        """``(B, G)`` float32 after the decode; NaN where no proposal was written."""

    def on_start(self, state: DecodeState) -> None:
        """Prepares the table."""
        shape = (len(state.rows), state.ids.shape[1] - state.start)
        self.log_prob = torch.full(shape, torch.nan, dtype=torch.float32, device=state.ids.device)

    def on_step(self, record: StepRecord) -> None:
        """Notes the proposals that were written."""
        state, region = record.state, slice(record.state.start, None)
        written = (record.new_ids != state.ids)[:, region]
        assert record.proposal.drawn is not None
        log_prob = record.proposal.drawn[:, region].float().log()
        new = torch.where(record.commit[:, region], log_prob, torch.nan)
        before: Tensor = self.log_prob[state.rows]
        self.log_prob.index_copy_(0, state.rows, torch.where(written, new, before))

    def on_end(self, result: DecodeResult) -> None:
        """Nothing is left to do."""


def with_score(rollout: Rollout, score: RewardScore, *, kept: bool, version: int) -> Trajectory:
    """The record of a rollout with what training needs of its score.

    Args:
        rollout: the rollout.
        score: its score.
        kept: whether the filters keep its group.
        version: optimiser steps that the policy had taken.

    Returns:
        The record; its meta gains ``reward``, ``overlong``, ``kept``, ``policy_version``, the
        ``parts`` of the reward, ``correct`` where the task told, and ``token_rewards`` where there
        are any.
    """
    facts: dict[str, Any] = {
        "reward": float(score.total),
        "overlong": rollout.is_overlong,
        "garbled": "\ufffd" in rollout.text,
        "kept": kept,
        "policy_version": version,
        "parts": {name: float(value) for name, value in score.parts.items()},
    }
    if score.is_graded:
        facts["correct"] = bool(score.is_correct)
    if score.token_rewards is not None:
        facts["token_rewards"] = [float(value) for value in score.token_rewards]
    return rollout.trajectory.with_meta(**facts)


def in_order(records: Sequence[Trajectory]) -> list[Trajectory]:
    """Records of one RL step by prompt and response, whatever process made them."""
    return sorted(records, key=lambda record: (record.meta["place"], record.meta["response"]))


def groups_of(records: Sequence[Trajectory]) -> list[list[int]]:
    """Numbers of the records of each prompt.

    Args:
        records: ordered by :func:`in_order`.
    """
    groups: dict[int, list[int]] = {}
    for number, record in enumerate(records):
        groups.setdefault(record.meta["place"], []).append(number)
    return list(groups.values())
