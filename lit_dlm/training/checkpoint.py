"""Checkpoints, which must match the model, and exports as folders that decoding loads.

Checkpoints hold only what was trained, so Lightning loads them non-strictly. It would then silently
drop weights that the model has no place for; here they are refused.

On disk, checkpoints are replaced as a whole, checked when read, and never contain code. A file of
``torch.save`` is a zip archive with a CRC-32 of every record, which ``torch.load`` does not verify.
It is verified here, so a damaged or truncated file is refused, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lit_dlm.backbones.export import export_model, save_adapter
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.config.saved import LAST
from lit_dlm.system.files import (
    copy_file,
    is_finite,
    own_file,
    read_json_object,
    require_finite,
    sync_folder,
    write_atomically,
)
from lit_dlm.vision.patches import CODEBOOK

logger = logging.getLogger(__name__)

ADAPTERS_KEY = "adapters"  # key of a checkpoint that holds the settings of its adapters

_WAY_OUT = (
    "expected one of the same model and lora settings; give the backbone the settings of that run, "
    "or load its adapter with backbone.init_args.adapter=RUN_DIR/adapter"
)


def adapter_settings(module: nn.Module, *, trained_only: bool = False) -> dict[str, dict[str, Any]]:
    """Returns a module's adapter settings as plain values, by path (``backbone.model.default``).

    Dropout is left out, since weights that were trained with another dropout fit as well.
    """
    found = {}
    for path, part in module.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        for name, config in getattr(part, "peft_config", {}).items():
            weights = adapter_parameters(part, name)
            if trained_only and not any(value.requires_grad for _, value in weights):
                continue
            found[f"{path}.{name}"] = {
                "rank": config.r,
                "alpha": float(config.lora_alpha),
                "rslora": bool(config.use_rslora),
                "targets": sorted(config.target_modules),
            }
    return found


def require_own_checkpoint(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model."""
    # Under FSDP2 the weights are already loaded, and missing ones were refused.
    if "state_dict" in checkpoint:
        found = set(checkpoint["state_dict"])
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        # A tied head is the embedding under a second name.
        places = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        places |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        _require_none("lacks", trained - found)
        _require_none("has no use here for", found - places)
    ours = adapter_settings(module)
    for path, theirs in checkpoint.get(ADAPTERS_KEY, {}).items():
        if path not in ours or theirs | ours[path] != theirs:  # older ones hold more
            raise ValueError(
                f"ckpt_path: the checkpoint's adapter {path} has {theirs}, "
                f"this model's {ours.get(path, 'none')}; {_WAY_OUT}"
            )


def _require_none(kind: str, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"ckpt_path: the checkpoint {kind} {len(names)} weights, such as {min(names)}; "
            f"{_WAY_OUT}"
        )


def drop_backbone(checkpoint: Mapping[str, Any]) -> None:
    """Removes a frozen backbone, which is loaded from its own files, from a checkpoint."""
    state = checkpoint["state_dict"]
    for key in [key for key in state if key.startswith("backbone.")]:
        del state[key]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CODEBOOK,
)
"""Files of a tokenizer folder that an export copies."""


def copy_tokenizer(tokenizer: str, folder: Path) -> None:
    """Copies the files of a tokenizer (folder, embedded name or hub id) beside exported weights."""
    source = locate(tokenizer, weights=False)
    # Copied, because transformers would add how the tokenizer was loaded if it saved the files.
    for path in sorted(source.iterdir()):
        if path.name in TOKENIZER_FILES and source.resolve() != folder.resolve():
            copy_file(path, folder)


def export_trained(backbone: HFBackbone, tokenizer: str, folder: Path, *, write: bool) -> None:
    """Writes what was trained: the adapter if there is one, otherwise model and tokenizer.

    Every process must call it, and one of them copies the tokenizer (``write``).
    """
    if backbone.adapter is not None:
        save_adapter(backbone, folder)
        return
    for part in backbone.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a validation leaves outer weights gathered, perhaps in bfloat16
    export_model(backbone, folder)
    if write:
        copy_tokenizer(tokenizer, folder)
        if backbone.source.mask_token is not None:
            _name_mask(folder, backbone.source.mask_token, backbone.spec.mask_id)


def _name_mask(folder: Path, text: str, mask_id: int) -> None:
    """Adds a model's new mask token to the exported tokenizer, unless it is already there."""
    path = folder / "tokenizer.json"
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(own_file(path)))
        if tokenizer.id_to_token(mask_id) is None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        if tokenizer.token_to_id(text) != mask_id:
            logger.warning(
                "%s: the tokenizer gets no %r, as its next id is %s and not that of the mask, %d",
                *(folder, text, tokenizer.token_to_id(text), mask_id),
            )
            return
        write_atomically(path, tokenizer.to_str(pretty=True))
    else:
        _add_to_object(folder / "added_tokens.json", text, mask_id)
    _add_to_object(folder / "tokenizer_config.json", "mask_token", text)


def _add_to_object(path: Path, key: str, value: str | int) -> None:
    content = read_json_object(own_file(path)) if path.is_file() else {}
    write_atomically(path, json.dumps({**content, key: value}, indent=2, ensure_ascii=False))


_DIGESTS = "digests.json"
_PLAN = ".metadata"
"""The file that torch.distributed.checkpoint reads with an unrestricted unpickler."""
_PLAN_NAMES = {
    "torch": {"Size"},
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
    "pathlib._local": {"PosixPath"},  # as Python 3.13 names it
    "collections": {"OrderedDict"},
}
"""All names that such a file may contain, besides torch's dtypes."""

_OF_DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, RuntimeError),
    *(zipfile.BadZipFile, pickle.PickleError),
)
"""Errors that a damaged header of a zip archive or of a pickle may cause."""


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their target and read with ``weights_only``.

    Lightning itself writes to the system's temporary folder and moves the file, which means a copy
    if that folder is on another file system.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        path = local(path)
        for key, value in checkpoint.get("state_dict", {}).items():
            if not is_finite(value):
                raise ValueError(f"{path}: not written, since {key} is not finite")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        draft.unlink(missing_ok=True)  # it may be a link to elsewhere
        try:
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(draft, path)
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            # On a full disk torch reports that it cannot finish the file; its context is the cause.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{path}: the checkpoint cannot be written ({_reason(cause)})") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads nothing but tensors and plain values, whatever ``weights_only`` says.

        If ``last`` is damaged, the checkpoint before it is read instead, with a warning.
        """
        path = sound(local(path))
        if path.is_dir():
            raise ValueError(
                f"{path}: a folder, as ShardedStrategy writes; load it with trainer/fsdp.yaml"
            )
        try:
            found = torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            message = f"expected a checkpoint of tensors and plain values ({_reason(error)})"
            # Damage to the archive's directory, which has no checksum, may show only here.
            former = _before(path, message)
            if former is None:
                raise ValueError(f"{path}: {message}") from error
            return self.load_checkpoint(former, map_location)
        require_training(path, found)
        weights = {k: v for k, v in found["state_dict"].items() if isinstance(v, torch.Tensor)}
        require_finite(path, weights)
        return dict(found)


def use_own_files(trainer: Trainer) -> None:
    """Makes a trainer use :class:`CheckpointFiles`, unless it was given another plugin."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = CheckpointFiles()


def require_training(path: Path, found: Any) -> None:
    """Refuses content that Lightning did not write, and file names that lead out of its folder."""
    if not isinstance(found, dict) or not isinstance(found.get("loops"), dict):
        raise ValueError(f"{path}: expected a checkpoint of Lightning, got other content")
    # ModelCheckpoint deletes the files that its state names, once better ones are saved.
    for saver in found.get("callbacks", {}).values():
        for name in saver.get("best_k_models", ()) if isinstance(saver, Mapping) else ():
            is_beside = Path(name).resolve().parent == path.resolve().parent
            if "://" in name or (".." in Path(name).parts and not is_beside):
                raise ValueError(f"{path}: best_k_models leads out of its folder, to {name}")


def local(path: str | Path) -> Path:
    """Returns the path of a local file; refuses URLs."""
    if "://" in str(path) or str(path).startswith("registry:"):
        raise ValueError(f"ckpt_path: expected a local file, got {path}; download it first")
    return Path(path)


def last_checkpoint(folders: Iterable[Path]) -> Path | None:
    """Returns the newest file or folder ``last*.ckpt``, which ``--ckpt_path last`` loads."""
    found = [path for folder in folders for path in Path(folder).glob(f"{LAST}*.ckpt")]
    # A former one counts only if no other exists: a save was killed between its two renames.
    return max(
        found,
        key=lambda path: (not path.stem.endswith("-former"), path.stat().st_mtime),
        default=None,
    )


def best_checkpoints(module: LightningModule) -> dict[str, ModelCheckpoint]:
    """Returns the checkpoint callbacks that have saved something, by the score they monitor."""
    callbacks = module.trainer.checkpoint_callbacks if module._trainer else []
    return {
        str(callback.monitor): callback
        for callback in callbacks
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path
    }


def draft_of(path: Path) -> Path:
    """Returns the path where a checkpoint is written before it gets its name."""
    return path.with_name(f".{path.name}-partial")


def put_in_place(draft: Path, path: Path) -> None:
    """Gives a complete checkpoint its name; a former ``last`` becomes ``last-former``."""
    former = _former(path)
    if path.exists():
        # A folder cannot be renamed onto another one, so there are two renames.
        remove(former)
        os.replace(path, former)
    os.replace(draft, path)
    if path.stem != LAST:
        remove(former)
    sync_folder(path.parent)


def sound(path: Path) -> Path:
    """Returns an undamaged checkpoint: the given one, or the one before a damaged ``last``."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    problem = _damage(path)
    found = _before(path, problem) if problem else path
    if found is not None:
        return found
    raise ValueError(f"{path}: the checkpoint is damaged ({problem}); expected another ckpt_path")


def _before(path: Path, problem: str) -> Path | None:
    """Returns the checkpoint before a damaged ``last``, if it exists and is undamaged."""
    former = _former(path)
    if path.stem != LAST or not former.exists() or _damage(former):
        return None
    rank_zero_only(logger.warning)(
        "%s is damaged (%s); going on from %s, which was saved before it", path, problem, former
    )
    return former


def remove(path: Path) -> None:
    """Deletes a checkpoint, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_digests(folder: Path) -> None:
    """Stores the SHA-256 of every file of a complete checkpoint folder, and syncs all files."""
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_synced_digest, files)
    with (folder / _DIGESTS).open("w") as file:
        json.dump(dict(zip((path.name for path in files), digests, strict=True)), file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _damage(path: Path) -> str:
    """Returns what is wrong with a checkpoint file or folder; empty if nothing is."""
    try:
        if path.is_dir():
            return _folder_damage(path)
        with zipfile.ZipFile(path) as archive:
            # No checksum covers the directory, and torch reads noise for entries marked as folders.
            strange = [x for x in archive.infolist() if x.compress_type or x.external_attr]
            if strange:
                return f"directory entry of {strange[0].filename}"
            record = archive.testzip()
        return f"checksum of {record}" if record else ""
    except _OF_DAMAGE as error:
        return _reason(error)


def _folder_damage(folder: Path) -> str:
    stored = folder / _DIGESTS
    digests = json.loads(stored.read_text()) if stored.exists() else {}
    for name, digest in digests.items():
        if _synced_digest(folder / name) != digest:
            return f"{name} has another digest"
    with (folder / _PLAN).open("rb") as file:
        _PlanReader(file).load()
    return ""


class _PlanReader(pickle.Unpickler):
    """Reads a plan, which says where tensors lie; fails if it names anything that could run."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in _PLAN_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{_PLAN} names {module}.{name}")
        return super().find_class(module, name)


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def _former(path: Path) -> Path:
    return path.with_name(f"{path.stem}-former{path.suffix}")


def _reason(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0] or type(error).__name__
