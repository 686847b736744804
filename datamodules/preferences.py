"""Preference pairs for ``DPOModule``: from files, or right against wrong decodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from lit_dlm.datamodules.supervised_sources import (
    Decodes,
    ModelFacts,
    SupervisedSource,
    answered,
)
from lit_dlm.datamodules.trajectories import is_correct
from lit_dlm.modules.supervised_batch import SupervisedExample
from lit_dlm.tasks.conversations import CHATS
from lit_dlm.tasks.sources import Row, read_rows
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.trajectories.store.files import uid_order

SIDES = ("chosen", "rejected")


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
        path = Path(self.path).expanduser()
        folder = path if path.is_dir() else path.parent
        name = path.name.partition(".")[0]
        sides = [
            answered([_side(row, side) for row in rows], model, name=name, folder=folder)
            for side in SIDES
        ]
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
            raise ValueError(
                f"{shards}: expected a prompt with a right and a wrong decode, got none in "
                f"{len(taken)} records of {len(groups)} prompts"
            )
        for chosen, rejected in pairs:
            yield _pair(chosen, rejected)
