"""Low-rank adapters in PEFT folders: settings and weights, read and written.

Published adapters load under transformers' names and under LLaDA's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from lit_dlm.backbones.architecture import (
    LLADA_MODULES,
    Architecture,
    KeyLayout,
    key_layout,
    original_key,
    whole_key,
)
from lit_dlm.backbones.location import unpinned
from lit_dlm.backbones.lora import FEED_FORWARD, LoRASettings, adapter_parameters, peft_config
from lit_dlm.backbones.weights import load_weights, plain_tensor, save_weights
from lit_dlm.system.files import fitting, read_json_object, write_json
from lit_dlm.system.options import of_declared_kinds, refuse
from lit_dlm.vision.base import Vision

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
VISION_FILE = "vision.safetensors"
"""Weights of the part that sees pictures, trained beside an adapter, under the family's names."""
_PREFIX = "base_model.model."
_EXPERT_WEIGHTS = ["down_proj", "gate_up_proj"]
"""Tensors that hold the matrices of all experts of a layer."""

# Options that may only be empty or false in a PEFT configuration: our layers do not have them.
_UNSUPPORTED = (
    "fan_in_fan_out", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save",
    "exclude_modules", "rank_pattern", "alpha_pattern", "layer_replication", "layers_pattern",
    "layers_to_transform", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip

_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations that keep the base; others change it, and an adapter belongs to that base."""


def _last_names(paths: Iterable[str]) -> set[str]:
    """Returns the names of modules or parameters that paths such as ``blocks.0.ff_out`` name."""
    return {path.rpartition(".")[2] for path in paths}


def read_adapter_settings(folder: Path) -> LoRASettings:
    """Reads ``adapter_config.json`` of a PEFT folder."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: expected an adapter folder with {CONFIG_FILE}")
    # The file may be a stranger's: anything that our layers do not have is refused by name, as the
    # adapter would otherwise compute something else than where it was trained.
    with fitting(path):
        config = read_json_object(path)
        targets = config.get("target_modules") or []
        experts = _last_names(config.get("target_parameters") or [])
        are_ours = experts == set(_EXPERT_WEIGHTS) and not isinstance(targets, str)
        is_unsupported = {option: bool(config.get(option)) for option in _UNSUPPORTED} | {
            "peft_type": config.get("peft_type", "LORA") != "LORA",
            "bias": config.get("bias", "none") != "none",
            "init_lora_weights": config.get("init_lora_weights") not in _KEEPS_BASE,
            "target_parameters": bool(experts) and not are_ours,
        }
        for option, is_met in is_unsupported.items():
            if is_met:
                raise ValueError(f"{path}: option {option}={config[option]!r} is not supported")
        if not isinstance(targets, str):  # a pattern stays one, and LoRASettings refuses it
            feed_forward = FEED_FORWARD if experts else set()
            targets = sorted(_last_names(targets) | feed_forward)
        settings = LoRASettings(
            rank=config.get("r", 8),  # peft's defaults, here and below
            alpha=config.get("lora_alpha", 8),
            dropout=config.get("lora_dropout", 0.0),
            targets=targets,
            rslora=bool(config.get("use_rslora", False)),
        )
        of_declared_kinds(settings)
    return settings


def settings_for(folder: Path, architecture: Architecture, *, base: str | None) -> LoRASettings:
    """Returns the settings of an adapter, which must be one of the model ``base``."""
    settings, weights = read_adapter_settings(folder), folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{folder}: expected {weights.name} (pickled weights are not read)")
    # Each layer has at least one matrix, with a side of the hidden size. Injecting an adapter of a
    # rank that its file cannot have would ask for memory without end.
    smallest = settings.rank * architecture.num_layers * architecture.hidden_size
    if smallest > weights.stat().st_size:
        refuse(str(folder / CONFIG_FILE), f"the rank r of {weights.name}", settings.rank)
    if trained_on := _differing_base(folder, base):
        message = (
            f"adapter: {folder} was trained on {trained_on}, expected one of {base} "
            "(base_model_name_or_path in its adapter_config.json)"
        )
        # A folder whose model may have been called so before is only suspicious.
        if Path(trained_on).is_dir() or not Path(str(base)).is_dir():
            raise ValueError(message)
        logger.warning("%s; the folder may be a copy of it", message)
    return settings


def _differing_base(folder: Path, base: str | None) -> str | None:
    """Returns the model that an adapter was trained on, if it is not ``base``.

    A model may have moved, such as a local copy from a hub: unless both are folders here, only the
    last part of the name counts. ``None`` if they are the same or one of them is not known.
    """
    trained_on = read_json_object(folder / CONFIG_FILE).get("base_model_name_or_path")
    if not trained_on or base is None:
        return None
    one, other = Path(unpinned(str(trained_on))), Path(unpinned(base))
    are_here = one.is_dir() and other.is_dir()
    is_same = one.resolve() == other.resolve() if are_here else one.name == other.name
    return None if is_same else str(trained_on)


@dataclass(frozen=True)
class AdapterFiles:
    """The files that an adapter was read from; none of them for a new one."""

    paths: tuple[Path, ...] = ()
    vision_keys: frozenset[str] = frozenset()
    """Weights of the part that sees pictures which came with the adapter."""


def read_adapter(
    folder: Path, model: nn.Module, vision: Vision | None, *, family: str
) -> AdapterFiles:
    """Reads the weights of a PEFT folder into an adapter that the decoder has already.

    Its keys may be transformers' or those of the family's own code.
    """
    path, layout = folder / WEIGHTS_FILE, key_layout(family)
    # Files name the same matrix by transformers' path or by the family's own.
    wanted = dict(adapter_parameters(model))
    ours: dict[str | None, str] = {}
    for name in wanted:
        ours |= {name: name, original_key(name, layout): name}
    load_weights(
        [path], wanted, rename=lambda key: ours.get(whole_key(key.removeprefix(_PREFIX)), key)
    )
    beside = folder / VISION_FILE
    if not beside.is_file():
        return AdapterFiles((path,))
    if vision is None:
        raise ValueError(f"{beside}: expected HFBackbone.vision, a part of which it holds")
    weights = vision.stored_weights()
    load_weights([beside], weights, rename=str, optional=frozenset(weights))
    with safe_open(beside, framework="pt") as stored:
        return AdapterFiles((path, beside), frozenset(stored.keys()))


def adapter_tensors(model: nn.Module, *, layout: KeyLayout) -> dict[str, Tensor]:
    """Returns the policy's adapter as PEFT stores it; if sharded, all processes must call this."""
    return {
        _PREFIX + original_key(name, layout): plain_tensor(parameter)
        for name, parameter in adapter_parameters(model)
    }


def write_adapter(
    tensors: Mapping[str, Tensor],
    settings: LoRASettings,
    folder: Path,
    *,
    layout: KeyLayout,
    task: str,
    base_name: str | None,
) -> None:
    """Writes the result of :func:`adapter_tensors` as a PEFT folder."""
    targets = settings.modules()
    if layout == "llada":
        names = {target: own for own, target in LLADA_MODULES.items()}
        # By their paths: the bare name ff_out would also match the head.
        paths = {key.partition(".lora_")[0].partition("transformer.")[2] for key in tensors}
        targets = sorted(paths if "down_proj" in targets else {names[one] for one in targets})
    parts = {key.removeprefix(_PREFIX).partition(".lora_")[0] for key in tensors}
    experts = {part.removesuffix(".base_layer") for part in parts if ".experts" in part}
    if experts:
        # peft names experts by parameters and not by modules.
        targets, _ = settings.beside_experts()
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(tensors, folder / WEIGHTS_FILE)
    config = peft_config(
        settings,
        target_modules=targets,
        target_parameters=sorted(f"{one}.{name}" for one in experts for name in _EXPERT_WEIGHTS),
        task_type=task,
        base_model_name_or_path=base_name and unpinned(base_name),
        inference_mode=True,
    ).to_dict()
    # As peft's own writer, which would follow a link.
    plain = {key: sorted(one) if isinstance(one, set) else one for key, one in config.items()}
    write_json(folder / CONFIG_FILE, plain, sort_keys=True)
