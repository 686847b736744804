"""What answers the prompts of RL steps in place of the module's decoder; all else is done here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    example: PromptExample  # the problem
    prompt_ids: list[int]  # with the chat template
    uid: str  # of the response; differs between RL steps, so that their noise does
    meta: Mapping[str, Any]  # for the record: RL step, number of the prompt and of the response
    response_length: int  # cells of the response

    def record(
        self,
        backbone: HFBackbone,
        tokens: Sequence[int],
        steps: Sequence[int | None],
        log_probs: Sequence[float | None] | NDArray[Any] | None = None,
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
        among = "or fewer with an end of text among them"
        expect(is_whole, f"{of} {size} tokens, {among}, got {count}")
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

        It is called once an RL step by every process, with its share of the prompts. ``module`` is
        the policy in training: ``export(folder)`` writes its adapter as it is by then, or the model
        where all of it is trained.
        """

    def answerable(
        self, problems: Sequence[Problem], module: TrainableModule, *, size: int, length: int
    ) -> list[Problem]:
        """Returns the problems to draw prompts from, once at the beginning; by default all.

        ``size``: responses to a prompt; ``length``: cells of a response.
        """
        return list(problems)


def answered(
    engine: RolloutEngine, prompts: Sequence[RolloutPrompt], module: TrainableModule
) -> list[Trajectory]:
    """Returns an engine's records in the order of the prompts, each found by its uid and checked.

    Their meta has ``num_tokens``, as that of the module's own decodes, and the engine's name.
    """
    name = type(engine).__name__
    found = {record.uid: record for record in engine.records(prompts, module)}
    for uid in {prompt.uid for prompt in prompts} ^ found.keys():
        got = f"{uid}, which was not asked for" if uid in found else f"none for {uid}"
        refuse(f"engine {name}", f"a record for each of {len(prompts)} prompts", got)
    records = []
    for prompt in prompts:
        # Made anew, so that ids, length and steps are those of this model and prompt.
        made = found[prompt.uid]
        cells = made.tokens.tolist(), made.commit_step.tolist(), made.signals.get(SAMPLED)
        records.append(prompt.record(module.backbone, *cells))
    lengths = module.texts(records)[1] if records else []
    return [
        record.with_meta(
            num_tokens=int((record.tokens[:length] != record.mask_id).sum()), engine=name
        )
        for record, length in zip(records, lengths, strict=True)
    ]
