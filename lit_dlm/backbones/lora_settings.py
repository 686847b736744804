"""What a low-rank adapter is, and what its folder says; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_dlm.backbones.families import LLADA_MODULES
from lit_dlm.backbones.location import read_json_object
from lit_dlm.ops.options import at_least, within

CONFIG_FILE = "adapter_config.json"

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]
_GROUPS = {"attn": _ATTENTION, "all": _ALL, "all-linear": _ALL}

# What a PEFT configuration may hold only empty or false: our layers have none of it.
_UNSUPPORTED = (
    "fan_in_fan_out", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save",
    "exclude_modules", "rank_pattern", "alpha_pattern", "layer_replication", "layers_pattern",
    "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip


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
        number = None if self.layers is None else len(self.layers)
        at_least(1, of="lora.", rank=self.rank)
        at_least(1, of="number of lora.", layers=number)  # peft takes none for all
        within("(0, inf)", of="lora.", alpha=self.alpha)  # with 0 the gradients are 0 as well
        within("[0, 1)", of="lora.", dropout=self.dropout)
        self.modules()

    def modules(self) -> list[str]:
        """Names of the adapted modules under transformers' names, sorted."""
        targets = self.targets
        wanted = _GROUPS.get(targets, [targets]) if isinstance(targets, str) else targets
        # A target may name a path, such as ``blocks.0.ff_out``.
        names = {name.rpartition(".")[2] for name in wanted}
        found = {LLADA_MODULES.get(name, name) for name in names}
        if not found or not found <= set(_ALL):
            known = {*_ALL, *LLADA_MODULES} - {"attn_norm", "ff_norm"}
            raise ValueError(
                f"lora.targets: expected 'attn', 'all' or some of {sorted(known)}, got {targets!r}"
            )
        return sorted(found)


def read_adapter_settings(folder: Path) -> LoRASettings:
    """Reads ``adapter_config.json`` of a PEFT folder."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: expected an adapter folder with {CONFIG_FILE}")
    config = read_json_object(path)
    asked = [option for option in _UNSUPPORTED if config.get(option)]
    asked += [o for o, v in (("peft_type", "LORA"), ("bias", "none")) if config.get(o, v) != v]
    if asked:
        raise ValueError(f"{path}: option {asked[0]}={config[asked[0]]!r} is not supported")
    targets, layers = config.get("target_modules") or [], config.get("layers_to_transform")
    return LoRASettings(
        rank=config.get("r", 8),  # as peft where it is not said, like what follows
        alpha=config.get("lora_alpha", 8),
        dropout=config.get("lora_dropout", 0.0),
        targets=targets if isinstance(targets, str) else sorted(targets),
        rslora=bool(config.get("use_rslora", False)),
        layers=[layers] if isinstance(layers, int) else layers or None,
    )


def differing_base(folder: Path, base: str | None) -> str | None:
    """The model that an adapter was trained on, where that is another one than ``base``.

    Of a model that has moved, such as a local copy from a hub, the last part of the name counts.
    ``None`` where it is the same or one of them is not known.
    """
    trained_on = read_json_object(folder / CONFIG_FILE).get("base_model_name_or_path")
    if not trained_on or base is None:
        return None
    one, other = Path(trained_on), Path(base)
    are_here = one.is_dir() and other.is_dir()
    is_same = one.resolve() == other.resolve() if are_here else one.name == other.name
    return None if is_same else str(trained_on)
