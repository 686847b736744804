"""What answers the prompts of RL steps in place of the module's own decoder.

A :class:`RolloutEngine` has one method: records from prompts. All else stays as it is: rewards,
filters and old log-probabilities are computed here, with the weights in training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.config.components import Component
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.rl.batch import SAMPLED
from lit_dlm.system.options import refuse
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.record import Trajectory, expect

# A problem with its token ids, chat template included, pictures numbered as in records.
Problem = tuple[PromptExample, list[int]]


@dataclass(frozen=True, kw_only=True)
class RolloutPrompt:
    """One response to decode."""

    example: PromptExample
    prompt_ids: list[int]
    uid: str  # of the response; differs between RL steps, so that their noise does
    meta: Mapping[str, Any]  # for the record: RL step, number of the prompt and of the response
    response_length: int  # cells of the response

    def record(
        self,
        backbone: HFBackbone,
        tokens: Sequence[int],
        steps: Sequence[int | None],
        log_probs: Sequence[float | None] | None = None,
    ) -> Trajectory:
        """Returns the record of a response to this prompt; errors name the response.

        Args:
            backbone: the one in training, which must know the ids.
            tokens: ids from the first cell on. Fewer than ``response_length`` must have an end of
                text among them; the cells after them are masks.
            steps: the step that wrote each of them, counted from any number; ``None`` or -1 for a
                mask, which no step wrote.
            log_probs: with which each was drawn, in nats; ``None`` where that is not known.
        """
        spec, size = backbone.spec, self.response_length
        of, count = f"{self.uid}: expected", len(tokens)
        expect(len(steps) == count, f"{of} {count} steps, one a token, got {len(steps)}")
        is_whole = count == size or (count < size and not set(tokens).isdisjoint(spec.eos_ids))
        told = f"{of} {size} tokens, or fewer with an end of text among them, got {count}"
        expect(is_whole, told)
        written = np.array([-1 if one is None else one for one in steps], dtype=np.int32)
        # Some engines count from 1.
        first = written[written >= 0].min(initial=np.iinfo(np.int32).max)
        cells = np.full(size, spec.mask_id, dtype=np.int32)
        cells[:count] = tokens
        commit_step = np.full(size, -1, dtype=np.int32)
        commit_step[:count] = np.where(written < 0, -1, written - first)
        drawn = np.full(size, np.nan, dtype=np.float32)
        if log_probs is not None:
            drawn[:count] = np.array(log_probs, dtype=np.float32)  # None becomes NaN
        record = Trajectory(
            uid=self.uid,
            prompt_ids=np.array(self.prompt_ids, dtype=np.int32),
            tokens=cells,
            commit_step=commit_step,
            num_steps=commit_step.max(initial=-1) + 1,
            mask_id=spec.mask_id,
            vocab_size=backbone.vocab_size,
            status="complete" if count == size else "eos",
            signals={SAMPLED: drawn},
            meta=dict(self.meta),
        )
        record.validate()
        return record


class RolloutEngine(Component):
    """Base of all that may roll out prompts; without one, the module's decoder does."""

    @abstractmethod
    def records(
        self, prompts: Sequence[RolloutPrompt], module: TrainableModule
    ) -> list[Trajectory]:
        """Returns a record for each prompt, in any order; ``RolloutPrompt.record`` makes it.

        It is called once an RL step by every process, with its share of the prompts.

        Args:
            prompts: the responses that are asked for.
            module: the policy in training, whose ``export(folder)`` writes the present adapter, or
                the model where all of it is trained.
        """

    def answerable(
        self, problems: Sequence[Problem], module: TrainableModule, *, size: int, length: int
    ) -> list[Problem]:
        """Returns the problems to draw prompts from, before the first RL step: all by default.

        Args:
            problems: those of the tasks.
            module: the policy in training.
            size: responses to each.
            length: cells of a response.
        """
        return list(problems)


def checked_records(
    engine: RolloutEngine,
    prompts: Sequence[RolloutPrompt],
    found: Sequence[Trajectory],
    module: TrainableModule,
) -> list[Trajectory]:
    """Returns an engine's records in the order of the prompts, with ``num_tokens`` in their meta.

    Refuses prompts without a record, records that were not asked for, and those of other ids or
    lengths.
    """
    name, backbone = type(engine).__name__, module.backbone
    by_uid = {record.uid: record for record in found}
    wanted = {prompt.uid: prompt for prompt in prompts}
    for uid in [*wanted.keys() - by_uid.keys(), *by_uid.keys() - wanted.keys()][:1]:
        got = "none" if uid in wanted else "one that was not asked for"
        refuse(f"engine {name}", f"a record for each of {len(prompts)} prompts", f"{got}: {uid}")
    records = [by_uid[uid] for uid in wanted]
    for prompt, record in zip(prompts, records, strict=True):
        record.validate()
        sizes = (backbone.spec.mask_id, backbone.vocab_size, prompt.response_length)
        own = (record.mask_id, record.vocab_size, record.num_generated)
        if own != sizes or record.prompt_ids.tolist() != prompt.prompt_ids:
            told = f"mask id, vocabulary and cells {sizes} and the ids of its prompt"
            refuse(f"engine {name}: {record.uid}", told, f"{own} and {record.num_prompt} ids")
    lengths = module.texts(records)[1] if records else []
    return [
        record.with_meta(
            **prompt.meta,
            num_tokens=int((record.tokens[:length] != record.mask_id).sum()),
            engine=name,
        )
        for prompt, record, length in zip(prompts, records, lengths, strict=True)
    ]
