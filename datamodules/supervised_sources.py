"""Where supervised examples come from: tasks' references, files, recorded decodes; also pairs."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.config.components import Component
from lit_dlm.datamodules.trajectories import is_correct
from lit_dlm.predict.decode import encoded_turns
from lit_dlm.system.json_lines import json_object
from lit_dlm.system.options import at_least, refuse
from lit_dlm.tasks import Task
from lit_dlm.tasks.conversations import CHATS, conversation
from lit_dlm.tasks.sources import Row, read_rows
from lit_dlm.training.batch import SupervisedExample
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.rows import ImportSettings, read_tabom
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.trajectories.store.files import MANIFEST_FILE, uid_order
from lit_dlm.vision.base import (
    PromptPictures,
    add_picture_folders,
    add_pictures,
    find_pictures,
    prompt_pictures,
)
from lit_dlm.vision.pictures import IMAGE_MARK, Picture

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")  # of a preference pair


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What tokenising examples needs to know about a model."""

    tokenizer: PreTrainedTokenizerBase
    spec: BackboneSpec
    vocab_size: int
    backbone: HFBackbone | None = None
    """The model; needed only for prompts with pictures, which it must be able to see."""
    takes_rewrites: bool = False
    """Whether training has states for decodes that took back or replaced tokens."""

    @cached_property
    def end_id(self) -> int:
        """Token that ends an answer: the chat template's, or else the model's first end of text."""
        if self.tokenizer.chat_template is None:
            return self.spec.eos_ids[0]
        question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        ends, before = (
            [
                token
                for token in encoded_turns(self.tokenizer, turns, backbone=None, uid="")
                if token in self.spec.eos_ids
            ]
            for turns in ([question, answer, question], [question])
        )
        return [*ends, *self.spec.eos_ids][len(before)]

    def prompt(
        self, uid: str, turns: list[dict[str, str]], pictures: Sequence[Picture] = ()
    ) -> dict[str, Any]:
        """Returns ``prompt_ids`` and ``pictures`` of an example, up to where the model answers."""
        ids = encoded_turns(self.tokenizer, turns, pictures, backbone=self.backbone, uid=uid)
        add_pictures(self.backbone, uid, pictures)
        digests = tuple(picture.digest for picture in pictures)
        shown = PromptPictures(digests=digests, first_id=self.vocab_size) if digests else None
        return {"prompt_ids": np.array(ids, dtype=np.int32), "pictures": shown}


class SupervisedSource(Component):
    """Provides prompts with responses."""

    @abstractmethod
    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        """Yields all examples, tokenised, in a stable order; uids are unique within the source."""


@dataclass(eq=False)
class TaskReferences(SupervisedSource):
    """Prompts of tasks with completions that grade as right (the ground truth).

    Args:
        tasks: tasks whose data contain solutions.
    """

    tasks: list[Task]

    def __post_init__(self) -> None:
        at_least(1, tasks=len(self.tasks))

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        for task in self.tasks:
            for example in task.examples():
                if example.answer_start:
                    raise ValueError(
                        f"{example.uid}: the template of the task begins the answer, which its "
                        "reference gives whole; training on references needs one that does not"
                    )
                turns = [*example.history, {"role": "user", "content": example.text}]
                yield SupervisedExample(
                    uid=example.uid,
                    **model.prompt(example.uid, turns, example.images),
                    response_ids=_response_ids(model, task.reference_completion(example)),
                )


@dataclass(eq=False)
class ResponsesList(SupervisedSource):
    """Answered prompts given directly, in the form of a file's rows.

    Args:
        rows: such as ``{"prompt": ..., "answer": ...}`` (:mod:`lit_dlm.tasks.conversations`).
    """

    rows: list[dict[str, Any]]

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        rows = [
            Row(index=number, origin=origin, fields=json_object(origin, fields))
            for number, fields in enumerate(self.rows)
            if (origin := f"rows[{number}]")
        ]
        return answered(rows, model, name="rows")


@dataclass(eq=False)
class ResponsesFile(SupervisedSource):
    """Answered prompts from a file, a folder or the hub.

    :mod:`lit_dlm.tasks.conversations` says what a row may hold; ``PromptsFile`` takes the same.

    A ``step_map``, if a row has one, holds the step that wrote each token of the response (dLLM-RL,
    arXiv:2509.06949). Steps after the last token are ignored; if the map ends before the end of
    text, that token comes after all others, as in that release.

    Args:
        path: a file, a folder with a file for each split, or a data set on the hub
            (:func:`~lit_dlm.tasks.sources.read_rows`).
        split: split of a folder or of a data set on the hub.
        templated: whether prompts are texts with a chat template already applied, such as those of
            dLLM-RL's preprocessed files; by default they are user turns.
    """

    path: str
    _: KW_ONLY
    split: str = "train"
    templated: bool = False

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        rows = read_rows(self.path, split=self.split, required=())
        name = Path(self.path).expanduser().name.partition(".")[0]
        return answered(rows, model, name=name, templated=self.templated)


def answered(
    rows: Iterable[Row], model: ModelFacts, *, name: str, templated: bool = False
) -> Iterator[SupervisedExample]:
    """Yields examples of answered rows."""
    for number, row in enumerate(rows):
        turns, response = conversation(row)
        assert response is not None
        response_ids = _response_ids(model, response)
        uid, pictures = f"{name}/{number:06d}", row.pictures()
        text = turns[0]["content"].removeprefix(IMAGE_MARK)
        prompt: dict[str, Any] = {}
        if templated:
            parts = [*(CHATS.keys() & row.fields.keys()), *(["pictures"] if pictures else [])]
            row.expect(not parts, "a prompt that is one text (templated)", parts)
            prompt["prompt_ids"] = _raw_ids(model, text)
        else:
            start = next(filter(text.startswith, model.tokenizer.get_added_vocab()), None)
            wanted = "a prompt without a chat template around it, or templated: true"
            row.expect(not start, wanted, start)
            prompt = model.prompt(uid, turns, pictures)
        yield SupervisedExample(
            uid=uid,
            **prompt,
            response_ids=response_ids,
            steps=_step_map(row, response_ids, model.spec.eos_ids),
        )


class Decodes(SupervisedSource):
    """Base of sources that filter recorded decodes and make examples of them."""

    only_correct: bool = False
    methods: list[str] | None = None
    tasks: list[str] | None = None

    def taken(
        self, records: Iterable[Trajectory], origin: Path, model: ModelFacts
    ) -> Iterator[SupervisedExample]:
        """Yields examples of the records that are taken; logs which option left others out."""
        add_picture_folders(model.backbone, origin)
        count = 0
        left_out: Counter[str] = Counter()
        for record in records:
            reason = self._left_out_by(record, origin)
            # One row of tokens and one of steps cannot describe such states.
            if not (reason or model.takes_rewrites or record.superseded is None):
                reason = "rewritten tokens"
            if reason:
                left_out[reason] += 1
                continue
            if record.mask_id != model.spec.mask_id:
                raise ValueError(
                    f"{origin}: record {record.uid!r} has mask id {record.mask_id}, expected "
                    f"{model.spec.mask_id}, that of the model"
                )
            find_pictures(model.backbone, record.uid, record.meta)
            count += 1
            listed = record.meta.get("non_ltr_positions")  # came with an imported decode
            yield SupervisedExample(
                uid=record.uid,
                prompt_ids=record.prompt_ids,
                response_ids=record.tokens,
                pictures=prompt_pictures(record.meta, record.vocab_size),
                given=record.given,
                steps=record.commit_step,
                superseded=record.superseded,
                decode_entropy=record.commit_entropy(fill=0.0),
                non_ltr=None if listed is None else np.isin(np.arange(len(record.tokens)), listed),
            )
        reasons = ", ".join(f"{number} by {reason}" for reason, number in left_out.items())
        if not count:
            got = f"none of {left_out.total()}: {reasons}" if reasons else "an empty source"
            raise ValueError(f"{origin}: expected at least one record, got {got}")
        if reasons:
            logger.info("%s: took %d records, left out %s", origin, count, reasons)

    def _left_out_by(self, record: Trajectory, origin: Path) -> str | None:
        for name, values in (("method", self.methods), ("task", self.tasks)):
            if values is not None and record.meta.get(name) not in values:
                return f"{name}s: {list(values)}"
        if self.only_correct and not is_correct(record, str(origin)):
            return "only_correct"
        return None


@dataclass(eq=False)
class RecordedDecodes(Decodes):
    """Responses that a model decoded, with the steps that wrote them, from trajectory shards.

    Decodes that took back or replaced a token are left out, except for maskings that have states
    for them: random ones, and ``DecodedViews``.

    Args:
        shards: folder of trajectory shards, as ``predict`` with a ``DecodeWriter`` writes them.
        only_correct: leave out records whose ``meta["correct"]`` is false or null (the verifier's
            filter).
        methods: decoding methods to take; all by default.
        tasks: tasks to take; all by default.
    """

    shards: str | Path
    _: KW_ONLY
    only_correct: bool = True
    methods: list[str] | None = None
    tasks: list[str] | None = None

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        shards = Path(self.shards)
        if shards.is_dir() and not (shards / MANIFEST_FILE).is_file():
            message = "%s: there is no %s: taking the records of a run that did not finish"
            logger.warning(message, shards, MANIFEST_FILE)
        records = TrajectoryShardReader(shards, features=False)
        found = list(self.taken(records, shards, model))
        # The same order however many processes wrote them, and wherever these were interrupted.
        for number in uid_order([example.uid for example in found]):
            yield found[number]


@dataclass(eq=False)
class TABOMFile(Decodes):
    """Self-distilled trajectories in the JSONL of TABOM's release.

    Args:
        path: the file, which may be gzipped; rows hold ``response_token_ids`` and
            ``decoding_order``.
        methods: values of ``method`` to take; all by default.
        only_correct: leave out rows that are graded as wrong; needs graded rows.
    """

    path: str | Path
    _: KW_ONLY
    methods: list[str] | None = None
    only_correct: bool = False

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"TABOMFile.path: there is no file {str(self.path)!r}")
        settings = ImportSettings(
            mask_id=model.spec.mask_id,
            vocab_size=model.vocab_size,
            tokenizer=model.tokenizer,
            pad_id=model.spec.pad_id,
        )
        yield from self.taken(read_tabom(path, settings), path, model)


@dataclass(eq=False)
class PreferencesFile(SupervisedSource):
    """Pairs from a file, a folder or the hub, with the fields of trl's preference data.

    ``chosen`` and ``rejected`` are texts or lists of turns (``role``, ``content``). ``prompt`` has
    the same form; it can be left out if the turns of both sides begin with it.

    Args:
        path: as in ``ResponsesFile``.
        split: split of a folder or of a data set on the hub.
    """

    path: str
    _: KW_ONLY
    split: str = "train"

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        rows = read_rows(self.path, split=self.split, required=SIDES)
        name = Path(self.path).expanduser().name.partition(".")[0]
        sides = [answered([_side(row, side) for row in rows], model, name=name) for side in SIDES]
        for row, chosen, rejected in zip(rows, *sides, strict=True):
            is_pair = chosen.prompt_ids.tolist() == rejected.prompt_ids.tolist()
            row.expect(is_pair, "two answers to the same prompt", "two prompts")
            yield _pair(chosen, rejected)


def _side(row: Row, side: str) -> Row:
    """Returns the row with one side as its only answer."""
    answer, prompt = row.fields[side], row.fields.get("prompt")
    fields = {
        name: value for name, value in row.fields.items() if name not in (*SIDES, "prompt", *CHATS)
    }
    if isinstance(answer, list):
        before = [] if prompt is None else prompt
        row.expect(isinstance(before, list), "turns in field 'prompt', as in the answers", before)
        fields["messages"] = [*before, *answer]
    else:
        fields |= {"prompt": prompt, "response": row.text(side)}
    return replace(row, fields=fields)


def _pair(chosen: SupervisedExample, rejected: SupervisedExample) -> SupervisedExample:
    # Each response has noise of its own, which follows from its uid.
    uid = f"{chosen.uid}/rejected"
    return replace(chosen, rejected=replace(rejected, uid=uid))


@dataclass(eq=False)
class RecordedPairs(Decodes):
    """Right against wrong decodes of the same prompt, from graded trajectory shards.

    Decodes of a prompt are paired in the order of their uids; surplus ones are left out.

    Args:
        shards: folder of trajectory shards, from ``predict`` or from the rollouts of an RL run.
        methods: decoding methods to take; all by default.
        tasks: tasks to take; all by default.
    """

    shards: str | Path
    _: KW_ONLY
    methods: list[str] | None = None
    tasks: list[str] | None = None

    def examples(self, model: ModelFacts) -> Iterator[SupervisedExample]:
        shards = Path(self.shards)
        records = {one.uid: one for one in TrajectoryShardReader(shards, features=False)}
        taken = list(self.taken(records.values(), shards, model))
        groups: dict[object, tuple[list[SupervisedExample], list[SupervisedExample]]] = {}
        for number in uid_order([one.uid for one in taken]):
            one = taken[number]
            # The ids of pictures are only numbers, so the pictures themselves are compared too.
            sides = groups.setdefault((one.prompt_ids.tobytes(), one.pictures), ([], []))
            grade = is_correct(records[one.uid], str(shards))
            if grade is not None:
                sides[not grade].append(one)
        pairs = [pair for sides in groups.values() for pair in zip(*sides, strict=False)]
        if not pairs:
            got = f"none in {len(taken)} records of {len(groups)} prompts"
            refuse(str(shards), "a prompt with a right and a wrong decode", got)
        for chosen, rejected in pairs:
            yield _pair(chosen, rejected)


def _raw_ids(model: ModelFacts, text: str) -> NDArray[np.int32]:
    return np.array(model.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def _response_ids(model: ModelFacts, text: str) -> NDArray[np.int32]:
    ids = _raw_ids(model, text)
    if len(ids) and ids[-1] in model.spec.eos_ids:
        return ids
    return np.append(ids, np.int32(model.end_id))


def _step_map(row: Row, ids: NDArray[np.int32], eos_ids: Sequence[int]) -> NDArray[np.int32] | None:
    """Returns the ``(n,)`` steps of a response, from 0; ``None`` if the row has none."""
    given = row.fields.get("step_map")
    if given is None:
        return None
    is_steps = isinstance(given, list) and all(isinstance(n, int) and n >= 0 for n in given)
    row.expect(is_steps, "a list of whole numbers of 0 or more in 'step_map'", given)
    ends = len(ids) > 0 and ids[-1] in eos_ids
    if given and ends and len(given) == len(ids) - 1:
        given = [*given, max(given) + 1]
    wanted = f"{len(ids)} steps in 'step_map', as the response has tokens with this tokenizer"
    row.expect(len(given) >= len(ids), wanted, len(given))
    steps = np.array(given[: len(ids)], dtype=np.int32)
    return steps - steps.min(initial=np.iinfo(np.int32).max)
