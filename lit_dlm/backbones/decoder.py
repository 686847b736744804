"""A decoder with its specification: construction, adapters, files and provenance.

What it computes is in :mod:`lit_dlm.backbones.hf`, which derives from the class here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_dlm.backbones import lora as adapters
from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.attention import ROUTES, AttentionRoute
from lit_dlm.backbones.families import (
    FAMILIES,
    HEAD_KEY,
    KeyMap,
    original_config,
    vision_key,
)
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.lora_settings import (
    LoRASettings,
    differing_base,
    read_adapter_settings,
)
from lit_dlm.backbones.resolution import EXPORT_KEY, FromAR, Resolved, resolve
from lit_dlm.backbones.vision import TowerSizes, TowerVision, Vision, VisionSettings, token_vision
from lit_dlm.backbones.weights import (
    files_digest,
    load_weights,
    plain_tensor,
    save_checkpoint,
    save_weights,
    weight_files,
)
from lit_dlm.ops.alignment import gather_rows
from lit_dlm.ops.options import one_of
from lit_dlm.ops.precision import without_autocast

logger = logging.getLogger(__name__)

_VISION_FILE = "vision.safetensors"
"""What was trained of ``vision`` beside an adapter, under the family's names."""

DType = Literal["float32", "bfloat16", "float16"]
ExportLayout = Literal["hf", "original"]


class StoredDecoder(nn.Module):
    """A bidirectional decoder that loads, adapts and exports.

    Args:
        path: an embedded model (``tiny``), a local folder, or a hub id ``owner/name``. Folders of
            Dream, DiffuCoder, LLaDA, MMaDA, LLaDA-V (its text part), SDAR and TraDo work as
            released; so does what :meth:`export` wrote. Only a hub id may use the network; no code
            is ever loaded.
        architecture: sizes for random weights, instead of ``path``. Seed torch before.
        dtype: of the weights and activations.
        attn_implementation: see :mod:`~lit_dlm.backbones.attention`.
        trainable: whether parameters require gradients; frozen otherwise. With an adapter only its
            own weights ever do.
        spec_overrides: fields of :class:`~lit_dlm.backbones.base.BackboneSpec` that win over the
            files, such as ``{"positions": "arange"}``. Only with ``path``.
        from_ar: makes a diffusion model of an autoregressive checkpoint at ``path``.
        lora: puts a new low-rank adapter on the frozen weights; it is trainable. From Python also
            a dict of these settings.
        adapter: folder or hub id of a low-rank adapter in PEFT layout to load.
        merge_adapter: whether to add the loaded adapter to the weights at once, which costs
            nothing per forward but can no longer be undone.
        vision: lets prompts have pictures, with a model that was made for them (LLaDA-V, MMaDA);
            nothing of it is loaded by default.
        compile: whether to compile the decoder layers with ``torch.compile``; forwards with a cache
            run uncompiled.
        gradient_checkpointing: which activations training computes again in the backward instead
            of keeping them: ``true`` those of every layer but its input, a number ``n`` those of
            every ``n``-th layer, ``selective`` what is cheap, all but the outputs of matrix
            products and attention.
        load_in_4bit: quantises the matrices of the layers to NF4 by bitsandbytes (arXiv
            2305.14314) once they are loaded, for decoding and for adapters on them; the others stay
            in ``dtype``. Such a model cannot be exported or merged with an adapter.
    """

    _forbidden: Tensor

    def __init__(
        self,
        path: str | None = None,
        *,
        architecture: Architecture | None = None,
        dtype: DType = "float32",
        attn_implementation: AttentionRoute = "auto",
        trainable: bool = False,
        spec_overrides: dict[str, Any] | None = None,
        from_ar: FromAR | None = None,
        lora: LoRASettings | None = None,
        adapter: str | None = None,
        merge_adapter: bool = False,
        vision: VisionSettings | None = None,
        compile: bool = False,
        gradient_checkpointing: bool | int | Literal["selective"] = False,
        load_in_4bit: bool = False,
    ) -> None:
        super().__init__()
        if load_in_4bit and find_spec("bitsandbytes") is None:
            raise ValueError(
                "HFBackbone.load_in_4bit: expected bitsandbytes, which is absent; pip install "
                "bitsandbytes"
            )
        if load_in_4bit and (trainable or merge_adapter):
            raise ValueError(
                "HFBackbone.load_in_4bit: expected neither trainable nor merge_adapter beside it"
            )
        if (path is None) == (architecture is None):
            given = "neither" if path is None else "both"
            raise ValueError(
                f"HFBackbone: expected exactly one of path and architecture, got {given}"
            )
        one_of(*ROUTES, of="HFBackbone.", attn_implementation=attn_implementation)
        if lora is not None and adapter is not None:
            raise ValueError("HFBackbone: expected at most one of lora and adapter, got both")
        if merge_adapter and adapter is None:
            raise ValueError("HFBackbone.merge_adapter: there is no adapter to merge")
        if isinstance(lora, Mapping):
            lora = LoRASettings(**lora)
        self.attn_implementation = attn_implementation
        self.new_mask_token = None if from_ar is None else from_ar.mask_token
        """How the mask of a model that starts from an autoregressive one is written."""
        self._base_name = path
        self._weight_files: list[Path] = []
        self._adapter_files: list[Path] = []
        self._digests: dict[str, str] = {}
        self._source_config: dict[str, Any] | None = None
        self._adapter: LoRASettings | None = None
        self.mapped: dict[str, Tensor] = {}
        """Weights in a file's own memory, as they were read."""
        self._late: torch.dtype | None = None
        if architecture is not None:
            for name, value in (("spec_overrides", spec_overrides), ("from_ar", from_ar)):
                if value:
                    raise ValueError(
                        f"HFBackbone.{name}: only with path; with architecture set its fields"
                    )
            self.architecture = architecture
            self._keys = KeyMap.of(architecture.family)
            self.model = _random_decoder(
                architecture, attn_implementation=attn_implementation, dtype=torch_dtype(dtype)
            )
        else:
            assert path is not None
            resolved = resolve(path, spec_overrides=spec_overrides, from_ar=from_ar)
            self.architecture, self._keys = resolved.architecture, resolved.keys
            if EXPORT_KEY in resolved.config:
                self._keys = KeyMap.of(self.architecture.family)
            else:
                self._source_config = dict(resolved.config)
            self._weight_files = weight_files(locate(path))
            # One process of several may keep a part only; it converts what it keeps.
            is_late = trainable and lora is None and adapter is None and not resolved.adds_mask
            if is_late and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                self._late = torch_dtype(dtype)
            self.model, self.mapped = _loaded_decoder(
                resolved,
                self._weight_files,
                attn_implementation=attn_implementation,
                dtype=torch_dtype(dtype),
                as_stored=self._late is not None,
            )
        self._is_4bit = load_in_4bit
        if load_in_4bit:
            _quantise(self.model)
        _fuse_norms(self.model)
        _hasten_products(self.model)
        last = self.model.model.layers[-1]
        last.forward = MethodType(_last_layer, last)
        for layer in self.model.model.layers:
            # The module constant would make a mask-free SDPA call causal.
            layer.self_attn.is_causal = False
        self._keep_rotary_in_float32()
        self.requires_grad_(trainable)

        self.spec = self.architecture.spec()
        self.hidden_size = self.architecture.hidden_size
        self.num_layers = self.architecture.num_layers
        self.max_positions = self.architecture.max_positions
        self.vocab_size = self.architecture.vocab_size
        self.vision: Vision | None = None
        if vision is not None:
            self.vision = self._seeing(vision).to(self.dtype)
            if not trainable or lora is not None:
                for parameter in self.vision.parameters():
                    if parameter.requires_grad:  # as adapters are
                        parameter.data = parameter.data.float()
        self.register_buffer(
            "_forbidden", torch.tensor(self.spec.forbidden_ids, dtype=torch.long), persistent=False
        )
        if lora is not None:
            if trainable:
                logger.warning(
                    "trainable with lora: has no effect, the adapter alone is trained; leave lora "
                    "out to train all weights"
                )
            if from_ar is not None:
                logger.warning(
                    "from_ar with lora: the new mask embedding is frozen at the mean of the others"
                )
            self.add_adapter(lora)
        if adapter is not None:
            self.load_adapter(adapter, trainable=trainable)
        if merge_adapter:
            self.merge_adapter()
        if gradient_checkpointing:
            is_selective = gradient_checkpointing == "selective"
            every = 1 if is_selective else int(gradient_checkpointing)
            if every < 1:
                raise ValueError(
                    "HFBackbone.gradient_checkpointing: expected true, false, 'selective' or a "
                    f"number of layers, got {gradient_checkpointing}"
                )
            # What transformers' own switch sets, less its hook that lets embeddings need gradients.
            for layer in self.model.model.layers[every - 1 :: every]:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = adapters.recomputed(
                    layer, keep_products=is_selective
                )
        if compile:
            # Layer by layer: one graph serves all of them, and the hooks that read hidden states
            # stay outside. nn.Module.compile would put them inside, where later ones are not seen.
            for layer in self.model.model.layers:
                layer.forward = _compiled(layer.forward)

    def _seeing(self, settings: VisionSettings) -> Vision:
        family = self.architecture.family
        if self.spec.text_vocab_size is not None:
            return token_vision(
                self._base_name,
                settings,
                first_id=self.spec.text_vocab_size,
                vocab_size=self.vocab_size,
            )
        if family != "llada_v" or self._source_config is None:
            raise ValueError(
                f"HFBackbone.vision: expected a LLaDA-V or MMaDA checkpoint, got {family}"
            )
        vision = TowerVision(
            settings,
            TowerSizes.of(self._source_config),
            width=self.hidden_size,
            vocab_size=self.vocab_size,
        )
        names = {vision_key(name): name for name, _ in vision.named_parameters()}
        load_weights(self._weight_files, dict(vision.named_parameters()), rename=names.get)
        return vision

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the weights."""
        return self._late or self.model.lm_head.weight.dtype

    def convert(self) -> None:
        """Gives weights their dtype that have been left in that of their files.

        In one process of several, trained weights are mapped from their files until they are
        sharded or moved to a device, so that none of them is ever converted whole on the host.
        Forwards call it too.
        """
        if self._late is not None:
            dtype, self._late = self._late, None
            self.to(dtype)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.lm_head.weight.device

    @property
    def own_layout(self) -> ExportLayout:
        """``original`` for a family with code of its own, else ``hf``."""
        return "original" if self.architecture.family in FAMILIES else "hf"

    @property
    def adapter(self) -> LoRASettings | None:
        """Settings of the low-rank adapter in place, if there is one."""
        return self._adapter

    def add_adapter(self, settings: LoRASettings) -> None:
        """Puts a new trainable adapter on the decoder's weights, which get frozen.

        Args:
            settings: its shape and places.
        """
        if self._adapter is not None:
            raise ValueError("adapter: this backbone has one already; merge it first")
        self.model.requires_grad_(False)
        adapters.inject(self.model, settings)
        self._adapter = settings

    def add_side_adapter(self, name: str, settings: LoRASettings) -> None:
        """Puts a trainable adapter beside that of the policy, for another head on the same weights.

        It takes part in a forward only inside :meth:`using_adapter`, and is no part of what
        :meth:`save_adapter` and :meth:`export` write.

        Args:
            name: of the adapter, other than ``default``.
            settings: its shape and places.
        """
        if name == adapters.POLICY or any(adapters.adapter_parameters(self.model, name)):
            raise ValueError(f"add_side_adapter: there is an adapter named {name!r} already")
        adapters.inject(self.model, settings, name=name)

    def using_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Runs forwards with another adapter, or with none (``None``): the initial weights.

        Args:
            name: of an adapter from :meth:`add_side_adapter`.
        """
        return adapters.using_adapter(self.model, name)

    def load_adapter(self, path_or_id: str, *, trainable: bool = False) -> None:
        """Loads a low-rank adapter in PEFT layout.

        Args:
            path_or_id: its folder, or a hub id. Keys may have transformers' or the family's names.
            trainable: whether its weights require gradients.
        """
        folder = locate(path_or_id)
        self.add_adapter(read_adapter_settings(folder))
        self._adapter_files = [adapters.load_adapter(self.model, folder, keys=self._keys)]
        if (path := folder / _VISION_FILE).is_file():
            if not isinstance(self.vision, TowerVision):
                raise ValueError(f"{path}: expected HFBackbone.vision, a part of which it holds")
            parameters = dict(self.vision.named_parameters())
            names = {vision_key(name): name for name in parameters}
            load_weights([path], parameters, rename=names.get, optional=frozenset(parameters))
            self._adapter_files.append(path)
        self._digests.pop("adapter", None)
        trained_on = differing_base(folder, self._base_name)
        if trained_on is not None:
            logger.warning(
                "%s: this adapter was trained on %s, but runs on %s",
                folder, trained_on, self._base_name,
            )  # fmt: skip
        for _, parameter in adapters.adapter_parameters(self.model):
            parameter.requires_grad_(trainable)

    def merge_adapter(self) -> None:
        """Adds the adapter to the weights and removes it; the weights stay frozen."""
        if self._adapter is None:
            raise ValueError("merge_adapter: this backbone has no adapter")
        self._require_whole("merge_adapter")
        adapters.merge(self.model)
        self._adapter = None

    def save_adapter(self, folder: str | Path, *, layout: ExportLayout | None = None) -> None:
        """Writes the adapter as a PEFT folder, and beside it what is trained of ``vision``.

        Args:
            folder: created when absent; files of the same name are replaced. With sharded weights
                every process must call this; the first one writes.
            layout: ``hf`` for an adapter on what :meth:`export` writes; ``original`` for one on the
                family's own code; by default the one of the files that this model came from.
                :meth:`load_adapter` reads both.
        """
        if self._adapter is None:
            raise ValueError("save_adapter: this backbone has no adapter")
        if layout is None:
            layout = "hf" if self._source_config is None else "original"
        family = FAMILIES.get(self.architecture.family)
        adapters.save_adapter(
            self.model,
            self._adapter,
            Path(folder),
            keys=self._keys,
            layout=layout,
            task=family.peft_task if family and layout == "original" else "CAUSAL_LM",
            base_name=self._base_name,
            write=_is_first_process(),
        )
        if isinstance(self.vision, TowerVision) and self.vision.settings.train != "none":
            trained = {
                vision_key(name): plain_tensor(parameter)
                for name, parameter in self.vision.named_parameters()
                if parameter.requires_grad
            }
            if _is_first_process():
                save_weights(trained, Path(folder) / _VISION_FILE)

    def export(
        self,
        folder: str | Path,
        *,
        layout: ExportLayout | None = None,
        dtype: DType | None = None,
        max_shard_gigabytes: float = 5.0,
    ) -> None:
        """Writes ``config.json`` and the weights, the adapter merged into them.

        Equal weights give equal bytes. Tokenizer files are not known here: copy them beside.

        Args:
            folder: created when absent; files of the same name are replaced. With sharded weights
                every process must call this; the first one writes.
            layout: ``hf``: a transformers checkpoint that this class reads with all of its
                specification, without ``vision``. ``original``: names and configuration of the
                family's own code; the default with a tower of ``vision``, which is part of it.
            dtype: of the stored weights; ``None`` keeps the current one.
            max_shard_gigabytes: larger models become shards with an index.
        """
        self._require_whole("export")
        folder = Path(folder)
        sees = isinstance(self.vision, TowerVision)
        layout = layout or ("original" if sees else "hf")
        stored = self.dtype if dtype is None else torch_dtype(dtype)
        if layout == "hf":
            config = self.architecture.config_fields() | {
                EXPORT_KEY: self.architecture.spec_fields()
            }
        elif layout == "original":
            config = original_config(self.architecture, source=self._source_config)
            if not sees:
                config.pop("mm_vision_tower", None)  # it is not in the files
        else:
            raise ValueError(f"layout: expected 'hf' or 'original', got {layout!r}")
        # One spelling for new and old readers alike.
        config.pop("torch_dtype", None)
        config["dtype"] = str(stored).removeprefix("torch.")
        weights = adapters.base_parameters_adapted(self.model)
        if self.architecture.tie_embeddings:
            del weights[HEAD_KEY]
        translate = self._keys.original if layout == "original" else str
        named = {translate(key): entry for key, entry in weights.items()}
        if sees and layout == "original":
            assert self.vision is not None
            for name, parameter in self.vision.named_parameters():
                named[vision_key(name)] = parameter, None

        def read(key: str) -> Tensor:
            parameter, layer = named[key]
            tensor = plain_tensor(parameter)
            if layer is not None:
                tensor = adapters.merged(tensor, layer)
            return tensor.to(device="cpu", dtype=stored)

        write = _is_first_process()
        with torch.no_grad():
            save_checkpoint(
                {key: value.numel() * stored.itemsize for key, (value, _) in named.items()},
                read,
                folder,
                max_shard_bytes=int(max_shard_gigabytes * 1e9),
                write=write,
            )
        if write:
            partial = folder / "config.json.partial"
            text = json.dumps(config, indent=2, sort_keys=True)
            partial.write_text(text + "\n", encoding="utf-8")
            os.replace(partial, folder / "config.json")

    def _require_whole(self, purpose: str) -> None:
        if self._is_4bit:
            raise ValueError(
                f"{purpose}: expected a model without load_in_4bit, which loses digits"
            )

    def describe(self) -> dict[str, Any]:
        """Provenance as plain JSON values.

        Returns:
            ``family``, ``decoder``, ``num_parameters``, ``dtype``, ``attn_implementation``,
            ``config_sha256``, ``weights_sha256`` of the files the weights came from (``None`` for
            random ones), ``adapter_sha256`` likewise, and ``load_in_4bit`` where it is on. The
            digests read all files on the first call and say nothing about training since.
        """
        if self._weight_files and "weights" not in self._digests:
            self._digests["weights"] = files_digest(self._weight_files)
        if self._adapter_files and "adapter" not in self._digests:
            self._digests["adapter"] = files_digest(self._adapter_files)
        return {
            "family": self.spec.family,
            "decoder": self.architecture.decoder,
            "num_parameters": sum(p.numel() for p in self.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn_implementation": self.attn_implementation,
            "config_sha256": self.architecture.digest(),
            "weights_sha256": self._digests.get("weights"),
            "adapter_sha256": self._digests.get("adapter"),
            **({"load_in_4bit": True} if self._is_4bit else {}),
            **({"vision": asdict(self.vision.settings)} if self.vision is not None else {}),
        }

    def _keep_rotary_in_float32(self) -> None:
        """Rebuilds the rotary frequencies, which lose positions when rounded to half precision."""
        decoder = self.model.model
        device = decoder.embed_tokens.weight.device
        decoder.rotary_emb = type(decoder.rotary_emb)(self.model.config).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # ``.to(bfloat16)`` (also Lightning's true half precision) casts every buffer and adapter.
        before = adapters.float32_adapters(self)
        super()._apply(fn, recurse)
        if "model" in self._modules and self.device.type != "meta":
            self._keep_rotary_in_float32()
            adapters.keep_in_float32(self, before)
            if self.device.type != "cpu":
                self.convert()
        return self


def _compiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward, compiled for whole canvases.

    With a cache it runs as it is: the layer's number and the bounds of each window would be
    constants of the graph, so that nearly every call compiled anew.
    """
    fast = torch.compile(plain)

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        if past_key_values is None:
            return fast(*args, **kwargs)
        return plain(*args, past_key_values=past_key_values, **kwargs)

    return forward


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a setting.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``, or the torch dtype of that name.
    """
    name = str(dtype).removeprefix("torch.")
    known = list(get_args(DType))
    if name not in known:
        raise ValueError(f"HFBackbone.dtype: expected one of {known}, got {name!r}")
    return getattr(torch, name)


def _random_decoder(
    architecture: Architecture, *, attn_implementation: AttentionRoute, dtype: torch.dtype
) -> PreTrainedModel:
    """A decoder with random weights, on torch's default device."""
    config = architecture.hf_config()
    config._attn_implementation = f"lit_dlm_{attn_implementation}"
    model = architecture.model_class(config)
    nn.Module.to(model, dtype)  # in place
    return model


def _loaded_decoder(
    resolved: Resolved,
    files: Sequence[Path],
    *,
    attn_implementation: AttentionRoute,
    dtype: torch.dtype,
    as_stored: bool = False,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A decoder with the weights of a checkpoint, on torch's default device, and what is mapped.

    The memory starts uninitialised (random weights of billions of parameters take minutes) and is
    filled tensor by tensor, so that the peak is the model plus one shard.
    """
    architecture = resolved.architecture
    with torch.device("meta"):
        model = _random_decoder(architecture, attn_implementation=attn_implementation, dtype=dtype)
        grows = resolved.file_vocab_size < architecture.vocab_size
        if grows:
            model.resize_token_embeddings(resolved.file_vocab_size, mean_resizing=False)
    model.to_empty(device=torch.get_default_device())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if architecture.tie_embeddings:  # leaving the meta device gave each its own memory
        model.lm_head.weight = model.model.embed_tokens.weight
        del parameters[HEAD_KEY]
    mapped = load_weights(
        files,
        parameters,
        rename=resolved.keys.ours,
        optional=frozenset([HEAD_KEY] if architecture.tie_embeddings else []),
        as_stored=as_stored,
    )
    if resolved.adds_mask:
        _add_mask_row(model, mask_id=architecture.mask_id, vocab_size=architecture.vocab_size)
    return model, mapped


def _quantise(model: PreTrainedModel) -> None:
    """Replaces the matrices of a decoder's layers by 4-bit ones (NF4), in place, one at a time."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in list(model.model.layers.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        weight = linear.weight
        packed = Linear4bit(
            linear.in_features,
            linear.out_features,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        packed.weight = Params4bit(
            weight.detach(), requires_grad=False, quant_type="nf4", module=packed
        )
        packed.bias = linear.bias
        parent, _, last = name.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), last, packed.to(weight.device))
    # peft then puts its own kind of layer around them.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


class FusedRMSNorm(nn.RMSNorm):
    """The norm of the decoders, on a GPU one kernel; transformers' takes eight and float32 copies.

    The same bits in float32. In half precision the product with the weight is rounded once and not
    twice. CUDA's autocast would give float32 rows, for which neither the flash kernel nor the
    head's tensor cores are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normed ``x`` in its own dtype, ``(..., D)``; torch fuses nothing across dtypes."""
        with without_autocast(x.device):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _fuse_norms(model: PreTrainedModel) -> None:
    """Replaces the norms of a decoder in place; their weights and keys stay."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            epsilon: float | None = getattr(norm, "variance_epsilon", None)
            if epsilon is not None:
                weight = norm.get_parameter("weight")
                fused = FusedRMSNorm(weight.shape, eps=epsilon, device="meta")
                fused.weight = weight
                setattr(module, name, fused)


_LARGE = 2**18
"""Weights of a matrix from which on oneDNN is the faster one of a CPU's two libraries."""


class Linear(nn.Linear):
    """Large float32 products of inference on a CPU through oneDNN, all others as torch does them.

    torch takes oneDNN for half precision only and MKL for float32, which is slower on processors of
    AMD: by a tenth where rows are many, by half where a few meet a head.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D)`` to ``(..., E)``; makes no second copy of the weights."""
        weight = self.weight
        if (
            weight.numel() < _LARGE
            or torch.is_grad_enabled()
            or not weight.dtype == x.dtype == torch.float32
            or weight.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return F.linear(x, weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "none", [], "")


def _hasten_products(model: PreTrainedModel) -> None:
    """Makes the linear layers of a decoder :class:`Linear` where torch has oneDNN, in place."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def _last_layer(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a decoder's last layer, ``(B, L, D)`` to ``(B, K, D)``.

    It ends with the rows that are read: those of the ``(B, K)`` int64 columns ``kept``, or all.
    """
    kept = kwargs.pop("kept", None)
    if kept is None:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
    rows = gather_rows(hidden_states, kept) + gather_rows(attended, kept)
    return rows + layer.mlp(layer.post_attention_layernorm(rows))


@torch.no_grad()
def _add_mask_row(model: PreTrainedModel, *, mask_id: int, vocab_size: int) -> None:
    """Gives the mask token its rows in the embedding and the head, in place.

    Both matrices grow where needed. The new rows, and the mask's own row where the checkpoint has
    an unused one there, start at the mean of the checkpoint's rows: an ordinary size, and no
    token's meaning.
    """
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    embedding.weight = _grown(embedding.weight, vocab_size, mask_id)
    head.weight = embedding.weight if tied else _grown(head.weight, vocab_size, mask_id)
    embedding.num_embeddings = head.out_features = vocab_size
    for holder in (model.config, model, model.model):
        holder.vocab_size = vocab_size


def _grown(weight: Tensor, num_rows: int, mask_id: int) -> nn.Parameter:
    mean = weight.float().mean(dim=0).to(weight.dtype)
    grown = weight
    if num_rows > len(weight):
        grown = torch.cat([weight, mean.expand(num_rows - len(weight), -1)])
    grown[mask_id] = mean
    return nn.Parameter(grown.detach(), requires_grad=weight.requires_grad)
