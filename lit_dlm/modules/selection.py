"""Scores that decode: what a policy in training would do, on stored states and on real prompts.

The rollout proxy of the release is a classification score; no window, cap, gate or fallback enters
it. Two more scores do: the *replay* applies them to the stored states of validation traces, which
costs one more forward of the network, and the *rollout* decodes a few validation prompts for real.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, Window, decode_prompts
from lit_dlm.decoding.engine import end_of_text_gate, initial_state
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy, left_of_window_end
from lit_dlm.decoding.state import Canvas
from lit_dlm.decoding.windows import default_window
from lit_dlm.heads.acceptance import accepted
from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.modules.state_batch import StateBatch
from lit_dlm.ops.scores import top_quota


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """How validation decodes; give what the benchmark will use."""

    threshold: float = 0.99
    """Acceptance probability from which a proposal is committed."""
    max_accept_per_step: int | None = 4
    """Most acceptances of a row in one step; ``None`` for no cap."""
    window: Window | None = None
    """Where a step may commit; by default the whole response, or a block model's own blocks."""
    settings: DecodeSettings = field(default_factory=DecodeSettings)
    """Rules of the loop: the end-of-text gate applies to both scores, the rest to the rollout."""
    rollout_prompts: int = 0
    """Prompts of the true rollout, over all processes; 0 for none. The backbone then runs."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(
                f"SelectionSettings.threshold: expected a probability in 0..1, got {self.threshold}"
            )
        if self.rollout_prompts < 0:
            raise ValueError(
                f"SelectionSettings.rollout_prompts: expected 0 or more, got {self.rollout_prompts}"
            )

    def decoder(self, scorer: AcceptanceScorer) -> Decoder:
        """The decoder of the rollout around the network in training."""
        policy = TraceLockPolicy(
            scorer=scorer, threshold=self.threshold, max_accept_per_step=self.max_accept_per_step
        )
        return Decoder(policy=policy, window=self.window, quota=NoQuota(), settings=self.settings)


def step_candidates(
    batch: StateBatch, proposals: Tensor, backbone: Backbone, selection: SelectionSettings
) -> tuple[Tensor, Tensor]:
    """What a decode could commit in each state, and what its policy would see.

    Args:
        batch: states ``(B, L)``.
        proposals: ``(B, L)`` int64 proposed tokens; what stands there outside the response.
        backbone: gives the special tokens.
        selection: window and gate.

    Returns:
        ``(B, L)`` bool candidates (behind window and gate) and ``(B, L)`` bool visible columns.
    """
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    in_response = (columns >= batch.start) & batch.pad_mask
    canvas = Canvas(
        ids=torch.where(batch.pad_mask, batch.ids, backbone.spec.pad_id),
        editable=in_response,
        seeds=torch.zeros_like(batch.ids[:, 0]),
        start=batch.start,
        pad_mask=batch.pad_mask,
    )
    state = initial_state(backbone, canvas)
    candidates = (selection.window or default_window(backbone.spec)).view(state).candidates
    if selection.settings.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposals)
    return candidates, left_of_window_end(state.masked, candidates) & batch.pad_mask


def step_commits(logits: Tensor, candidates: Tensor, selection: SelectionSettings) -> Tensor:
    """Accepted candidates under the cap, or the best one where none is accepted.

    Args:
        logits: ``(B, R)`` decision logits.
        candidates: ``(B, R)`` bool.
        selection: threshold and cap.

    Returns:
        ``(B, R)`` bool; a row is empty only where it has no candidate.
    """
    commit = accepted(
        logits,
        candidates,
        threshold=selection.threshold,
        max_accept=selection.max_accept_per_step,
    )
    fallback = top_quota(logits, candidates, 1)
    return torch.where(commit.any(1, keepdim=True), commit, fallback)


@dataclass
class RolloutPrompts:
    """Distinct prompts of validation traces and the responses that the traces ended with."""

    limit: int
    """Most prompts."""
    found: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Reference response of each prompt, in the order of appearance."""

    def add(self, batch: StateBatch) -> None:
        """Takes the prompts of a batch that are new, as long as there is room."""
        if len(self.found) >= self.limit:
            return
        for row in range(len(batch.ids)):
            if not bool(batch.is_real[row]) or len(self.found) >= self.limit:
                continue
            real = batch.pad_mask[row]
            target = batch.target[row]
            prompt = tuple(target[: batch.start][real[: batch.start]].tolist())
            if prompt not in self.found:
                self.found[prompt] = tuple(target[batch.start :][real[batch.start :]].tolist())


@dataclass(frozen=True)
class RolloutOutcome:
    """Sums over the decoded prompts of one process."""

    agreeing: float = 0.0
    """Share of answer tokens equal to the reference trace's, summed over prompts."""
    steps: float = 0.0
    """Steps, summed over prompts."""
    cells: float = 0.0
    """Response cells, summed over prompts."""
    prompts: int = 0
    """How many prompts."""


def roll_out(prompts: RolloutPrompts, backbone: Backbone, decoder: Decoder) -> RolloutOutcome:
    """Decodes the prompts and compares with the reference responses, up to their first end of text.

    Args:
        prompts: what to decode, each response as long as its reference.
        backbone: the frozen denoiser.
        decoder: the method.

    Returns:
        The sums.
    """
    outcome = RolloutOutcome()
    by_length: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for prompt, response in prompts.found.items():
        by_length.setdefault(len(response), []).append((prompt, response))
    for length, group in sorted(by_length.items()):
        result = decode_prompts(
            backbone,
            decoder,
            [prompt for prompt, _ in group],
            response_length=length,
            seeds=range(len(group)),
        )
        got = result.ids[:, result.start :].cpu()
        wanted = torch.tensor([response for _, response in group])
        is_end = torch.isin(wanted, torch.tensor(backbone.spec.eos_ids))
        # The answer and its first end of text; the fill behind it would drown the rest.
        answer = is_end.cumsum(1) - is_end.long() == 0
        agreeing = ((got == wanted) & answer).sum(1).float() / answer.sum(1)
        outcome = replace(
            outcome,
            agreeing=outcome.agreeing + float(agreeing.sum()),
            steps=outcome.steps + float(result.num_steps.sum()),
            cells=outcome.cells + float(length * len(group)),
            prompts=outcome.prompts + len(group),
        )
    return outcome
