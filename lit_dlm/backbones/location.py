"""Where a model is (an embedded name, a folder or a hub id), and its weight files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import DryRunFileInfo, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lit_dlm.system.files import fitting, read_json_object

ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""Folder of the embedded models."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
INDEX_FILE = "model.safetensors.index.json"
_DESCRIPTION_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def embedded_names() -> list[str]:
    """Names of the models that ship with the package, sorted."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def locate(path_or_id: str, *, weights: bool = True) -> Path:
    """Finds the folder of an embedded name (``tiny``), a local folder or a hub id ``owner/name``.

    A hub id may end in ``@revision``; an existing folder wins over it. Only a hub id may use the
    network, for the weights only if they are wanted.
    """
    # Embedded names first, so that a folder in the working directory does not change what they
    # mean.
    if path_or_id in embedded_names():
        return ASSETS / path_or_id
    folder = Path(path_or_id).expanduser()
    if path_or_id.strip() and folder.is_dir():
        return folder
    if not is_hub_id(path_or_id):
        raise ValueError(
            f"path: {path_or_id!r} is neither an existing folder nor an embedded model "
            f"({', '.join(embedded_names()) or 'none is installed'}) nor a hub id 'owner/name'"
        )
    return Path(_snapshot(path_or_id, allow_patterns=_patterns(weights)))


def _snapshot(hub_id: str, **options: Any) -> Any:
    repo, _, revision = hub_id.partition("@")
    try:
        return snapshot_download(repo, revision=revision or None, **options)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(
            f"{hub_id!r} is no existing folder, and the hub did not deliver it: {reason}"
        ) from error


def is_hub_id(path_or_id: str) -> bool:
    """Whether a name is ``owner/name``, optionally with ``@revision``, and not a local path.

    If a folder ``runs`` exists, ``runs/model`` counts as a mistyped path.
    """
    # A mistyped local path must not be sent to the hub.
    has_form = _HUB_ID.fullmatch(path_or_id) is not None
    return has_form and not Path(path_or_id).expanduser().parent.is_dir()


def unpinned(path_or_id: str) -> str:
    """Returns the name without the ``@revision`` of a hub id."""
    return path_or_id.partition("@")[0] if is_hub_id(path_or_id) else path_or_id


def is_local(path_or_id: str) -> bool:
    """Whether :func:`locate` finds a model without the hub."""
    return path_or_id in embedded_names() or Path(path_or_id).expanduser().exists()


def hub_files(
    hub_id: str, *, weights: bool = True, repo_type: Literal["model", "dataset"] = "model"
) -> list[DryRunFileInfo]:
    """Returns name and size of each file that the hub would deliver, and whether it is cached."""
    patterns = _patterns(weights) if repo_type == "model" else None
    return list(_snapshot(hub_id, repo_type=repo_type, allow_patterns=patterns, dry_run=True))


def in_hub_cache(hub_id: str, *, weights: bool = True) -> bool:
    """Whether a hub model is in the cache, with its weights if wanted; uses no network."""
    try:
        folder = Path(_snapshot(hub_id, local_files_only=True))
        if weights and (folder / INDEX_FILE).is_file():
            weight_files(folder)
    except ValueError:
        return False
    # An adapter's file has another name.
    return not weights or any(path.is_file() for path in folder.glob("*.safetensors"))


def _patterns(weights: bool) -> list[str]:
    return [*_DESCRIPTION_FILES, *(["*.safetensors"] if weights else [])]


def weight_files(folder: Path) -> list[Path]:
    """Returns a model folder's safetensors files: those that an index names, else the only one."""
    path = folder / INDEX_FILE
    if path.is_file():
        with fitting(path):
            names = sorted(set(read_json_object(path)["weight_map"].values()))
            for name in names:
                if Path(name).name != name or not (folder / name).is_file():
                    raise ValueError(f"{path}: expected names of files beside it, got {name!r}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"{folder}: expected {single.name} or {INDEX_FILE} (pickled weights are not read)"
        )
    return [single]
