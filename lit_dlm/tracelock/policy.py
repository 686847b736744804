"""TraceLock: a learned commit policy over a frozen denoiser (arXiv 2605.24697).

The release decodes in a window that starts at the leftmost mask ("soft crop"), with an end-of-text
gate; here the window, the gate and the fill of an ended answer belong to the decode loop, so that
all methods can be compared under the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, backbone_facts, check_facts
from lit_dlm.backbones.location import ASSETS, embedded_names, is_hub_id, locate
from lit_dlm.backbones.projection import Projector
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import at_least, refuse, within
from lit_dlm.tensors.batches import reads_are_free
from lit_dlm.tensors.sampling import top_quota, uniform_noise
from lit_dlm.tracelock.network import PositionState, accepted
from lit_dlm.tracelock.released import RELEASED, read_released
from lit_dlm.tracelock.scorer import AcceptanceScorer, CommitSettings

_STREAM = 23  # separate from the draws of samplers and captures


class TraceLockPolicy(CommitPolicy):
    """Commits every candidate whose acceptance probability reaches a threshold.

    A row in which none does is left to the stall rule, which commits its best-scored candidate
    (the release's fallback). The weights are read at first use, so an unused policy needs none.

    Args:
        path: folder exported by training, a hub id, or the name of an embedded model (``tiny``)
            for the policy trained on outcomes that ships with it; or a folder of the TraceLock
            release (:func:`~lit_dlm.tracelock.released.read_released`).
        threshold: smallest acceptance probability with which a proposal is committed; by default
            the one that the policy was made for, as its folder says (older folders: 0.99).
        max_accept_per_step: most acceptances of a row in one step, which keeps the best ones, or
            ``null`` for no cap; by default as the ``folder`` says (older ones: 4, as in the
            release, where this is a hidden default).
        temperature: above 0, every candidate is committed at random, with even odds at the
            threshold; training on outcomes explores in this way.
        release_compat: decides as the release does: the end-of-text gate knows only the end of
            text that also pads (the first of the backbone's ``eos_ids``), not the end of turn;
            it acts after the cap and not on the fallback, so a row whose proposals all end the
            text commits one and opens the gate; a quota takes the most probable proposals.
        scorer: the loaded policy; ``path`` is then not read.
    """

    forwards_per_step = 1
    is_in_training = False
    """Whether the weights change, so that the records of a run cannot name them."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        threshold: float | None = None,
        max_accept_per_step: int | Literal["folder"] | None = "folder",
        temperature: float = 0.0,
        release_compat: bool = False,
        scorer: AcceptanceScorer | None = None,
    ) -> None:
        if path is None and scorer is None:
            raise ValueError("TraceLockPolicy: expected path or scorer, got neither")
        within("(0, 1)" if temperature else "[0, 1]", threshold=threshold)
        if max_accept_per_step != "folder":
            at_least(1, max_accept_per_step=max_accept_per_step)
        at_least(0, temperature=temperature)
        if temperature and (release_compat or max_accept_per_step is not None):
            raise ValueError(
                "TraceLockPolicy.temperature: expected max_accept_per_step null and release_compat "
                "off where commits are drawn, since neither is a part of the draw"
            )
        self.path = path
        if scorer is not None:
            self.scorer = scorer.eval()
        self.threshold = threshold
        self.max_accept_per_step = max_accept_per_step
        self.temperature = temperature
        self.release_compat = release_compat
        # A quota would have to choose among draws, which have no order.
        self.takes_quota = not temperature

    @property
    def draws(self) -> bool:
        return self.temperature > 0.0

    @cached_property
    def scorer(self) -> AcceptanceScorer:
        """The learned policy, read from its folder or the hub at first use."""
        path = str(self.path)
        if path in embedded_names():
            path = str(locate(path) / "outcome_policy")
        elif is_hub_id(path):
            path = str(locate(path))
        if not Path(path).is_dir():
            hint = "; make it first with fit --config exp/tracelock_tiny, or that of your model"
            refuse("policy.path", "a folder with a trained policy", f"none at {path}", hint)
        if (Path(path) / RELEASED).is_file():
            return read_released(Path(path))
        return AcceptanceScorer.load(path)

    @property
    def commits(self) -> CommitSettings:
        """What is in effect: the options given, in place of the folder's."""
        given = {"threshold": self.threshold, "max_accept_per_step": self.max_accept_per_step}
        unset = {"threshold": None, "max_accept_per_step": "folder"}
        options: dict[str, Any] = dict(given.items() - unset.items())
        return replace(self.scorer.commits, **options)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.scorer.settings.hidden_layers

    @cached_property
    def requires(self) -> frozenset[str]:  # type: ignore[override]
        settings = self.scorer.settings
        requires = {"hidden", "raw_prob"}
        if settings.layout != "masked":
            # Written positions are rows of the network too, so they need a proposal. The masked
            # ones that it sees are in the window, which has proposals anyway.
            requires.add("region")
        return frozenset(requires | {f"raw_{name}" for name in settings.features.scores})

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        logits = self.decision_logits(state, candidates, proposal)
        if self.temperature:
            # Noise by sample, step and position: a draw does not depend on the batch.
            noise = uniform_noise(state.seeds, state.step, state.positions, stream=_STREAM)
            return Selection(candidates & (noise < self.log_odds(logits).sigmoid()), logits)
        rule = self.commits
        commit = accepted(
            logits, candidates, threshold=rule.threshold, max_accept=rule.max_accept_per_step
        )
        if self.release_compat:
            # After the cap, so an end of text may take the place of a token that could be
            # committed; the row then commits one less, as in the release.
            end_id = state.eos_ids[0]
            has_end = (state.editable & (state.ids == end_id)).any(1)
            commit = commit & (has_end[:, None] | (proposal.ids != end_id))
        if quota is not None:
            order = proposal.prob if self.release_compat else logits
            commit = commit | top_quota(order, candidates, quota)
        return Selection(commit, logits)

    def limit(self, state: DecodeState) -> float:
        return self.commits.threshold

    def scale(self, scores: Tensor) -> Tensor:
        return scores.double().sigmoid()

    def log_odds(self, logits: Tensor) -> Tensor:
        """Returns the log-odds of the draws from decision logits of any shape."""
        # 0 at the threshold, so that draws vary around what the policy decides without temperature.
        # The plain probability would commit most of what a threshold of 0.99 refuses.
        threshold = self.commits.threshold
        return (logits - math.log(threshold / (1.0 - threshold))) / self.temperature

    def decision_logits(self, state: DecodeState, candidates: Tensor, proposal: Proposal) -> Tensor:
        """``(b, L)`` float32 decision logits over the canvas; 0 where the network saw nothing."""
        assert proposal.hidden is not None
        scorer = self.scorer
        if scorer.projector.hidden_bias.device != proposal.hidden.device:
            scorer.to(proposal.hidden.device)
        # The window cuts the network's view as in the release, so that what it says of a position
        # does not depend on how much canvas follows.
        visible = left_of_window_end(state.masked, candidates)
        if state.pad_mask is not None:
            visible = visible & state.pad_mask
        is_prompt = torch.arange(visible.shape[1], device=visible.device) < state.start
        states = torch.where(is_prompt, int(PositionState.PROMPT), int(PositionState.LOCKED))
        states = torch.where(state.masked, int(PositionState.GEN), states)
        if reads_are_free(visible.device):
            # Packed rows save the work on positions that are not seen, but need their number.
            seen = scorer.seen(states, visible).flatten().nonzero().squeeze(1)
            features = self._features(proposal, lambda values: values.flatten(0, 1)[seen])
        else:
            first = 0 if scorer.settings.layout == "all" else state.start
            states, visible = states[:, first:], visible[:, first:]
            features = self._features(proposal, lambda values: values[:, first:])
        output = scorer(features, states, visible)
        logits = torch.where(visible, output.decision_logits, 0.0)
        return torch.nn.functional.pad(logits, (state.ids.shape[1] - logits.shape[1], 0))

    def _features(self, proposal: Proposal, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns features of the rows that ``rows`` selects from ``(b, L, ...)`` tensors."""
        assert proposal.hidden is not None
        # Of the model's own distribution, as in training, whatever the sampler scores: features
        # must not change with a temperature.
        assert proposal.raw_prob is not None
        return self.scorer.features(
            rows(proposal.hidden),
            rows(proposal.raw_prob),
            entropy=None if proposal.raw_entropy is None else rows(proposal.raw_entropy),
            margin=None if proposal.raw_margin is None else rows(proposal.raw_margin),
        )

    def describe(self) -> dict[str, Any]:
        return {
            **asdict(self.commits),
            # Listed only if they are on, as in older records.
            **({"temperature": self.temperature} if self.temperature else {}),
            **({"release_compat": True} if self.release_compat else {}),
            **({} if self.is_in_training else {"weights": self.scorer.digest()}),
        }

    @classmethod
    def find_weights(cls, digest: str, folders: Sequence[str | Path]) -> dict[str, Any]:
        """Loads the policy that has this digest, from these folders or those that are shipped."""
        shipped = [
            path.parent
            for path in sorted(ASSETS.glob("**/config.json"))
            if '"lit-dlm/acceptance"' in path.read_text(encoding="utf-8")
        ]
        seen = []
        for folder in [*map(Path, folders), *shipped]:
            scorer = cls(folder).scorer
            if scorer.digest() == digest:
                return {"scorer": scorer}
            seen.append(f"{folder} has {scorer.digest()[:16]}...")
        raise ValueError(
            f"decoder description: no policy has the weights digest {digest[:16]}...; give the "
            f"folder of the exported policy ({'; '.join(seen)})"
        )

    @property
    def trained_on(self) -> Sequence[str]:
        return self.scorer.training_facts.get("tasks", ())

    def check_backbone(self, backbone: Backbone) -> None:
        facts = backbone_facts(backbone.spec, backbone)
        check_facts("acceptance policy", self.scorer.backbone, facts)


def scorer_to_train(
    backbone: Backbone, policy: str | None, projector: str | Projector | None, **options: Any
) -> AcceptanceScorer:
    """Returns the network of a policy, as its folder has it, or one with random weights."""
    facts = backbone_facts(backbone.spec, backbone)
    if policy is not None:
        scorer = TraceLockPolicy(policy).scorer  # of a folder or the hub
        check_facts("acceptance policy", scorer.backbone, facts)
        scorer.backbone = facts  # a released one knows fewer
        for name, own in (("head", scorer.head.config), ("settings", scorer.settings)):
            if options.get(name) not in (None, own):
                refuse(name, f"null, or that of policy, which it keeps ({own})", options[name])
        return scorer
    if projector is None:
        refuse("policy", "a folder to start from, or a projector", "none")
    if not isinstance(projector, Projector):
        projector = Projector.load(projector)
    return AcceptanceScorer(projector, backbone=facts, **options)


def left_of_window_end(masked: Tensor, candidates: Tensor) -> Tensor:
    """``(b, L)`` bool: columns that the network may see, all up to the end of the window.

    The window ends before the first masked column right of the last candidate, or with the canvas.
    """
    # Found by its candidates, for a policy is not told the window. If the end-of-text gate has
    # removed some, the view ends earlier, here and in training alike.
    still_inside = candidates.flip(1).cumsum(1).flip(1) > 0
    beyond = masked & ~still_inside
    return beyond.cumsum(1) == 0
