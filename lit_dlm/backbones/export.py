"""Writes what was trained: a checkpoint that this project and others load, or a PEFT folder.

Both have a layout: ``hf`` names everything as transformers does, ``original`` as the family's own
code does. With sharded weights every process must call a function of this file, since gathering
them takes all; the first one writes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.adapter_files import VISION_FILE, adapter_tensors, write_adapter
from lit_dlm.backbones.architecture import FAMILIES, HEAD_KEY, KeyLayout, key_layout, original_key
from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.backbones.experts import Piece, expert_biases, pieces
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.loading import DType, torch_dtype
from lit_dlm.backbones.location import is_local, locate
from lit_dlm.backbones.lora import base_parameters_adapted, merged
from lit_dlm.backbones.resolution import EXPORT_KEY, RELEASE_KEY
from lit_dlm.backbones.weights import plain_tensor, save_checkpoint, save_weights
from lit_dlm.system.files import copy_file, write_json
from lit_dlm.system.options import refuse

ExportLayout = Literal["hf", "original"]


def own_layout(backbone: HFBackbone) -> ExportLayout:
    """``original`` for a model from the files of a family with code of its own, else ``hf``."""
    return "hf" if backbone.source.config is None else "original"


def save_adapter(
    backbone: HFBackbone, folder: str | Path, *, layout: ExportLayout | None = None
) -> None:
    """Writes the adapter as a PEFT folder, and beside it the trained weights of ``vision``.

    These include weights that were read with the adapter. ``layout`` is ``hf`` for an adapter on
    what :func:`export_model` writes, or ``original`` for one on the family's own code; the default
    is the layout of the files that this model came from. Loading reads both.
    """
    assert backbone.adapter is not None
    is_original = layout == "original" or (layout is None and backbone.source.is_release)
    names = _names(backbone, "original" if is_original else "hf")
    # Gathered before any process returns: sharded weights need all of them.
    tensors = adapter_tensors(backbone.model, layout=names)
    trained = {
        key: plain_tensor(parameter)
        for key, parameter in backbone.vision_weights().items()
        if parameter.requires_grad or key in backbone.adapter_files.vision_keys
    }
    if not _is_first_process():
        return
    family = FAMILIES.get(backbone.spec.family)
    write_adapter(
        tensors,
        backbone.adapter,
        Path(folder),
        layout=names,
        task=family.peft_task if family and is_original else "CAUSAL_LM",
        base_name=backbone.source.name,
    )
    if trained:
        save_weights(trained, Path(folder) / VISION_FILE)


def export_model(
    backbone: HFBackbone,
    folder: str | Path,
    *,
    layout: ExportLayout | None = None,
    dtype: DType | None = None,
) -> None:
    """Writes ``config.json`` and the weights, with the adapter merged into them.

    Equal weights give equal bytes; large models become shards with an index. A family's own code is
    copied from a local folder, or named if it is on the hub. Tokenizer files are not written: copy
    them, too.

    Args:
        backbone: the model.
        folder: created when absent; files of the same name are replaced.
        layout: ``hf``: a transformers checkpoint without ``vision``, from which a backbone reads
            its whole specification. ``original``: names and configuration of the family's own code;
            the default with a vision tower, which is part of it.
        dtype: of the stored weights; ``None`` keeps the current one.
    """
    if backbone.is_4bit:
        raise ValueError("export: expected a model without load_in_4bit, which loses digits")
    folder, vision_weights = Path(folder), backbone.vision_weights()
    layout = layout or ("original" if vision_weights else "hf")
    stored = backbone.dtype if dtype is None else torch_dtype(dtype)
    config = _exported_config(backbone, layout, has_tower=bool(vision_weights))
    # One spelling for new and old readers alike.
    config.pop("torch_dtype", None)
    config["dtype"] = str(stored).removeprefix("torch.")
    weights = base_parameters_adapted(backbone.model)
    if backbone.architecture.tie_embeddings:
        del weights[HEAD_KEY]
    names = _names(backbone, layout)
    shapes = {key: tuple(value.shape) for key, (value, _) in weights.items()}
    parts = pieces(shapes, lambda key: original_key(key, names))
    if layout == "original":
        weights |= {key: (parameter, None) for key, parameter in vision_weights.items()}
        parts |= pieces({key: tuple(value.shape) for key, value in vision_weights.items()}, str)
    # Routers compare biases whose differences half precision would round away.
    dtypes = {key: bias.dtype for key, bias in expert_biases(backbone.model).items()}

    @lru_cache(1)  # the matrices of a layer's experts lie in one tensor, and are read one by one
    def whole(key: str) -> Tensor:
        parameter, layer = weights[key]
        tensor = plain_tensor(parameter)
        if layer is not None:
            tensor = merged(tensor, layer)
        return tensor.to(device="cpu", dtype=dtypes.get(key, stored))

    def read(key: str) -> Tensor:
        tensors = [part.of(whole(part.key)) for part in parts[key]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def num_bytes(part: Piece) -> int:
        return math.prod(part.shape) * dtypes.get(part.key, stored).itemsize

    # Sizes are known before any weight is read, so that only one shard at a time is in memory.
    sizes = {key: sum(map(num_bytes, of_key)) for key, of_key in parts.items()}
    with torch.no_grad():
        save_checkpoint(sizes, read, folder, write=_is_first_process())
    if _is_first_process():
        # After the weights: a folder without a configuration does not load.
        write_json(folder / "config.json", config, sort_keys=True)
        _copy_code(backbone, folder)


def _copy_code(backbone: HFBackbone, folder: Path) -> None:
    """Copies a family's own code from a local folder; for one on the hub the configuration does."""
    if backbone.source.config is None or not is_local(str(backbone.source.name)):
        return
    source = locate(str(backbone.source.name))
    if source.resolve() != folder.resolve():
        for path in source.glob("*.py"):
            copy_file(path, folder)


def _exported_config(
    backbone: HFBackbone, layout: ExportLayout, *, has_tower: bool
) -> dict[str, Any]:
    """Returns what :func:`export_model` writes as ``config.json``, except the dtype."""
    spec, release = backbone.spec, backbone.source.config
    if layout == "hf":
        config = backbone.architecture.config_fields()
        config[EXPORT_KEY] = backbone.architecture.spec_fields()
        if release is not None:
            config[RELEASE_KEY] = dict(release)
        return config
    if release is None:
        wanted = "'hf' for a model that came from no family's own files"
        refuse("layout", wanted, repr(layout))
    config = dict(release)
    if spec.mask_id != UNKNOWN_ID:
        config["mask_token_id"] = spec.mask_id
    if spec.attention == "block":
        config[FAMILIES[spec.family].block[0]] = spec.block_size
    if not has_tower:
        config.pop("mm_vision_tower", None)  # the tower is not in the files
    return config


def _names(backbone: HFBackbone, layout: ExportLayout) -> KeyLayout:
    return key_layout(backbone.spec.family) if layout == "original" else "hf"


def _is_first_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
