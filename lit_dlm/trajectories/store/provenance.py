"""Describes a run: model, tokenizer, decoding, randomness, data, software, hardware.

The canonical text of a :class:`RunRecord` is ``run.json``; the first 16 bytes of its SHA-256 are
stored in every block. Records are only comparable, and a folder is only resumed, if the groups that
decide the outcome are equal; software and hardware may differ between parts of one folder and are
then kept as separate run records.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_dlm.system.files import write_atomically
from lit_dlm.trajectories.format import canonical_json
from lit_dlm.trajectories.record import TrajectoryFormatError
from lit_dlm.trajectories.store.files import RUN_MEMBER, STRANGE

RUN_FILE = "run.json"
SAMPLE_SEED_RULE = "63 bits of sha256('{seed}:{uid}')"
"""By this text a run says that its sample seeds follow from the base seed and the example's uid."""
ESSENTIAL = ("model", "tokenizer", "decode", "randomness", "data")
"""Groups that decide the outcome of a decode; resuming with another value of a key is an error."""
_OPEN = ("decode.methods", "data.tasks")
"""Collections to which a later run of the same folder may add members, or leave some out."""
_ABSENT = object()

_PACKAGES = ("torch", "transformers", "lightning", "peft", "numpy", "pyarrow", "zstandard")
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is known about one run, JSON types only."""

    model: Mapping[str, Any]  # id, revision, digests of configuration and weights, dtype, adapters
    tokenizer: Mapping[str, Any]  # id, revision, digest of its files and chat template, special ids
    decode: Mapping[str, Any]  # every setting of the decoder
    randomness: Mapping[str, Any]  # base seed, noise scheme, how sample seeds are derived
    data: Mapping[str, Any]  # data set, split, file digests, prompt template digest
    software: Mapping[str, Any] = field(default_factory=lambda: software())
    hardware: Mapping[str, Any] = field(default_factory=lambda: hardware())
    """Devices. World size, batch size and padding may be added."""

    def __post_init__(self) -> None:
        self.text()  # refuses what JSON cannot hold, early and by name

    def as_dict(self) -> dict[str, Any]:
        groups = {name: dict(getattr(self, name)) for name in (*ESSENTIAL, "software", "hardware")}
        return {"format": "lit-dlm/run", "version": 1, **groups}

    def text(self) -> str:
        return canonical_json(self.as_dict())  # one text for equal content: its digest is stored

    def digest(self) -> bytes:
        return hashlib.sha256(self.text().encode()).digest()[:16]

    def save(self, folder: str | Path) -> Path:
        """Writes ``run.json``, or checks the one that is there; returns the file of this record.

        A folder of a run that differs in what decides the outcome is refused. The file is
        ``run-<digest>.json`` if the folder was begun with other software, hardware, methods or
        tasks.
        """
        folder = Path(folder)
        path = folder / RUN_FILE
        if path.exists():
            # Every part must agree with this run; one of them may have the very same record.
            for former in (path, *sorted(folder.glob("run-*.json"))):
                stored = RunRecord.parse(former.read_bytes(), where=former)
                then, now = stored.as_dict(), json.loads(self.text())
                differing = [
                    f"{key}: {before} in the folder, {after} now"
                    for group in ESSENTIAL
                    for key, before, after in differences(then[group], now[group], group)
                ]
                if differing:
                    raise ValueError(
                        f"{former}: the folder holds a run with other settings; use another folder "
                        "or the same settings. " + "; ".join(differing)
                    )
                if stored.text() == self.text():
                    return former
            # What decides the outcome is equal, the rest is not: blocks name the record of theirs.
            path = folder / f"run-{self.digest().hex()[:16]}.json"
        write_atomically(path, self.text())
        return path

    @classmethod
    def parse(cls, text: str | bytes, *, where: object = "run record") -> RunRecord:
        """Reads a record from its text, whoever wrote it."""
        try:
            stored = json.loads(text)
            groups = {name: dict(stored[name]) for name in (*ESSENTIAL, "software", "hardware")}
            return cls(**groups)
        except STRANGE as error:
            raise TrajectoryFormatError(f"{where}: not a run record: {error}") from error


def run_of_shard(shard: Path) -> tuple[RunRecord, str]:
    """Returns the run record in a shard (its first member), and its digest (hexadecimal)."""
    try:
        with tarfile.open(shard, "r:") as archive:
            first = archive.next()
            file = archive.extractfile(first) if first and first.name == RUN_MEMBER else None
            text = b"" if file is None else file.read()
    except tarfile.TarError as error:
        raise TrajectoryFormatError(f"{shard}: not a tar file: {error}") from error
    # Of the text as stored: parsing and writing it again could hide a change.
    run = RunRecord.parse(text, where=f"{shard}: {RUN_MEMBER}")
    return run, hashlib.sha256(text).digest()[:16].hex()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hexadecimal) over vocabulary and chat template of a transformers tokenizer."""
    # Of the tokenizer in memory: the same one can be stored in files of several kinds.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(f"{text}\0{template}".encode()).hexdigest()


def software() -> dict[str, Any]:
    """Versions, numeric flags, and environment variables that change numbers."""
    import torch  # imported here: it takes seconds, and reading records does not need it

    return {
        "python": platform.python_version(),
        **_own_version(),
        **{package: _version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def hardware() -> dict[str, Any]:
    """Processor and accelerators of this machine."""
    import torch

    devices = []
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "system": platform.system(), "devices": devices}


def _own_version() -> dict[str, Any]:
    """Our version, and the commit if the package is in the work tree of its own repository."""
    package = Path(__file__).resolve().parents[2]
    own: dict[str, Any] = {"lit_dlm": _version("lit-dlm"), "commit": None, "dirty": None}
    # An installed package may lie inside the repository of somebody's project.
    root = _git(package, "rev-parse", "--show-toplevel")
    if root is not None and Path(root).resolve() == package.parent:
        own["commit"] = _git(package, "rev-parse", "HEAD")
        own["dirty"] = bool(_git(package, "status", "--porcelain", "--untracked-files=no"))
    return own


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    # git status would lock the index to refresh it, and leave the lock behind if it were killed.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None


def differences(stored: Any, current: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Each key that differs, with both values as JSON, or ``absent``.

    An open collection may have members on one side only.
    """
    if isinstance(stored, dict) and isinstance(current, dict):
        # A folder may get further methods and tasks; those on both sides must be the same.
        common = stored.keys() & current.keys()
        for name in sorted(common if key in _OPEN else stored.keys() | current.keys()):
            inner = f"{key}.{name}"
            absent = {} if inner in _OPEN else _ABSENT
            yield from differences(stored.get(name, absent), current.get(name, absent), inner)
    else:
        before, after = (
            "absent" if value is _ABSENT else canonical_json(value) for value in (stored, current)
        )
        if before != after:
            yield key, before, after
