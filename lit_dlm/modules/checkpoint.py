"""Checkpoints, which must be of the model at hand, and exports as folders that decoding loads.

Checkpoints hold only what was trained, so Lightning loads them without asking for every weight; it
would also drop, without a word, those that the model has no place for.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedModel

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.location import locate, read_json_object
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.backbones.patches import CODEBOOK

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
            layers = config.layers_to_transform
            if layers is None:
                layers = range(part.config.num_hidden_layers)
            found[f"{path}.{name}"] = {
                "rank": config.r,
                "alpha": float(config.lora_alpha),
                "rslora": bool(config.use_rslora),
                "targets": sorted(config.target_modules),
                "layers": sorted(layers),
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
        if theirs != ours.get(path):
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
