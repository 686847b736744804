"""Where supervised examples come from: tasks' references, files of answers, recorded decodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import BackboneSpec
from lit_dlm.modules.supervised_batch import SupervisedExample
from lit_dlm.tasks import Task
from lit_dlm.tasks.sources import Row, read_rows
from lit_dlm.trajectories.importers import ImportSettings, read_tabom
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import MANIFEST_FILE
from lit_dlm.trajectories.shards import TrajectoryShardReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What tokenising examples needs to know of a model."""

    tokenizer: PreTrainedTokenizerBase
    spec: BackboneSpec
    vocab_size: int
    missing_order: Literal["none", "ltr"] = "none"
    """The data's option, for files that hold steps: whether rows without them are taken."""


@runtime_checkable
class SupervisedSource(Protocol):
    """Gives prompts with responses."""

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """All examples, tokenised, in a stable order.

        Args:
            model: tokenizer and special ids.

        Yields:
            The examples; uids are unique within the source.
        """
        ...


class TaskReferences(SupervisedSource):
    """Prompts of tasks with completions that grade as right (the ground truth).

    Args:
        tasks: tasks whose data hold solutions.
        end_token: token behind every response; the model's first end of text by default.
    """

    def __init__(self, tasks: list[Task], *, end_token: str | None = None) -> None:
        if not tasks:
            raise ValueError("tasks: expected at least one task, got none")
        self.tasks = tasks
        self.end_token = end_token

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """One example per problem."""
        end_id = _end_id(model, self.end_token)
        for task in self.tasks:
            for example in task.examples():
                if example.answer_start:
                    raise ValueError(
                        f"{example.uid}: the template of the task begins the answer, which its "
                        "reference gives whole; training on references needs one that does not"
                    )
                yield SupervisedExample(
                    uid=example.uid,
                    prompt_ids=_prompt_ids(model, [{"role": "user", "content": example.text}]),
                    response_ids=_response_ids(model, task.reference_completion(example), end_id),
                )


class ResponsesFile(SupervisedSource):
    """A file of answered prompts, one JSON object a line (``.jsonl``, also gzipped).

    A row holds ``messages`` (chat turns, the last one the assistant's), or a prompt under
    ``prompt``, ``instruction`` (with ``input`` below it where that is not empty) or ``question``
    and a response under ``response``, ``output``, ``completion`` or ``answer``.

    Args:
        path: the file.
        end_token: token behind every response; the model's first end of text by default.
        limit: most rows to take; all by default.
    """

    def __init__(
        self, path: str, *, end_token: str | None = None, limit: int | None = None
    ) -> None:
        self.path = path
        self.end_token = end_token
        self.limit = limit

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """One example per row."""
        end_id = _end_id(model, self.end_token)
        rows = read_rows(self.path, split="train", required=())
        for number, row in enumerate(rows[: self.limit]):
            turns, response = _conversation(row)
            yield SupervisedExample(
                uid=f"{Path(self.path).name.partition('.')[0]}/{number:06d}",
                prompt_ids=_prompt_ids(model, turns),
                response_ids=_response_ids(model, response, end_id),
            )


class RecordedDecodes(SupervisedSource):
    """Responses that a model decoded, with the steps that wrote them, from trajectory shards.

    Decodes that masked or edited a token again, and infillings, are left out: two rows of tokens
    and steps do not describe their states.

    Args:
        shards: folder of trajectory shards, as ``predict`` with a ``ShardWriter`` writes them.
        only_correct: leave out records whose ``meta["correct"]`` is false (the verifier's filter).
        methods: decoding methods to take; all by default.
        tasks: tasks to take; all by default.
        limit: most records to take; all by default.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        only_correct: bool = True,
        methods: list[str] | None = None,
        tasks: list[str] | None = None,
        limit: int | None = None,
    ) -> None:
        self.shards = Path(shards)
        self.only_correct = only_correct
        self.methods = methods
        self.tasks = tasks
        self.limit = limit

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """One example per record that passes the filters."""
        if self.shards.is_dir() and not (self.shards / MANIFEST_FILE).is_file():
            logger.warning(
                "%s: there is no %s, which a run writes at its end; taking the records of a run "
                "that did not finish",
                self.shards,
                MANIFEST_FILE,
            )
        reader = TrajectoryShardReader(self.shards, features=False, worker=0, num_workers=1)
        yield from _examples_of(
            reader,
            str(self.shards),
            model,
            only_correct=self.only_correct,
            wanted={"method": self.methods, "task": self.tasks},
            limit=self.limit,
        )


class TABOMFile(SupervisedSource):
    """Self-distilled trajectories in the JSONL of TABOM's release.

    Args:
        path: the file, which may be gzipped; rows hold ``response_token_ids`` and
            ``decoding_order``.
        methods: values of ``method`` to take; all by default.
        only_correct: leave out rows that say they are wrong; needs rows that were graded.
        limit: most rows to take; all by default.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        methods: list[str] | None = None,
        only_correct: bool = False,
        limit: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.methods = methods
        self.only_correct = only_correct
        self.limit = limit

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """One example per row that passes the filters."""
        if not self.path.is_file():
            raise ValueError(f"TABOMFile.path: there is no file {str(self.path)!r}")
        settings = ImportSettings(
            mask_id=model.spec.mask_id,
            vocab_size=model.vocab_size,
            tokenizer=model.tokenizer,
            pad_id=model.spec.pad_id,
            missing_order=model.missing_order,
        )
        yield from _examples_of(
            read_tabom(self.path, settings),
            str(self.path),
            model,
            only_correct=self.only_correct,
            wanted={"method": self.methods},
            limit=self.limit,
        )


_REWRITTEN = "given or rewritten tokens"


def _examples_of(
    records: Iterator[Trajectory] | TrajectoryShardReader,
    origin: str,
    model: ModelFacts,
    *,
    only_correct: bool,
    wanted: Mapping[str, Sequence[str] | None],
    limit: int | None,
) -> Iterator[SupervisedExample]:
    taken = 0
    left_out: Counter[str] = Counter()
    for record in records:
        if taken == limit:
            break
        misses = [
            f"{name}s: {list(values)}"
            for name, values in wanted.items()
            if values is not None and record.meta.get(name) not in values
        ]
        if misses:
            left_out[misses[0]] += 1
            continue
        if only_correct:
            if "correct" not in record.meta:
                raise ValueError(
                    f"only_correct: record {record.uid!r} in {origin} was not graded when it was "
                    "made (its meta has no 'correct')"
                )
            if not record.meta["correct"]:
                left_out["only_correct"] += 1
                continue
        if record.mask_id != model.spec.mask_id:
            raise ValueError(
                f"{origin}: record {record.uid!r} has mask id {record.mask_id}, expected "
                f"{model.spec.mask_id}, that of the model"
            )
        if record.superseded is not None or record.given is not None:
            left_out[_REWRITTEN] += 1
            continue
        taken += 1
        yield SupervisedExample(
            uid=record.uid,
            prompt_ids=record.prompt_ids,
            response_ids=record.tokens,
            steps=record.commit_step,
            decode_entropy=_commit_entropy(record),
            non_ltr=_listed_non_ltr(record),
        )
    if rewritten := left_out[_REWRITTEN]:
        logger.warning("%s: left out %d records with %s", origin, rewritten, _REWRITTEN)
    reasons = ", ".join(f"{count} by {reason}" for reason, count in left_out.items() if count)
    if not taken:
        raise ValueError(
            f"{origin}: expected at least one record, got "
            + (f"none of {left_out.total()}: {reasons}" if reasons else "an empty source")
        )
    if reasons:
        logger.info("%s: took %d records, left out %s", origin, taken, reasons)


def _listed_non_ltr(record: Trajectory) -> NDArray[np.bool_] | None:
    """``(G,)`` bool of the list that came with an imported decode, where it did."""
    listed = record.meta.get("non_ltr_positions")
    return None if listed is None else np.isin(np.arange(record.num_generated), listed)


def _commit_entropy(record: Trajectory) -> NDArray[np.float32] | None:
    """``(G,)`` entropy of each position at the step that wrote it, where it was recorded."""
    if "step_entropy" not in record.signals:
        return None
    step, position = record.masked_rows().T
    written = record.commit_step[position] == step
    entropy = np.zeros(record.num_generated, dtype=np.float32)
    entropy[position[written]] = record.signals["step_entropy"][written]
    return entropy


def _end_id(model: ModelFacts, end_token: str | None) -> int:
    if end_token is None:
        return model.spec.eos_ids[0]
    found = model.tokenizer.get_vocab().get(end_token)
    if found not in model.spec.eos_ids:
        raise ValueError(
            f"end_token: expected a token that ends an answer (ids {model.spec.eos_ids}), got "
            f"{end_token!r} (id {found})"
        )
    return int(found)


def _prompt_ids(model: ModelFacts, turns: list[dict[str, str]]) -> NDArray[np.int32]:
    ids = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return np.array(ids, dtype=np.int32)


def _response_ids(model: ModelFacts, text: str, end_id: int) -> NDArray[np.int32]:
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, end_id], dtype=np.int32)


_PROMPT_FIELDS = ("prompt", "instruction", "question")
_RESPONSE_FIELDS = ("response", "output", "completion", "answer")


def _conversation(row: Row) -> tuple[list[dict[str, str]], str]:
    """Turns before the response, and the response."""
    fields = row.fields
    if "messages" in fields:
        turns = fields["messages"]
        if not isinstance(turns, list) or len(turns) < 2 or not all(map(_is_turn, turns)):
            raise ValueError(
                f"{row.origin}: field 'messages' must list at least two turns with role and content"
            )
        if turns[-1]["role"] != "assistant":
            raise ValueError(
                f"{row.origin}: the last of 'messages' must be the assistant's, "
                f"got role {turns[-1]['role']!r}"
            )
        return turns[:-1], turns[-1]["content"]
    prompt = next((name for name in _PROMPT_FIELDS if name in fields), None)
    response = next((name for name in _RESPONSE_FIELDS if name in fields), None)
    if prompt is None or response is None:
        raise ValueError(
            f"{row.origin}: expected 'messages', or one of {', '.join(_PROMPT_FIELDS)} and one of "
            f"{', '.join(_RESPONSE_FIELDS)}; got {', '.join(sorted(fields)) or 'nothing'}"
        )
    text = row.text(prompt)
    if prompt == "instruction" and fields.get("input"):
        text = f"{text}\n\n{row.text('input')}"
    return [{"role": "user", "content": text}], row.text(response)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and all(
        isinstance(turn.get(key), str) for key in ("role", "content")
    )
