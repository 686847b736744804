"""Benchmark results on disk: one JSON line per decoded sample, append-only and resumable.

Layout::

    results/{task}/{method}/settings.json        what produced the lines beside it
    results/{task}/{method}/part-r00000.jsonl    one line per sample, one file per process
    results/run.json                             date, device and versions, for the reader

The last key of every line, and of the settings, is a digest of the others, checked on reading.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_dlm.config.files import setting_differences
from lit_dlm.system.files import write_atomically, write_json
from lit_dlm.system.json_lines import json_object, parsed_json

METADATA_FILE = "run.json"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One decoded and graded sample."""

    uid: str
    task: str
    method: str
    correct: bool
    verdict: str  # the grader's status: right, wrong, no_answer, timeout, ...
    detail: str
    answer: str | None  # what was extracted from the completion
    completion: str  # the text that was decoded, cut at its first end of text
    nfe: int
    policy_forwards: int
    idle_steps: int  # forwards that committed nothing
    stalled_steps: int  # steps in which the stall rule committed for the policy
    num_tokens: int  # response tokens before the first end of text
    response_length: int
    seconds: float  # wall time of decoding, shared equally by a batch; without grading
    status: str  # complete, eos or step_limit
    seed: int
    policy_seconds: float = 0.0  # the part that the commit policy took; 0 in CUDA graphs
    trajectory: dict[str, str] | None = None
    """The record of this decode, if one was kept: ``set`` (folder, relative to the run folder),
    ``uid`` and content ``digest``."""
    fill: dict[str, list[float]] | None = None  # of regions, before each step and at the end
    lockstep: float | None = None  # 0 to 1; None for a decoder without a layout
    prompt: str = ""
    response: int = 0  # number among several to a prompt; above 0 the uid ends in #{number}
    problem: str = ""  # digest of the problem, without its uid
    score: float | None = None  # share of a full point, if the task's accuracy is their mean

    @property
    def points(self) -> float:
        return float(self.correct) if self.score is None else self.score

    @property
    def prompt_uid(self) -> str:
        return self.uid.removesuffix(f"#{self.response}") if self.response else self.uid


class ResultFolder:
    """Reads and appends to a ``results`` folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._written: set[Path] = set()

    def method_folder(self, task: str, method: str) -> Path:
        for kind, name in (("task", task), ("method", method)):
            if not _SAFE_NAME.fullmatch(name):
                raise ValueError(
                    f"{kind} '{name}': expected letters, digits, '.', '_', '+' and '-' only"
                )
        return self.folder / task / method

    def claim(self, task: str, method: str, settings: Mapping[str, Any]) -> None:
        """Records all settings that decide a method's results, or compares them to those there."""
        path = self.method_folder(task, method) / "settings.json"
        # As JSON gives them back: a tuple that became a list is no other setting.
        wanted = json.loads(json.dumps(settings, sort_keys=True))
        if not path.exists():
            write_json(path, {**wanted, "digest": _digest(wanted)})
        elif (recorded := self.settings(task, method)) != wanted:
            changes = "; ".join(setting_differences(recorded, wanted))
            raise ValueError(
                f"{path}: holds results of other settings ({changes}). Use another run_dir or "
                "method name, or remove the folder"
            )

    def settings(self, task: str, method: str) -> dict[str, Any]:
        path = self.method_folder(task, method) / "settings.json"
        return _parsed(path.read_bytes(), str(path))

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Writes what a reader wants to know of a run, but what does not decide its results."""
        write_json(self.folder / METADATA_FILE, metadata)

    def metadata(self) -> dict[str, Any]:
        """Metadata of the run, of its last part if it was resumed; empty if there are none."""
        path = self.folder / METADATA_FILE
        return json.loads(path.read_bytes()) if path.exists() else {}

    def completed(self, task: str, method: str) -> set[str]:
        return {row["uid"] for row in self._lines(self.method_folder(task, method))}

    def decode_uids(self) -> set[str]:
        return {
            f"{uid}@{method}"
            for task, method in self.pairs()
            for uid in self.completed(task, method)
        }

    def repair(self, records: Collection[str] | None) -> int:
        """Removes second rows of a sample and rows without their record; returns how many."""
        num_removed = 0
        # By folder, since processes that split the samples otherwise after a resume may have
        # decoded one sample twice, each into its own file.
        seen: set[tuple[Path, str]] = set()
        for path in sorted(self.folder.glob("*/*/part-r*.jsonl")):
            rows = list(_rows_of(path))
            kept = []
            for row in rows:
                key = (path.parent, row["uid"])
                uid = (row.get("trajectory") or {}).get("uid")
                # A record may be lost where its row is whole; decoded again, the sample has both.
                if key not in seen and (records is None or uid in records):
                    kept.append(row)
                    seen.add(key)
            if len(kept) < len(rows):
                write_atomically(path, "".join(map(_line, kept)))
            num_removed += len(rows) - len(kept)
        return num_removed

    def append(self, rows: Iterable[ResultRow], *, rank: int = 0) -> None:
        """Appends rows and flushes them to disk; each process (``rank``) writes its own file."""
        grouped: dict[Path, list[ResultRow]] = {}
        for row in rows:
            folder = self.method_folder(row.task, row.method)
            grouped.setdefault(folder / f"part-r{rank:05d}.jsonl", []).append(row)
        for path, group in grouped.items():
            # Opening it anew would go on in silence, and lose what was there.
            if path in self._written and not path.exists():
                raise FileNotFoundError(errno.ENOENT, "was deleted during the run", str(path))
            self._written.add(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Else the first new row would continue the torn line, and both would be lost.
            drop_torn_line(path)
            with path.open("a", encoding="utf-8") as file:
                for row in group:
                    file.write(_line(asdict(row)))
                file.flush()
                # On disk before the batch counts as done: resuming decodes only what is not there.
                os.fsync(file.fileno())

    def rows(self, task: str, method: str) -> list[ResultRow]:
        folder = self.method_folder(task, method)
        try:
            rows = [ResultRow(**line) for line in self._lines(folder)]  # from all processes
        except TypeError as error:  # rows of another version
            raise ValueError(f"{folder}: {error}") from None
        rows.sort(key=lambda row: row.uid)
        for one, two in pairwise(rows):
            if one.uid == two.uid:
                raise ValueError(f"{folder}: sample {one.uid} was written twice")
        return rows

    def pairs(self) -> list[tuple[str, str]]:
        paths = self.folder.glob("*/*/settings.json")
        return sorted((path.parent.parent.name, path.parent.name) for path in paths)

    def _lines(self, folder: Path) -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob("part-r*.jsonl")):
            yield from _rows_of(path)


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    # By bytes: texts hold characters, such as U+2028, at which str.splitlines would cut a row.
    lines = path.read_bytes().split(b"\n")
    # A process that was killed while writing leaves a last line without its end.
    for number, line in enumerate(lines[:-1], start=1):
        yield _parsed(line, f"{path}, line {number}")


def _digest(row: Mapping[str, Any]) -> str:
    # Over JSON, in the order of the keys: floats have the same digits when they are read back.
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({**row, "digest": _digest(row)}, ensure_ascii=False) + "\n"


def _parsed(text: bytes, origin: str) -> dict[str, Any]:
    """Parses a JSON object, and checks and removes its digest; errors name its ``origin``."""
    value = json_object(origin, parsed_json(origin, text))
    if value.pop("digest", None) != _digest(value):
        raise ValueError(
            f"{origin}: damaged, or written by an older version: it has another digest"
        )
    return value


def drop_torn_line(path: Path) -> None:
    """Removes a last line without its end, as a killed process leaves it; refuses links."""
    # Truncating would follow the link and cut a file that may be anybody's.
    if path.is_symlink():
        raise OSError(errno.ELOOP, "expected a file, got a symbolic link", str(path))
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size or (file.seek(-1, os.SEEK_CUR), file.read())[1] == b"\n":
            return
        file.seek(0)
        data = file.read()
    os.truncate(path, data.rfind(b"\n") + 1)
