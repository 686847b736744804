"""Checkpoints, which must be of the model at hand, and exports as folders that decoding loads.

Checkpoints hold only what was trained, so Lightning loads them without asking for every weight; it
would also drop, without a word, those that the model has no place for.

On disk they are replaced as a whole, checked when read, and never code. A file of ``torch.save`` is
a zip archive with a CRC-32 of every record, which ``torch.load`` does not look at. Here it is, so a
file that was damaged or cut short is refused, whoever wrote it.
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
from transformers import PreTrainedModel

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.backbones.resolution import locate, read_json_object
from lit_dlm.ops.files import is_finite, sync_folder
from lit_dlm.vision.patches import CODEBOOK

logger = logging.getLogger(__name__)

ADAPTERS_KEY = "adapters"
"""Where a checkpoint has the settings of its adapters."""

_WAY_OUT = (
    "expected one of the same model and lora settings; give the backbone the settings of that run, "
    "or load its adapter with backbone.init_args.adapter=RUN_DIR/adapter"
)


def adapter_settings(module: nn.Module, *, trained_only: bool = False) -> dict[str, dict[str, Any]]:
    """Settings of a module's adapters as plain values, by path (``backbone.model.default``).

    Dropout is not among them, as weights of another one fit.
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
    """Refuses a checkpoint of another model.

    Args:
        checkpoint: what Lightning read. Under FSDP2 its ``state_dict`` is absent: the weights are
            loaded by then, and missing ones were refused.
    """
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
        if path not in ours or theirs | ours[path] != theirs:  # older ones say more
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
    """Takes a frozen backbone, which comes from its own files, out of a checkpoint."""
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
"""Files of a tokenizer folder that an export carries along."""


def copy_tokenizer(tokenizer: str, folder: Path) -> None:
    """Puts the files of a tokenizer (folder, embedded name or hub id) beside exported weights."""
    source = locate(tokenizer, weights=False)
    # Copied, not saved again: transformers would add how it was loaded.
    for path in sorted(source.iterdir()):
        if path.name in TOKENIZER_FILES and source.resolve() != folder.resolve():
            shutil.copyfile(path, folder / path.name)


def export_trained(backbone: HFBackbone, tokenizer: str, folder: Path, *, write: bool) -> None:
    """Writes what was trained: the adapter where there is one, else model and tokenizer.

    Args:
        write: whether this process copies the tokenizer. With sharded weights every process must
            call this.
    """
    if backbone.adapter is not None:
        backbone.save_adapter(folder)
        return
    backbone.export(folder)
    if write:
        copy_tokenizer(tokenizer, folder)
        if backbone.new_mask_token is not None:
            _name_mask(folder, backbone.new_mask_token, backbone.spec.mask_id)


def _name_mask(folder: Path, text: str, mask_id: int) -> None:
    """Adds the mask that a model was given to the tokenizer beside it, unless it is there."""
    path = folder / "tokenizer.json"
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.id_to_token(mask_id) is None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        if tokenizer.token_to_id(text) != mask_id:
            logger.warning(
                "%s: the tokenizer gets no %r, as its next id is %s and not that of the mask, %d",
                *(folder, text, tokenizer.token_to_id(text), mask_id),
            )
            return
        tokenizer.save(str(path))
    else:
        _add_to_object(folder / "added_tokens.json", text, mask_id)
    _add_to_object(folder / "tokenizer_config.json", "mask_token", text)


def _add_to_object(path: Path, key: str, value: str | int) -> None:
    content = read_json_object(path) if path.is_file() else {}
    path.write_text(json.dumps({**content, key: value}, indent=2, ensure_ascii=False))


LAST = "last"
"""Stem of the checkpoint that a run goes on from; the one before it is kept."""

_DIGESTS = "digests.json"
_PLAN = ".metadata"
"""What torch.distributed.checkpoint reads with an unrestricted pickle."""
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
"""All that such a file may name, besides torch's dtypes."""

_OF_DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, RuntimeError),
    *(zipfile.BadZipFile, pickle.PickleError),
)
"""What a damaged header of a zip archive or of a pickle may lead to."""


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their target and read with ``weights_only``.

    Lightning itself writes into the system's temporary folder and moves the file, which copies it
    where that is another file system.
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
            # On a full disk torch fails to end the file and speaks of that; the cause is below it.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{path}: the checkpoint cannot be written ({_reason(cause)})") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads nothing but tensors and plain values, whatever ``weights_only`` says.

        A damaged ``last`` is replaced by the one before it, with a warning.
        """
        path = sound(local(path))
        if path.is_dir():
            raise ValueError(
                f"{path}: a folder, as ShardedStrategy writes; load it with trainer/fsdp.yaml"
            )
        try:
            found = torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            told = f"expected a checkpoint of tensors and plain values ({_reason(error)})"
            former = _before(path, told)  # the archive's directory has no checksum
            if former is None:
                raise ValueError(f"{path}: {told}") from error
            return self.load_checkpoint(former, map_location)
        require_training(path, found)
        for key, value in found["state_dict"].items():
            if isinstance(value, torch.Tensor) and not is_finite(value):
                raise ValueError(f"{path}: {key} has numbers that are not finite")
        return dict(found)


def use_own_files(trainer: Trainer) -> None:
    """Has checkpoints written and read by :class:`CheckpointFiles`, if nobody chose other ones."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = CheckpointFiles()


def require_training(path: Path, found: Any) -> None:
    """Refuses what Lightning did not write, and names of files outside of a saver's folder."""
    if not isinstance(found, dict) or not isinstance(found.get("loops"), dict):
        raise ValueError(f"{path}: expected a checkpoint of Lightning, got other content")
    # A saver deletes the files that its state calls worse than the next one.
    for saver in found.get("callbacks", {}).values():
        for name in saver.get("best_k_models", ()) if isinstance(saver, Mapping) else ():
            is_beside = Path(name).resolve().parent == path.resolve().parent
            if "://" in name or (".." in Path(name).parts and not is_beside):
                raise ValueError(f"{path}: best_k_models leads out of its folder, to {name}")


def local(path: str | Path) -> Path:
    """A path, unless it is an address."""
    if "://" in str(path) or str(path).startswith("registry:"):
        raise ValueError(f"ckpt_path: expected a local file, got {path}; download it first")
    return Path(path)


def last_checkpoint(folders: Iterable[Path]) -> Path | None:
    """The newest file or folder ``last*.ckpt``: what ``--ckpt_path last`` means."""
    found = [path for folder in folders for path in Path(folder).glob(f"{LAST}*.ckpt")]
    # One that was replaced counts only after a kill between the two renames of a save.
    return max(
        found,
        key=lambda path: (not path.stem.endswith("-former"), path.stat().st_mtime),
        default=None,
    )


def best_checkpoints(module: LightningModule) -> dict[str, ModelCheckpoint]:
    """By the score that they watched, callbacks of a module's run that have saved something."""
    callbacks = module.trainer.checkpoint_callbacks if module._trainer else []
    return {
        str(callback.monitor): callback
        for callback in callbacks
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path
    }


def draft_of(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
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
    """A checkpoint that is whole: the given one, or for a damaged ``last`` the one before it."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    problem = _damage(path)
    found = _before(path, problem) if problem else path
    if found is not None:
        return found
    raise ValueError(f"{path}: the checkpoint is damaged ({problem}); expected another ckpt_path")


def _before(path: Path, problem: str) -> Path | None:
    """The checkpoint before a damaged ``last``, if there is one that is whole."""
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
    """Notes the SHA-256 of every file of a complete checkpoint folder, and syncs them."""
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_synced_digest, files)
    with (folder / _DIGESTS).open("w") as file:
        json.dump(dict(zip((path.name for path in files), digests, strict=True)), file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint file or folder, or nothing."""
    try:
        if path.is_dir():
            return _folder_damage(path)
        with zipfile.ZipFile(path) as archive:
            # No checksum covers the directory, and torch takes noise for what is called a folder.
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
    """Fails at a plan that names anything that runs; the plan says where tensors lie."""

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
