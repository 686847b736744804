"""Low-rank adapters (arXiv:2106.09685) through peft.

Layers are replaced in place: the decoder keeps its module paths, so nothing else needs to know. An
adapter is merged into the weights that it adapts for good, or only while a policy decodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_dlm.backbones.architecture import LLADA_MODULES
from lit_dlm.backbones.experts import expert_biases
from lit_dlm.backbones.weights import plain_tensor
from lit_dlm.system.options import at_least, refuse, within
from lit_dlm.tensors.precision import without_autocast

if TYPE_CHECKING:  # peft takes seconds to import, and most runs have no adapter
    from peft import LoraConfig

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]
FEED_FORWARD = {*_ALL} - {*_ATTENTION}
_GROUPS = {"attn": _ATTENTION, "all": _ALL, "all-linear": _ALL}


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
    layers. In a model with experts, the names of the feed-forward mean the experts' matrices, and
    only all three together; dense layers and shared experts are not adapted there."""
    rslora: bool = False
    """Whether to divide by the square root of the rank instead (arXiv:2312.03732)."""

    def __post_init__(self) -> None:
        at_least(1, of="lora.", rank=self.rank)
        within("(0, inf)", of="lora.", alpha=self.alpha)  # with 0 the gradients are 0 as well
        within("[0, 1)", of="lora.", dropout=self.dropout)
        self.modules()

    def modules(self) -> list[str]:
        """Returns transformers' names of the adapted modules, sorted."""
        targets = self.targets
        wanted = _GROUPS.get(targets, [targets]) if isinstance(targets, str) else targets
        modules = {LLADA_MODULES.get(name, name) for name in wanted}
        if not modules or not modules <= set(_ALL):
            known = {*_ALL, *LLADA_MODULES} - {"attn_norm", "ff_norm"}
            refuse("lora.targets", f"'attn', 'all' or some of {sorted(known)}", repr(targets))
        return sorted(modules)

    def beside_experts(self) -> tuple[list[str], bool]:
        """Returns the adapted modules of a model with experts, and whether experts are, too."""
        modules = set(self.modules())
        if met := modules & FEED_FORWARD:
            if met != FEED_FORWARD:
                wanted = f"{sorted(FEED_FORWARD)} together in a model with experts"
                refuse("lora.targets", wanted, sorted(met))
            if self.dropout:
                refuse("lora.dropout", "0 for an adapter on experts", self.dropout)
        return sorted(modules - FEED_FORWARD), bool(met)


POLICY = "default"
"""Name of the adapter that a backbone trains, loads and writes; also peft's default."""


def peft_config(settings: LoRASettings, **options: Any) -> LoraConfig:
    """Returns the settings as peft's configuration; ``options`` add to them or override them."""
    from peft import LoraConfig

    values: dict[str, Any] = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": settings.modules(),
        "use_rslora": settings.rslora,
    }
    return LoraConfig(**(values | options))


def inject(model: PreTrainedModel, settings: LoRASettings, *, name: str = POLICY) -> None:
    """Puts a new adapter into a decoder, in place; until trained it changes no output.

    All other weights keep their ``requires_grad``. The adapter's are float32 where the base is in
    half precision, as in peft, since small updates would be rounded away. Forwards use the adapter
    named :data:`POLICY`; others are switched on by :func:`using_adapter`.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

    from lit_dlm.backbones.adapted_linear import AdaptedLinear

    places = _places(model, settings)
    # peft freezes all that is no adapter, also what is trained beside it.
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with warnings.catch_warnings():
        # A second adapter under another name is intended.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(peft_config(settings, **places), model, adapter_name=name)
    for parameter, flag in before:
        parameter.requires_grad_(flag)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            # peft would leave the newest adapter active, which may be that of another head.
            layer._active_adapter = [POLICY]
        # Exactly this class: experts, and matrices in 4 bits, have forwards of their own.
        if type(layer) is Linear:
            layer.__class__ = AdaptedLinear
    for _, parameter in adapter_parameters(model, name):
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _places(model: nn.Module, settings: LoRASettings) -> dict[str, list[str]]:
    """Returns the targets in a model with experts, which peft would expect under other names."""
    names = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
    experts = {name for name in names if ".experts." in name and "lora_" not in name}
    if not experts:
        return {}
    modules, adapts_experts = settings.beside_experts()
    return {
        "target_modules": modules,
        "target_parameters": sorted(experts) if adapts_experts else [],
    }


@contextmanager
def using_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Runs forwards of a decoder with another of its adapters, or with none (``None``).

    The choice is made when a forward runs; its backward may come later, even if it recomputes
    layers (:mod:`lit_dlm.backbones.recompute`).
    """
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    # peft's own switch would also change which weights require gradients.
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [] if name is None else [name]
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


def adapter_parameters(model: nn.Module, name: str = POLICY) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields weights of an adapter, as ``model.layers.0.self_attn.q_proj.lora_A.weight``."""
    for path, parameter in model.named_parameters():
        if ".lora_" in path and f".{name}." in path.partition(".lora_")[2]:
            yield path.replace(f".{name}.", "."), parameter


# -- adding an adapter to its weights ------------------------------------------------------------


def base_parameters_adapted(model: nn.Module) -> dict[str, tuple[Tensor, nn.Module | None]]:
    """Returns a decoder's base weights, by the keys that they have without an adapter.

    Each adapted weight comes with the layer with which it has to be :func:`merged`.
    """
    modules = dict(model.named_modules())
    result: dict[str, tuple[Tensor, nn.Module | None]] = {}
    stored = (*model.named_parameters(remove_duplicate=False), *expert_biases(model).items())
    for name, parameter in stored:
        if ".lora_" in name:
            continue
        owner, _, last = name.rpartition(".")
        adapted = None
        # Around experts peft nests its layers, one for each of their tensors.
        while owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            layer: Any = modules[owner]
            # Only the policy's adapter is ever merged; others are no part of the model.
            if POLICY in layer.lora_A and getattr(layer, "parameter_name", "weight") == last:
                adapted = layer
        result[f"{owner}.{last}"] = (parameter, adapted)
    return result


def merged(weight: Tensor, layer: Any) -> Tensor:
    """Returns the weight ``(out, in)`` of a peft layer with its adapter added, in the same dtype.

    For experts it is ``(experts, out, in)``. The sum is computed in float32, or in float64 for
    float64 weights, and rounded once.
    """
    # A half-precision sum would round twice, and rollouts would differ from what is trained.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rows = plain_tensor(layer.lora_B[POLICY].weight).to(dtype)
    columns = plain_tensor(layer.lora_A[POLICY].weight).to(dtype)
    if weight.ndim == 3:  # peft keeps (out, rank * experts) and (experts * rank, in)
        rows = rows.unflatten(1, (-1, len(weight))).permute(2, 0, 1)
        columns = columns.unflatten(0, (len(weight), -1))
    with without_autocast(weight.device):  # rollouts run under autocast
        # In place: at released sizes each temporary of this shape takes 100 MB or more.
        total = (rows @ columns).mul_(layer.scaling[POLICY]).add_(weight)
        return total.to(weight.dtype)


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Adds the policy's adapter to whole base weights in place; its layers stay and still run."""
    for base, layer in base_parameters_adapted(model).values():
        if layer is not None:
            base.copy_(merged(base, layer))


@contextmanager
def restored(model: nn.Module, mapped: Mapping[str, Tensor]) -> Iterator[None]:
    """Restores the base weights that have an adapter, bit for bit, when the context closes.

    Subtracting the adapter again would leave rounding errors. The decoder's weights must be
    sharded, or not, at the end as at the beginning; ``mapped`` are weights in a file's memory, as
    they were read, by key.
    """
    kept: dict[str, Tensor] = {}
    merged_into = {
        key: base
        for key, (base, layer) in base_parameters_adapted(model).items()
        # Sharded weights are gathered into memory of their own: nothing has to be put back.
        if layer is not None and not isinstance(base, DTensor)
    }
    # A copy on the GPU is restored at once; one on the host waits for two transfers of the model.
    stays = _has_room([base for base in merged_into.values() if base.device.type == "cuda"])
    for key, base in merged_into.items():
        stored = mapped.get(key)
        if base.device.type == "cpu":
            # The adapter is merged into the copy, so that weights mapped from a file stay mapped.
            kept[key], base.data = base.data, base.data.clone()
        elif stays:
            kept[key] = base.detach().clone()
        elif stored is not None and torch.equal(stored.to(base.device, base.dtype), base):
            kept[key] = stored  # the file's memory costs nothing
        else:
            kept[key] = base.detach().to("cpu", copy=True)
    try:
        yield
    finally:
        with torch.no_grad():
            for key, base in merged_into.items():
                if base.device.type == "cpu":
                    base.data = kept[key]
                else:
                    base.copy_(kept[key])


def _has_room(weights: Sequence[Tensor]) -> bool:
    """Whether copies of weights take at most a quarter of free GPU memory: caches need room."""
    if not weights:
        return False
    device = weights[0].device
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 4 * sum(weight.nbytes for weight in weights) <= free
