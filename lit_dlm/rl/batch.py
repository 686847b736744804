"""What an RL step trains on: its responses, their states, and what is known of each token.

A *sample* is what is scored together: one state of a response, several packed in a row, or the
views of one estimate. All samples of an RL step are one :class:`RolloutBatch`; a micro-batch is a
selection of it, of the same type.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import Rows
from lit_dlm.system.options import refuse
from lit_dlm.tensors.batches import TensorBatch
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample, collate
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import NEVER, Masking, States, step_groups
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import prompt_pictures

Normalise = Literal["group_mean", "response_length", "max_gen_length", "reference"]
"""What the sum over a state's tokens is divided by. ``group_mean``: the number of tokens that one
step wrote (the objective of arXiv:2509.06949; in a block model each block has its own step).
``response_length``: the number of tokens of the answer. ``max_gen_length``: the number of positions
of a response, a constant. ``reference``: as in dLLM-RL, the longest answer of the RL step for block
models, else the number of targets of a state, with the divergence left undivided."""

# Signal that holds the sampler's own log-probability of every token.
SAMPLED = "commit_log_prob"

# Responses whose states are drawn at a time: a masking's tensors are much larger than the samples.
_CHUNK = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens(TensorBatch):
    """``M`` log-probabilities that the policy is trained on, sample by sample: ``(M,)`` each.

    A token has one score or, with views, the sum of several; with ``BoundViews`` it represents the
    whole response.
    """

    sample: Tensor  # int64, ascending
    response: Tensor  # int64 row of the responses
    position: Tensor  # int64 in the response
    weight: Tensor  # float32 weight in the loss
    kl_weight: Tensor  # float32 weight of its divergence
    sampled: Tensor  # float32 log-probability with which it was drawn; NaN where unknown
    # Floating point, ``None`` until known.
    advantage: Tensor | None = None
    returns: Tensor | None = None
    old_log_prob: Tensor | None = None
    old_value: Tensor | None = None
    reference: Tensor | None = None  # log-probability under the initial policy


class Inputs(TensorBatch):
    """A dataclass of what an actor other than the backbone reads, for each of the ``K`` states."""

    @abstractmethod
    def select(self, states: Tensor) -> Inputs:
        """Returns those of some states, ``(k,)`` int64."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutBatch(TensorBatch):
    """``I`` samples: responses, their ``K`` states with ``N`` scores in all, and ``M`` tokens.

    They follow from the records and a seed, so all processes build the same samples and differ only
    in those that they select. The loss of a micro-batch is its sum divided by ``num_slots``.
    """

    responses: SupervisedBatch
    states: States  # with the ``sample`` of each
    tokens: Tokens
    spec: BackboneSpec  # of training rows
    # (I,) float64 rows that each sample counts for in a mean over rows: its states, scaled up for
    # those that a cap left out; the views of one estimate count as one row.
    size: Tensor
    token: Tensor | None = None  # (N,) int64 token of each score; None: each has its own
    coefficient: Tensor | None = None  # (N,) float32 factor of each score in the sum of its token
    inputs: Inputs | None = None
    num_slots: int = 1  # samples of a full micro-batch
    num_rows: float = 0.0  # of a micro-batch; over an update they add up to its number of slots
    is_empty: bool = False  # the RL step has nothing to learn from, so no update may follow

    def __len__(self) -> int:
        return len(self.size)

    def rows(self) -> Rows:
        """Lays out a row per state, or per sample where states are packed."""
        return lay_out(self.responses, self.states, self.spec)

    def per_token(self, scores: Tensor) -> Tensor:
        """Sums ``(N,)`` scores, times their coefficients, to ``(M,)`` of tokens."""
        if self.token is None or self.coefficient is None:
            return scores
        weighted = scores * self.coefficient.to(scores.dtype)
        return scores.new_zeros(len(self.tokens.weight)).index_add(0, self.token, weighted)

    def with_tokens(self, **known: Any) -> RolloutBatch:
        """Returns the batch with more that is known of its tokens."""
        return replace(self, tokens=replace(self.tokens, **known))

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(I,)`` int64 counts of states, tokens and scores up to the end of each sample."""
        assert self.states.sample is not None
        scores = self.tokens.sample if self.token is None else self.tokens.sample[self.token]
        owners = (self.states.sample, self.tokens.sample, scores)
        return tuple(one.bincount(minlength=len(self)).cumsum(0) for one in owners)  # type: ignore[return-value]

    @property
    def sample_response(self) -> Tensor:
        """``(I,)`` int64 response of each sample."""
        return self.tokens.response[self._ends[1] - 1]

    def tokens_of(self, samples: Tensor) -> Tensor:
        """Returns the numbers of the tokens of some samples, sample by sample."""
        return _ranges(self._ends[1], samples)

    def select(
        self,
        samples: Tensor,
        *,
        factor: float = 1.0,
        num_slots: int | None = None,
        is_empty: bool = False,
    ) -> RolloutBatch:
        """Returns the samples with ``(n,)`` int64 numbers, on the CPU, weights times ``factor``.

        Everything is numbered anew. For a block model, positions that no target can see are cut
        off.
        """
        assert self.states.sample is not None
        state, token, score = (_ranges(ends, samples) for ends in self._ends)
        # Indices of ranges, not masks over the step: its tables are far larger than a micro-batch.
        tokens = self.tokens._each(lambda one: one[token])
        length = self._needed_length(tokens)
        # In the order of the step and not of the samples: equal responses share a row.
        used, response = self.states.response[state].unique(return_inverse=True)
        new = _numbers(len(self), samples)
        states = replace(
            self.states,
            response=response,
            sample=new[self.states.sample[state]],
            hidden=self.states.hidden[state, :length],
            supervised=self.states.supervised[state, :length],
        )
        if states.shown is not None:
            states = replace(states, shown=states.shown[state, :length])
        if states.prompt_seeds is not None:
            states = replace(states, prompt_seeds=states.prompt_seeds[state])
        tokens = replace(
            tokens,
            sample=new[tokens.sample],
            response=_numbers(len(self.responses.ids), used)[tokens.response],
            weight=tokens.weight * factor,
            kl_weight=tokens.kl_weight * factor,
        )
        shared: dict[str, Any] = {}
        if self.token is not None and self.coefficient is not None:
            shared["token"] = _numbers(len(self.tokens.weight), token)[self.token[score]]
            shared["coefficient"] = self.coefficient[score]
        size = self.size[samples]
        return replace(
            self,
            responses=self.responses.take(used, length),
            states=states,
            tokens=tokens,
            size=size * factor,
            inputs=None if self.inputs is None else self.inputs.select(state),
            num_slots=num_slots or len(samples),
            num_rows=float(size.sum()) * factor,
            is_empty=is_empty,
            **shared,
        )

    def _needed_length(self, tokens: Tokens) -> int:
        """Returns how many response positions the predictions of some tokens depend on."""
        whole, size = self.states.hidden.shape[1], self.spec.block_size
        # Another actor than the backbone may see beyond a block.
        if self.spec.attention != "block" or self.inputs is not None:
            return whole
        assert size is not None
        last = torch.full((len(self.responses.ids),), -1)
        last.scatter_reduce_(0, tokens.response, tokens.position, "amax")
        # Where blocks end depends on the prompt's length, if they are counted from its start.
        offset = torch.zeros_like(last)
        if self.spec.block_origin == "sequence":
            offset = self.responses.num_prompt
        needed = -(-(offset + last + 1) // size) * size - offset
        return min(int(needed[last >= 0].max()), whole)


def _ranges(ends: Tensor, numbers: Tensor) -> Tensor:
    """Returns the indices in some of the ranges that end at ``ends``."""
    lengths = ends.diff(prepend=ends.new_zeros(1))[numbers]
    shift = ends[numbers] - lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


def _numbers(count: int, chosen: Tensor) -> Tensor:
    """Returns ``(count,)`` int64: the place of each number among the chosen ones."""
    return torch.zeros(count, dtype=torch.long).scatter_(0, chosen, torch.arange(len(chosen)))


def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Concatenates samples of the same responses, such as those of several passes over them."""
    num_samples = num_tokens = 0
    numbered = []
    for part in parts:
        assert part.states.sample is not None
        states = replace(part.states, sample=part.states.sample + num_samples)
        tokens = replace(part.tokens, sample=part.tokens.sample + num_samples)
        token = None if part.token is None else part.token + num_tokens
        numbered.append(replace(part, states=states, tokens=tokens, token=token))
        num_samples, num_tokens = num_samples + len(part), num_tokens + len(tokens.weight)
    names = ("states", "tokens", "size", "token", "coefficient", "inputs")
    joined = {name: _joined([getattr(part, name) for part in numbered]) for name in names}
    return replace(parts[0], **joined)


def _joined(values: Sequence[Any]) -> Any:
    """Concatenates tensors, and those of batches field by field; all else is equal anyway."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if not isinstance(first, TensorBatch):
        return first
    names = [one.name for one in fields(first)]  # type: ignore[arg-type]
    parts = {name: _joined([getattr(value, name) for value in values]) for name in names}
    return replace(first, **parts)  # type: ignore[type-var]


def _examples(
    records: Sequence[Trajectory], masking: Masking, *, epoch: int = 0
) -> list[SupervisedExample]:
    """Returns records as training examples of one pass over them."""
    for record in records:
        if record.superseded is not None and not masking.takes_rewrites:
            wanted = f"a decode that writes every token once, for {type(masking).__name__}"
            refuse(record.uid, wanted, "one that rewrites; use another policy, or DecodedViews")
    return [
        SupervisedExample(
            uid=record.uid,
            prompt_ids=record.prompt_ids,
            response_ids=record.tokens,
            steps=record.commit_step,
            pictures=prompt_pictures(record.meta, record.vocab_size),
            given=record.given,
            superseded=record.superseded,
            epoch=epoch,
        )
        for record in records
    ]


def sampled_log_probs(records: Sequence[Trajectory], length: int) -> Tensor:
    """``(B, G)`` float32 log-probabilities with which the sampler drew each token.

    NaN for positions that the end-of-text fill wrote.
    """
    table = torch.full((len(records), length), torch.nan)
    for number, record in enumerate(records):
        if SAMPLED in record.signals:
            table[number, : record.num_generated] = torch.tensor(record.signals[SAMPLED])
    return table


@dataclass(eq=False)
class SampleBuilder:
    """Turns records into samples with any masking; the trainer need not know which."""

    masking: Masking  # which states of a response are trained on
    spec: BackboneSpec  # its block origin decides where blocks of training rows begin
    _: KW_ONLY
    seed: int = 0  # of the states' noise
    num_padding: int | None = 0  # fill after an answer that may be targets; None for all
    normalise: Normalise | None = None  # None: max_gen_length for block models, else group_mean
    copies: int = 1  # states of one response in one row, for block models

    def __post_init__(self) -> None:
        is_block = self.spec.attention == "block"
        if self.masking.scores_responses and self.normalise is not None:
            wanted = "null with BoundViews, whose score of a response is a mean over its tokens"
            refuse("objective.normalise", wanted, repr(self.normalise))
        self.normalise = self.normalise or ("max_gen_length" if is_block else "group_mean")
        _check(self.masking, self.spec, self.copies)

    def responses(self, records: Sequence[Trajectory], *, epoch: int = 0) -> SupervisedBatch:
        """Returns records as a masking sees them."""
        return collate(
            _examples(records, self.masking, epoch=epoch),
            response_length=max(record.num_generated for record in records),
            spec=self.spec,
            seed=self.seed,
            num_padding=self.num_padding,
        )

    def samples(self, records: Sequence[Trajectory], *, epoch: int = 0) -> RolloutBatch:
        """Returns all samples of a pass over records, response by response.

        States without a target are left out; advantages and old scores are filled in later.
        """
        responses = self.responses(records, epoch=epoch)
        sampled = sampled_log_probs(records, responses.steps.shape[1])
        # Of all responses, not of those whose states are drawn together.
        longest = max(1, int(responses.maskable.sum(1).max()))
        parts = []
        for rows in torch.arange(len(records)).split(_CHUNK):
            some = responses.take(rows)
            states = self.masking.states(some)
            weights = self._weights(states, some, longest)
            states = replace(states, response=states.response + rows[0])
            parts.append(self._samples(states, weights, responses, sampled))
        return join(parts)

    def _samples(
        self,
        states: States,
        weights: tuple[Tensor, Tensor],
        responses: SupervisedBatch,
        sampled: Tensor,
    ) -> RolloutBatch:
        """Returns the samples of states, whose ``(K, G)`` weights are those of two terms."""
        taken = states.supervised.any(1).nonzero()[:, 0]
        sample = self._sample_of(states, taken)
        seeds, share = states.prompt_seeds, torch.ones(len(taken))
        if states.share is not None:
            share = states.share[taken]
        kept = States(
            response=states.response[taken],
            hidden=states.hidden[taken],
            supervised=states.supervised[taken],
            shown=None if states.shown is None else states.shown[taken],
            sample=sample,
            one_copy=states.one_copy,
            prompt_rate=states.prompt_rate,
            prompt_seeds=None if seeds is None else seeds[taken],
        )
        state, position = kept.supervised.nonzero(as_tuple=True)
        of_token, token, coefficient = sample[state], None, None
        size = torch.zeros(len(sample.unique()), dtype=torch.float64)
        size.index_add_(0, sample, share.double())
        if states.coefficient is not None:  # scores of several views make up one token
            G = states.supervised.shape[1]
            if states.whole:  # the last position represents the response
                last = torch.zeros_like(sample).scatter_reduce(0, of_token, position, "amax")
                position = last[of_token]
            shared, token = (of_token * G + position).unique(return_inverse=True)
            of_token, position = shared // G, shared % G
            coefficient = states.coefficient[taken][kept.supervised]
            # The first view represents a sample: it hides all, or all views have equal weights.
            lead = torch.searchsorted(sample, torch.arange(len(size)))
            size, state = share[lead].double(), lead[of_token]
            sampled = torch.full_like(sampled, torch.nan)  # the sampler never saw these states
        response = kept.response[state]
        weight, kl_weight = (table[taken[state], position].float() for table in weights)
        tokens = Tokens(
            sample=of_token,
            response=response,
            position=position,
            weight=weight,
            kl_weight=kl_weight,
            sampled=sampled[response, position],
        )
        return RolloutBatch(
            responses=responses,
            states=kept,
            tokens=tokens,
            spec=self.spec,
            size=size,
            token=token,
            coefficient=coefficient,
        )

    def _sample_of(self, states: States, taken: Tensor) -> Tensor:
        """Returns the ``(K,)`` int64 sample of each state that is taken."""
        if states.coefficient is not None:
            kind = states.response[taken]
        elif self.copies == 1:
            return torch.arange(len(taken))
        else:  # runs of at most ``copies`` states of one response, which lie next to each other
            _, run, lengths = states.response[taken].unique_consecutive(
                return_inverse=True, return_counts=True
            )
            number = torch.arange(len(taken)) - (lengths.cumsum(0) - lengths)[run]
            kind = run * len(taken) + number // self.copies
        return kind.unique_consecutive(return_inverse=True)[1]

    def _weights(
        self, states: States, responses: SupervisedBatch, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Returns ``(K, G)`` weights of the policy terms and of the divergence terms."""
        supervised = states.supervised
        maskable = responses.maskable[states.response]
        K, G = supervised.shape
        one = torch.ones(K, G, dtype=torch.float32)
        if states.whole:  # policy terms are in nats per token, divergences in nats
            return one, maskable.sum(1, keepdim=True).float().expand(K, G)
        # Where a cap drew some of the states, each counts for those that it left out: the sum over
        # them stays, on average, that over all.
        if states.share is not None:
            one = one * states.share[:, None]
        if self.normalise == "max_gen_length":
            weight = one / G
        elif self.normalise == "response_length":
            weight = one / maskable.sum(1, keepdim=True).clamp_min(1)
        elif self.normalise == "reference" and responses.blocks is not None:
            weight = one / longest
        elif responses.blocks is None:
            weight = one / supervised.sum(1, keepdim=True).clamp_min(1)
        else:
            # One state of a block model holds a step of each block; each has its own mean.
            blocks = responses.blocks[states.response]
            number = blocks - blocks.amin(1, keepdim=True)
            count = torch.zeros(K, int(number.max()) + 1, dtype=torch.float32)
            count.scatter_add_(1, number, supervised.float())
            weight = one / count.gather(1, number).clamp_min(1)
        # dLLM-RL's code for models with full attention divides the policy terms alone.
        undivided = self.normalise == "reference" and responses.blocks is None
        return weight, one if undivided else weight


def _check(masking: Masking, spec: BackboneSpec, copies: int) -> None:
    """Refuses states that cannot be trained on with rollouts of a model."""
    weight = inspect.signature(type(masking).__init__).parameters.get("weight")
    if not masking.hides_targets:
        raise ValueError(
            f"masking: {type(masking).__name__} hides nothing, so a rollout's tokens would be "
            "scored where they can be seen; expected states with masks, such as TraceMasking"
        )
    if weight is not None and getattr(masking, "weight", weight.default) != weight.default:
        raise ValueError(
            "masking.weight: has no part in training on rollouts, whose terms "
            "objective.normalise weighs; leave it out"
        )
    if copies < 1 or (copies > 1 and spec.attention != "block"):
        wanted = "at least 1, and 1 with full attention (a state is a row of its own)"
        refuse("packing", wanted, copies)


def order_of_writing(responses: SupervisedBatch, *, shrink: int = 1) -> tuple[Tensor, Tensor]:
    """Numbers the steps of each response in the order of writing, over all blocks.

    Returns ``(B, G)`` int64 numbers from 0 and ``(B, G)`` bool, the trained cells that have one.
    ``shrink`` consecutive steps (within a block, for block models) count as one; steps that wrote
    only padding are among them, as when a decode is replayed.
    """
    steps = responses.steps
    members = responses.maskable & (steps >= 0)
    key = step_groups(steps, torch.ones_like(members), shrink=shrink, segments=responses.blocks)
    key = torch.where(members, key, 0)
    if responses.blocks is not None:
        # Blocks are written one after the other.
        low = responses.blocks.amin(1, keepdim=True)
        key = key + (responses.blocks - low) * key.shape[1]
    groups = step_groups(key, members)
    return torch.where(groups == NEVER, 0, groups), members
