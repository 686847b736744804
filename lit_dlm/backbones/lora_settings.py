"""What a low-rank adapter is, and what its folder says; nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dlm.backbones.families import LLADA_MODULES
from lit_dlm.backbones.location import read_json_object

CONFIG_FILE = "adapter_config.json"

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_GROUPS = {"attn": _ATTENTION, "all": (*_ATTENTION, *_FEED_FORWARD), "all-linear": None}

# What a PEFT configuration may say besides rank, alpha, dropout, targets and layers.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False, {}),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "exclude_modules": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "layers_pattern": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
}


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Shape of a low-rank adapter: each target gets ``W x + (alpha / rank) B A x``."""

    rank: int = 16
    """Rows of ``A``."""
    alpha: float = 16.0
    """Numerator of the scale, above 0."""
    dropout: float = 0.0
    """Dropout on the input of ``A``. Keep 0 where probabilities of two forwards are compared."""
    targets: str | list[str] = "attn"
    """``attn`` (q, k, v, o), ``all`` (these and the feed-forward), or module names such as
    ``[q_proj, v_proj]``. LLaDA's own names (``attn_out``, ``ff_proj``, ``ff_out``) mean the same
    layers."""
    rslora: bool = False
    """Divides by the square root of the rank instead (arXiv:2312.03732)."""
    layers: list[int] | None = None
    """Decoder layers to adapt, at least one; all by default."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: expected at least 1, got {self.rank}")
        if not (self.alpha > 0.0 and math.isfinite(self.alpha)):
            # With 0 the gradients are 0 as well.
            raise ValueError(f"lora.alpha: expected a positive number, got {self.alpha}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout: expected 0 <= p < 1, got {self.dropout}")
        if self.layers is not None and not self.layers:
            # peft would adapt all of them.
            raise ValueError("lora.layers: expected at least one layer, or null for all, got none")
        self.modules()

    def modules(self) -> list[str]:
        """Names of the adapted modules under transformers' names, sorted."""
        if isinstance(self.targets, str):
            group = _GROUPS.get(self.targets, ())
            wanted = list(_GROUPS["all"] or ()) if group is None else list(group)
        else:
            # A target may name a path, such as ``blocks.0.ff_out``.
            wanted = [name.rpartition(".")[2] for name in self.targets]
        known = set(_GROUPS["all"] or ())
        found = {LLADA_MODULES.get(name, name) for name in wanted}
        if not found or not found <= known:
            raise ValueError(
                f"lora.targets: expected 'attn', 'all' or some of "
                f"{sorted(known | (set(LLADA_MODULES) - {'attn_norm', 'ff_norm'}))}, "
                f"got {self.targets!r}"
            )
        return sorted(found)


def read_adapter_settings(folder: Path) -> LoRASettings:
    """Reads ``adapter_config.json`` of a PEFT folder.

    Args:
        folder: the adapter.

    Returns:
        Its settings.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: expected an adapter folder with {CONFIG_FILE}")
    config = read_json_object(path)
    for option, allowed in _ONLY.items():
        value = config.get(option)
        if value not in allowed:
            raise ValueError(
                f"{path}: option {option}={value!r} is not supported, "
                f"expected {allowed[-1] if option != 'peft_type' else 'LORA'!r}"
            )
    rank, targets = config.get("r"), config.get("target_modules")
    if not isinstance(rank, int) or not targets:
        raise ValueError(
            f"{path}: expected options r and target_modules, got {rank!r}, {targets!r}"
        )
    layers = config.get("layers_to_transform")
    return LoRASettings(
        rank=rank,
        alpha=config.get("lora_alpha", 8),
        dropout=config.get("lora_dropout", 0.0),
        targets=targets if isinstance(targets, str) else sorted(targets),
        rslora=bool(config.get("use_rslora", False)),
        layers=[layers] if isinstance(layers, int) else layers or None,  # all, to peft
    )


def differing_base(folder: Path, base: str | None) -> str | None:
    """The model that an adapter was trained on, where that is another one than it shall run on.

    Of a model that has moved, such as a local copy from a hub, the last part of the name counts.

    Args:
        folder: the adapter.
        base: folder, embedded name or hub id of the model at hand; ``None`` if not known.

    Returns:
        Its name, or ``None`` where it is the same or one of them is not known.
    """
    trained_on = read_json_object(folder / CONFIG_FILE).get("base_model_name_or_path")
    if not trained_on or base is None:
        return None
    one, other = Path(trained_on), Path(base)
    are_here = one.is_dir() and other.is_dir()
    is_same = one.resolve() == other.resolve() if are_here else one.name == other.name
    return None if is_same else str(trained_on)
