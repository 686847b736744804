"""Finds a model and its tokenizer: bundled, local folder, or hub id."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import DryRunFileInfo, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""Folder of the embedded models."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_DESCRIPTION_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def embedded_names() -> list[str]:
    """Names of the models that ship with the package, sorted."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def locate(path_or_id: str, *, weights: bool = True) -> Path:
    """Finds the folder of a model; only a hub id may use the network.

    Args:
        path_or_id: an embedded name (``tiny``), a local folder, or a hub id ``owner/name``,
            optionally with ``@revision``. An existing folder wins over a hub id.
        weights: whether a hub download includes the weights.
    """
    if path_or_id in embedded_names():
        return ASSETS / path_or_id
    folder = Path(path_or_id).expanduser()
    if path_or_id.strip() and folder.is_dir():
        return folder
    match = _HUB_ID.fullmatch(path_or_id)
    # ``runs/model`` beside an existing ``runs`` is a mistyped folder, not a hub id.
    if match is None or folder.parent.is_dir():
        raise ValueError(
            f"path: {path_or_id!r} is neither an existing folder nor an embedded model "
            f"({', '.join(embedded_names()) or 'none is installed'}) nor a hub id 'owner/name'"
        )
    return Path(_snapshot(path_or_id, allow_patterns=_patterns(weights)))


def _snapshot(hub_id: str, **options: Any) -> Any:
    """What of a hub id ``owner/name``, optionally with ``@revision``, the hub delivers."""
    repo, _, revision = hub_id.partition("@")
    try:
        return snapshot_download(repo, revision=revision or None, **options)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(
            f"{hub_id!r} is no existing folder, and the hub did not deliver it: {reason}"
        ) from error


def is_local(path_or_id: str) -> bool:
    """Whether :func:`locate` finds a model without the hub."""
    return path_or_id in embedded_names() or Path(path_or_id).expanduser().exists()


def hub_files(
    hub_id: str, *, weights: bool = True, repo_type: Literal["model", "dataset"] = "model"
) -> list[DryRunFileInfo]:
    """Names and sizes of what would be fetched from the hub, and whether it is here already."""
    patterns = _patterns(weights) if repo_type == "model" else None
    return list(_snapshot(hub_id, repo_type=repo_type, allow_patterns=patterns, dry_run=True))


def in_hub_cache(hub_id: str, *, weights: bool = True) -> bool:
    """Whether a model of the hub is in the cache, with its weights if wanted; asks no network."""
    try:
        folder = _snapshot(hub_id, local_files_only=True)
    except ValueError:
        return False
    return not weights or any(Path(folder).glob("*.safetensors"))


def _patterns(weights: bool) -> list[str]:
    return [*_DESCRIPTION_FILES, *(["*.safetensors"] if weights else [])]


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads one of a model's description files."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: expected a JSON object ({error})") from error


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that lies beside a model.

    Custom tokenizer classes named in a checkpoint (Dream, LLaDA) are not needed: a
    ``tokenizer.json`` says everything, and ``vocab.json`` with ``merges.txt`` is the Qwen2 kind.
    """
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # costs seconds

    folder = locate(path_or_id, weights=False)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    raise ValueError(
        f"{path_or_id}: expected tokenizer.json, or vocab.json with merges.txt, in {folder}"
    )
