"""Training checkpoints on disk: replaced as a whole, checked when read, never code.

A file of ``torch.save`` is a zip archive with a CRC-32 of every record, which ``torch.load`` does
not look at. Here it is, so a file that was damaged or cut short is refused, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from lit_dlm.ops.digests import is_finite

LAST = "last"
"""Stem of the checkpoint that a run goes on from; the one before it is kept."""

_KINDS = {
    "pytorch-lightning_version": str,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
_REQUIRED = ("pytorch-lightning_version", "state_dict", "loops")
_COUNTS = ("ready", "started", "processed", "completed", "is_last_batch")
"""What Lightning's progress counts; further names hold such counts."""
_OF_LOOPS: tuple[tuple[str, str, type], ...] = (
    ("state_dict", "combined_loader", list),
    ("epoch_loop.state_dict", "_batches_that_stepped", int),
)

_DIGESTS = "digests.json"
_PLAN = ".metadata"
"""What torch.distributed.checkpoint reads with an unrestricted pickle."""
_FACTS = {
    "torch": {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    | {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""All that such a file may name."""

logger = logging.getLogger(__name__)


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their target and read with ``weights_only``.

    Lightning itself writes into the system's temporary folder and moves the file, which copies it
    where that is another file system.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes, syncs and renames; a former ``last`` is kept beside the new one.

        Args:
            checkpoint: what the trainer collected.
            path: the file.
            storage_options: none; files are local.
        """
        if storage_options is not None:
            raise TypeError("storage_options: expected none, since checkpoints are local files")
        path = local(path)
        for key, value in checkpoint.get("state_dict", {}).items():
            if not is_finite(value):
                raise ValueError(f"{path}: not written, since {key} is not finite")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        try:
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(draft, path)
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            # torch ends the file that cannot be written, and speaks of that.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{path}: the checkpoint cannot be written ({_reason(cause)})") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint after a look at its checksums.

        Args:
            path: the file. A damaged ``last`` is replaced by the one before it, with a warning.
            map_location: see :func:`torch.load`.
            weights_only: ignored: nothing but tensors and plain values is ever loaded.
        """
        path = sound(local(path))
        if path.is_dir():
            raise ValueError(
                f"{path}: a folder, as ShardedStrategy writes; load it with trainer/fsdp.yaml"
            )
        try:
            found = torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a checkpoint of tensors and plain values ({_reason(error)})"
            ) from error
        require_training(path, found)
        for key, value in found["state_dict"].items():
            if isinstance(value, torch.Tensor) and not is_finite(value):
                raise ValueError(f"{path}: {key} has numbers that are not finite")
        return dict(found)


def local(path: str | Path) -> Path:
    """A path, unless it is an address."""
    if "://" in str(path) or str(path).startswith("registry:"):
        raise ValueError(f"ckpt_path: expected a local file, got {path}; download it first")
    return Path(path)


def last_checkpoint(folders: Iterable[Path]) -> Path | None:
    """What ``--ckpt_path last`` means.

    Args:
        folders: where checkpoint callbacks save.

    Returns:
        The newest file or folder ``last*.ckpt``; one that was replaced only where there is no
        other, as after a kill between the two renames of a save.
    """
    found = [path for folder in folders for path in Path(folder).glob(f"{LAST}*.ckpt")]
    return max(found, key=lambda path: (not _is_former(path), path.stat().st_mtime), default=None)


def draft_of(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.with_name(f".{path.name}-partial")


def put_in_place(draft: Path, path: Path) -> None:
    """Gives a complete checkpoint its name; a former ``last`` becomes ``last-former``.

    Args:
        draft: file or folder beside the target.
        path: the target.
    """
    former = _former(path)
    if path.exists():
        remove(former)
        os.replace(path, former)
    os.replace(draft, path)
    if path.stem != LAST:
        remove(former)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sound(path: Path) -> Path:
    """A checkpoint that is whole: the given one, or for a damaged ``last`` the one before it.

    Args:
        path: file or folder.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    problem = _damage(path)
    if not problem:
        return path
    former = _former(path)
    if path.stem == LAST and former.exists() and not _damage(former):
        rank_zero_only(logger.warning)(
            "%s is damaged (%s); going on from %s, which was saved before it", path, problem, former
        )
        return former
    raise ValueError(f"{path}: the checkpoint is damaged ({problem}); expected another ckpt_path")


def remove(path: Path) -> None:
    """Deletes a checkpoint, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_digests(folder: Path) -> None:
    """Notes the SHA-256 of every file of a checkpoint folder, and syncs them.

    Args:
        folder: a complete checkpoint of ``torch.distributed.checkpoint``.
    """
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor() as pool:
        digests = dict(
            zip((path.name for path in files), pool.map(_synced_digest, files), strict=True)
        )
    with (folder / _DIGESTS).open("w") as file:
        json.dump(digests, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint file or folder, or nothing."""
    try:
        return _folder_damage(path) if path.is_dir() else _file_damage(path)
    # What a damaged header of a zip archive or of a pickle may lead to.
    except (
        zipfile.BadZipFile,
        pickle.PickleError,
        OSError,
        RuntimeError,
        ValueError,
        AttributeError,
        TypeError,
        IndexError,
        KeyError,
        EOFError,
    ) as error:
        return _reason(error)


def _file_damage(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        record = archive.testzip()
    return f"checksum of {record}" if record else ""


def _folder_damage(folder: Path) -> str:
    """Checks the digests, where there are some, and that the plan names nothing that runs."""
    stored = folder / _DIGESTS
    digests = json.loads(stored.read_text()) if stored.exists() else {}
    for name, digest in digests.items():
        if _synced_digest(folder / name) != digest:
            return f"{name} has another digest"
    with (folder / _PLAN).open("rb") as file:
        _PlanReader(file).load()
    return ""


class _PlanReader(pickle.Unpickler):
    """Reads where tensors lie."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _FACTS.get(module, ()):
            raise pickle.UnpicklingError(f"{_PLAN} names {module}.{name}")
        return super().find_class(module, name)


def require_training(path: Path, found: Any, *, without: str = "") -> None:
    """Looks for what Lightning would stumble over, also later, or follow to other files.

    Args:
        path: of the checkpoint.
        found: its content.
        without: a required key that has been taken out.
    """
    problem = _misfit(found, [key for key in _REQUIRED if key != without])
    if problem:
        raise ValueError(f"{path}: expected a checkpoint of Lightning, got {problem}")


def _misfit(found: Any, required: Sequence[str]) -> str:
    if not isinstance(found, dict):
        return f"a {type(found).__name__}"
    for key, kind in _KINDS.items():
        if key not in found and key not in required:
            continue
        value = found.get(key)
        inner = value if kind is list and isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(one, dict) for one in inner):
            return f"{key} = {str(value)[:40]!r}" if key in found else f"no {key}"
    fit_loop = found["loops"].get("fit_loop")
    if not isinstance(fit_loop, dict):
        return "loops without a fit_loop"
    for key, value in fit_loop.items():
        if key.endswith("progress") and not _is_progress(value):
            return f"{key} = {str(value)[:80]!r}"
    for key, name, expected in _OF_LOOPS:
        value = fit_loop.get(key, {}).get(name, expected())
        if not isinstance(value, expected):
            return f"{name} = {str(value)[:80]!r}"
    for key, state in found.get("callbacks", {}).items():
        if key.startswith("ModelCheckpoint") and isinstance(state, dict):
            name = _misfit_of_saver(state)
            if name:
                return f"{name} = {str(state.get(name))[:80]!r} of a ModelCheckpoint"
    return ""


def _is_progress(value: Any) -> bool:
    """Whether all that it counts are numbers from zero."""
    return isinstance(value, dict) and all(
        isinstance(one, int) and one >= 0 if name in _COUNTS else _is_progress(one)
        for name, one in value.items()
    )


def _misfit_of_saver(state: dict[str, Any]) -> str:
    """Which value of its state a ModelCheckpoint cannot have noted, or nothing.

    It deletes files that it saved, by name, so that a name may not lead out of its folder.
    """
    kept = state.get("best_k_models", {})
    if not (
        isinstance(kept, dict) and all(map(_is_own, kept)) and all(map(_is_score, kept.values()))
    ):
        return "best_k_models"
    for name in ("best_model_path", "last_model_path", "kth_best_model_path"):
        if not _is_own(state.get(name, "")):
            return name
    if state.get("kth_best_model_path", "") not in ("", *kept):
        return "kth_best_model_path"
    for name in ("best_model_score", "kth_value"):
        score = state.get(name)
        if score is not None and not _is_score(score):
            return name
    return ""


def _is_own(path: Any) -> bool:
    return isinstance(path, str) and "://" not in path and ".." not in Path(path).parts


def _is_score(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def _former(path: Path) -> Path:
    return path.with_name(f"{path.stem}-former{path.suffix}")


def _is_former(path: Path) -> bool:
    return path.stem.endswith("-former")


def _reason(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0] or type(error).__name__
