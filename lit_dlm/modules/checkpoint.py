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

from lightning.pytorch import LightningModule
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedModel

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.location import locate, read_json_object
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.vision.patches import CODEBOOK

logger = logging.getLogger(__name__)

ADAPTERS_KEY = "adapters"
"""Where a checkpoint has the settings of its adapters."""

_NUM_NAMED = 2
_WAY_OUT = (
    "expected one of the same model and lora settings; give the backbone the settings of that run, "
    "or load its adapter with backbone.init_args.adapter=RUN_DIR/adapter"
)


def trained_adapters(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Settings of the adapters that a module trains.

    Args:
        module: with decoders anywhere in it.

    Returns:
        By path, such as ``backbone.model.default``, as plain values: ``rank``, ``alpha``,
        ``rslora``, ``targets`` and ``layers`` (all of them where none are chosen).
    """
    return {
        path: settings for path, (settings, is_trained) in _adapters(module).items() if is_trained
    }


def require_own_checkpoint(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model.

    Args:
        module: the LightningModule.
        checkpoint: what Lightning read. Its ``state_dict`` is absent under FSDP2, which has loaded
            the weights by then and refuses missing ones itself; settings of adapters are absent
            from checkpoints of old.
    """
    trainer = module.trainer if isinstance(module, LightningModule) and module._trainer else None
    if "state_dict" in checkpoint:
        goes_on = trainer is not None and trainer.state.fn == "fit"
        if goes_on and not {"optimizer_states", "lr_schedulers"} <= checkpoint.keys():
            raise ValueError(
                "ckpt_path: the checkpoint has weights only, so training cannot go on from it; "
                "expected one with the state of the optimiser"
            )
        found = set(checkpoint["state_dict"])
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        places = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        places |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        wrong = [
            f"{kind} {len(names)} weights, such as {', '.join(sorted(names)[:_NUM_NAMED])}"
            for kind, names in (
                ("lacks", trained - found),
                ("has no use here for", found - places),
            )
            if names
        ]
        if wrong:
            raise ValueError(f"ckpt_path: the checkpoint {' and '.join(wrong)}; {_WAY_OUT}")
    if ADAPTERS_KEY not in checkpoint:
        return
    ours = {path: settings for path, (settings, _) in _adapters(module).items()}
    for path, theirs in checkpoint[ADAPTERS_KEY].items():
        if theirs != ours.get(path):
            raise ValueError(
                f"ckpt_path: the checkpoint's adapter {path} has {theirs}, "
                f"this model's {ours.get(path, 'none')}; {_WAY_OUT}"
            )


def _adapters(module: nn.Module) -> dict[str, tuple[dict[str, Any], bool]]:
    """Settings of every adapter by path, and whether it is trained."""
    return {
        f"{path}.{name}": (
            _settings(config, part),
            any(value.requires_grad for _, value in adapter_parameters(part, name)),
        )
        for path, part in module.named_modules()
        if isinstance(part, PreTrainedModel)
        for name, config in getattr(part, "peft_config", {}).items()
    }


def _settings(config: Any, model: PreTrainedModel) -> dict[str, Any]:
    """What peft's configuration says; its dropout is no part of the weights."""
    layers = config.layers_to_transform
    return {
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "rslora": bool(config.use_rslora),
        "targets": sorted(config.target_modules),
        "layers": sorted(range(model.config.num_hidden_layers) if layers is None else layers),
    }


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
    """Puts a tokenizer's files beside exported weights.

    Copied, not saved again: transformers would add how it was loaded.

    Args:
        tokenizer: folder, embedded name or hub id.
        folder: target, which exists.
    """
    source = locate(tokenizer, weights=False)
    for path in sorted(source.iterdir()):
        if path.name in TOKENIZER_FILES and source.resolve() != folder.resolve():
            shutil.copyfile(path, folder / path.name)


def export_trained(backbone: HFBackbone, tokenizer: str, folder: Path, *, write: bool) -> None:
    """Writes what was trained: the adapter where there is one, else the whole model.

    Args:
        backbone: the model. With sharded weights every process must call this.
        tokenizer: folder, embedded name or hub id of the tokenizer, which goes with whole models.
        folder: created when absent.
        write: whether this process copies the tokenizer.
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
