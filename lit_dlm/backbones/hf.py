"""Masked diffusion denoiser on transformers' decoders, made bidirectional.

The decoders compute as in transformers, except that they are not causal and the masks are ours.
Checkpoints are read in :mod:`~lit_dlm.backbones.loading` and written in
:mod:`~lit_dlm.backbones.export`. Everything that runs weights goes through
:meth:`HFBackbone.encode`, forwards of caches and of training, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from lit_dlm.backbones.adapter_files import AdapterFiles, read_adapter, settings_for
from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.attention import ROUTES, AttentionRoute, sequences_from
from lit_dlm.backbones.base import UNKNOWN_ID, Backbone, Denoised, Rows
from lit_dlm.backbones.cache import WindowCache
from lit_dlm.backbones.experts import expert_biases
from lit_dlm.backbones.loading import (
    DType,
    Source,
    load_checkpoint,
    quantise,
    random_decoder,
    torch_dtype,
)
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.lora import LoRASettings, adapter_parameters, inject, using_adapter
from lit_dlm.backbones.parts import cache_argument, replace_parts
from lit_dlm.backbones.recompute import recompute_layers
from lit_dlm.backbones.resolution import FromAR
from lit_dlm.backbones.visibility import (
    added_mask,
    aligned,
    attention_visibility,
    first_column,
    key_visibility,
    position_ids_for,
    raw_columns,
    with_own_key,
)
from lit_dlm.backbones.weights import files_digest
from lit_dlm.system.extras import pip_install, required
from lit_dlm.system.options import one_of, refuse, within
from lit_dlm.tensors.batches import gather_rows
from lit_dlm.tensors.fused_head import TokenStats, token_stats, top_ids
from lit_dlm.tensors.graphs import explain_eager, runs_graphs
from lit_dlm.tensors.precision import is_autocast
from lit_dlm.vision.base import Vision, VisionSettings

logger = logging.getLogger(__name__)

_WIDE = 64
"""Width of a window from which a CPU runs query heads that share keys separately."""

__all__ = ["AttentionRoute", "DType", "HFBackbone", "load_backbone"]


@contextmanager
def _adapters_in_float32(module: nn.Module) -> Iterator[None]:
    """Keeps a move to half precision from rounding adapters and what is trained beside them.

    Rounding would lose small updates, and differences between the biases of routers. Picture
    tokenizers stay in float32 as in the releases, since models know the tokens of these.
    """
    named = dict(module.named_parameters())
    has_adapter = any(".lora_" in name for name in named)
    before = {
        name: parameter.data
        for name, parameter in named.items()
        if parameter.dtype == torch.float32
        and (
            ".lora_" in name
            or name.startswith("vision.tokenizer.")
            or (has_adapter and parameter.requires_grad)
        )
    }
    before |= {name: bias.data for name, bias in expert_biases(module).items()}
    yield
    for name, value in (*module.named_parameters(), *expert_biases(module).items()):
        if name in before and value.dtype in (torch.float16, torch.bfloat16):
            value.data = before[name].to(value.device)


class HFBackbone(nn.Module, Backbone):
    """A bidirectional decoder with aligned outputs (the :class:`~lit_dlm.backbones.base.Backbone`).

    Args:
        path: an embedded model (``tiny``), a local folder, or a hub id ``owner/name``. Folders of
            Dream, DiffuCoder, LLaDA, MMaDA, LLaDA-V (its text part), LLaDA-MoE, LLaDA2, SDAR,
            TraDo, SDAR-MoE and Nemotron-Labs-Diffusion work as released; so does what
            ``export_model`` wrote. Only a hub id may use the network; no code is ever loaded.
        architecture: sizes for random weights, instead of ``path``. Seed torch first.
        dtype: of the weights and activations.
        attn_implementation: see :mod:`~lit_dlm.backbones.attention`.
        trainable: whether parameters require gradients; otherwise they are frozen. With an adapter,
            only its weights, and what ``vision`` trains, ever do.
        spec_overrides: fields of :class:`~lit_dlm.backbones.base.BackboneSpec` that win over the
            files, such as ``{"positions": "arange"}``.
        from_ar: turns the autoregressive checkpoint at ``path`` into a diffusion model.
        lora: adds a new trainable low-rank adapter to the frozen weights.
        adapter: folder or hub id of a low-rank adapter in PEFT layout to load.
        vision: allows pictures in prompts, for models that were made for them (LLaDA-V, MMaDA); by
            default nothing for pictures is loaded.
        gradient_checkpointing: whether the backward recomputes activations instead of keeping them:
            ``true`` recomputes all of a layer from its input, ``selective`` only what is cheap,
            keeping the outputs of matrix products and attention.
        load_in_4bit: quantises the layers' matrices to NF4 with bitsandbytes (arXiv 2305.14314)
            after loading, for decoding and for training adapters on them; other weights stay in
            ``dtype``. Such a model cannot be exported.
        cuda_graphs: whether decodes on a GPU replay their steps (:mod:`lit_dlm.tensors.graphs`).
    """

    _forbidden: Tensor

    forward_methods: ClassVar = ("encode",)
    """Methods that run the weights; under FSDP2 they gather them like ``forward``. Every public
    method goes through this one, so none can be forgotten; the head is read after it."""

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
        vision: VisionSettings | None = None,
        gradient_checkpointing: bool | Literal["selective"] = False,
        load_in_4bit: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        super().__init__()
        if (path is None) == (architecture is None) or (architecture and from_ar):
            wanted = "one of path (for from_ar, too) and architecture"
            refuse("HFBackbone", wanted, f"{path}, {architecture}")
        if load_in_4bit and (trainable or find_spec("bitsandbytes") is None):
            raise ValueError(
                "HFBackbone.load_in_4bit: expected bitsandbytes "
                f"({pip_install(required('quantized'))}) and not trainable beside it"
            )
        one_of(*ROUTES, of="HFBackbone.", attn_implementation=attn_implementation)
        one_of(False, True, "selective", gradient_checkpointing=gradient_checkpointing)
        self.attn_implementation, self.spec_overrides = attn_implementation, spec_overrides or {}
        trains_all = trainable and not (lora or adapter)
        if architecture is None:
            self.model, self.architecture, self.source = load_checkpoint(
                str(path),
                dtype=torch_dtype(dtype),
                attn_implementation=attn_implementation,
                trains_all=trains_all,
                spec_overrides=spec_overrides,
                from_ar=from_ar,
            )
        else:
            self.architecture, self.source = replace(architecture, **self.spec_overrides), Source()
            self.model = random_decoder(
                self.architecture, attn_implementation=attn_implementation, dtype=torch_dtype(dtype)
            )
        self._late_dtype = self.source.late_dtype
        self.cuda_graphs = cuda_graphs
        self.is_4bit = load_in_4bit
        """Whether matrices are packed, so that no adapter can be merged into them."""
        if load_in_4bit:
            # Before parts are replaced: a packed matrix has a product of its own.
            quantise(self.model, self.architecture)
        replace_parts(self.model)
        self._keep_rotary_in_float32()
        # Before adapters, which freeze what is below them and stay trainable themselves.
        self.requires_grad_(trainable)

        self.spec = self.architecture.spec()
        self.hidden_size = self.architecture.hidden_size
        self.num_layers = self.architecture.num_layers
        self.max_positions = self.architecture.max_positions
        self.vocab_size = self.architecture.vocab_size
        forbidden = torch.tensor(self.spec.forbidden_ids, dtype=torch.long)
        # Not stored with the weights: it follows from the specification.
        self.register_buffer("_forbidden", forbidden, persistent=False)
        self.vision: Vision | None = None
        if vision is not None:
            from lit_dlm.backbones.vision import load_vision  # text models need none

            self.vision = load_vision(
                *(vision, self.source, self.spec),
                vocab_size=self.vocab_size,
                dtype=self.dtype,
                trained_dtype=self.dtype if trains_all else torch.float32,
            )
        self.adapter: LoRASettings | None = None
        """Settings of the low-rank adapter, if there is one."""
        self.adapter_files = AdapterFiles()
        self._digests: dict[str, str] = {}
        if lora is not None:
            self.add_adapter(lora)
        if adapter is not None:
            self.load_adapter(adapter, trainable=trainable)
        if gradient_checkpointing:
            recompute_layers(self.model, keep_products=gradient_checkpointing == "selective")

    @property
    def dtype(self) -> torch.dtype:
        return self._late_dtype or self.model.lm_head.weight.dtype

    @property
    def is_half(self) -> bool:
        return self.dtype.itemsize == 2

    def convert(self) -> None:
        """Converts weights that were left in the dtype of their files.

        With several processes, trained weights stay mapped from their files until they are sharded
        or moved to a device, so that none is ever converted whole on the host.
        """
        if self._late_dtype is not None:
            dtype, self._late_dtype = self._late_dtype, None
            self.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def _keep_rotary_in_float32(self) -> None:
        """Rebuilds the rotary frequencies, which lose positions when rounded to half precision."""
        decoder = self.model.model
        device = decoder.embed_tokens.weight.device
        decoder.rotary_emb = type(decoder.rotary_emb)(self.model.config).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # ``.to(bfloat16)`` (also Lightning's true half precision) casts every buffer and adapter.
        with _adapters_in_float32(self):
            super()._apply(fn, recurse)
        # Weights that are still as in their files are converted on the device, so that the host
        # never has a second copy. The meta device has no values.
        if "model" in self._modules and self.device.type != "meta":
            self._keep_rotary_in_float32()
            if self.device.type != "cpu":
                self.convert()
        return self

    # -- adapters and files ----------------------------------------------------------------------

    def add_adapter(self, settings: LoRASettings) -> None:
        """Puts a new trainable adapter on the decoder's weights and freezes these."""
        if self.adapter is not None:
            raise ValueError("adapter: this backbone has one already; expected lora or adapter")
        if self.source.mask_token is not None:
            logger.warning(
                "from_ar with lora: the new mask embedding is frozen at the mean of the others"
            )
        self.model.requires_grad_(False)
        inject(self.model, settings)
        self.adapter = settings

    def add_side_adapter(self, name: str, settings: LoRASettings) -> None:
        """Puts a trainable adapter beside the policy's, for another head on the same weights.

        It is active only inside :meth:`using_adapter`, and is not written with the model.
        """
        inject(self.model, settings, name=name)

    def using_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Runs forwards with a side adapter, or with none (``None``): the initial weights."""
        return using_adapter(self.model, name)

    def load_adapter(self, path_or_id: str, *, trainable: bool = False) -> None:
        """Loads a low-rank adapter in PEFT layout from a folder or a hub id."""
        folder = locate(path_or_id)
        self.add_adapter(settings_for(folder, self.architecture, base=self.source.name))
        self.adapter_files = read_adapter(folder, self.model, self.vision, family=self.spec.family)
        for _, parameter in adapter_parameters(self.model):
            parameter.requires_grad_(trainable)

    def vision_weights(self) -> dict[str, nn.Parameter]:
        """Returns the weights of ``vision`` by the family's keys; none without it."""
        return {} if self.vision is None else self.vision.stored_weights()

    def describe(self) -> dict[str, Any]:
        """Returns the provenance as plain JSON values.

        The SHA-256 are of the configuration and of the files that the weights and the adapter came
        from (``None`` for random ones). The first call reads all files; training changes no digest.
        """
        # When first asked for and not at loading: digesting a released model takes a while.
        for name, files in (("weights", self.source.files), ("adapter", self.adapter_files.paths)):
            if files and name not in self._digests:
                self._digests[name] = files_digest(files)
        return {
            "family": self.spec.family,
            "decoder": self.architecture.decoder,
            "num_parameters": sum(p.numel() for p in self.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn_implementation": self.attn_implementation,
            "config_sha256": self.architecture.digest(),
            "weights_sha256": self._digests.get("weights"),
            "adapter_sha256": self._digests.get("adapter"),
            **({"load_in_4bit": True} if self.is_4bit else {}),
            **({"spec_overrides": self.spec_overrides} if self.spec_overrides else {}),
            **({"vision": asdict(self.vision.settings)} if self.vision is not None else {}),
        }

    # -- forwards --------------------------------------------------------------------------------

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
        pictures: Sequence[str] | None = None,
        position_ids: Tensor | None = None,
    ) -> Denoised:
        """See :meth:`Backbone.denoise <lit_dlm.backbones.base.Backbone.denoise>`; differentiable.

        ``pictures`` are the digests of a training batch; decodes have theirs inserted already. A
        block model gets its block-causal mask, any other one sees every real token; a ``pad_mask``
        of four dimensions replaces this, as in :meth:`forward`, with its ``position_ids``.
        """
        if self.spec.mask_id == UNKNOWN_ID:
            raise ValueError(
                f"spec.mask_id: the files of this {self.spec.family} model name no mask token; "
                "give its id as spec_overrides.mask_id"
            )
        visible, position_ids, starts = self._context(ids, pad_mask, position_ids, response_start)
        # Only these rows go through the end of the last layer and the head, which for a large
        # vocabulary costs more than a layer.
        kept = None if columns is None else raw_columns(columns, self.spec.shift, starts=starts)
        rows, hidden = self.encode(
            ids, visible, position_ids, hidden_layers=hidden_layers, kept=kept, pictures=pictures
        )
        if columns is None:
            columns = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
            rows = aligned(rows, self.spec.shift, starts=starts)
        if hidden is not None:
            hidden = aligned(hidden, self.spec.shift, starts=starts)
        return Denoised(logits=self.head(rows), columns=columns, hidden=hidden)

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Returns aligned logits of the whole canvas under the given mask, with no id forbidden.

        Unlike :meth:`denoise`, this adds nothing to the mask: without one, every token sees all
        others, in block models, too. Returns ``(B, L, V)`` in the model's dtype.

        Args:
            input_ids: ``(B, L)`` int64.
            mask: ``(B, L)`` bool or 0/1 integers, nonzero on real tokens; or ``(B, 1, L, L)`` bool,
                ``True`` where the query (third axis) may see the key (``B`` may be 1). A query
                without any key sees itself.
            position_ids: ``(B, L)`` int64; by default the spec's rule for a two-dimensional mask,
                else column numbers.
        """
        visible, position_ids, starts = self._context(
            input_ids, mask, position_ids, None, in_blocks=False
        )
        last, _ = self.encode(input_ids, visible, position_ids)
        return self._head(aligned(last, self.spec.shift, starts=starts))

    @property
    def graph_safe(self) -> bool:
        """See :attr:`Backbone.graph_safe <lit_dlm.backbones.base.Backbone.graph_safe>`."""
        from torch.distributed.fsdp import FSDPModule

        if not (self.cuda_graphs and runs_graphs(self.device)):
            return False
        rope = (self.architecture.rope_scaling or {}).get("rope_type")
        obstacles = {
            "sharded weights are gathered to new places": any(
                isinstance(part, FSDPModule) for part in self.modules()
            ),
            "autocast casts weights anew": not self.is_half and is_autocast(self.device),
            "products of 4-bit weights are bitsandbytes' own": self.is_4bit,
            # Where they are tokens, a decode has them in its canvas.
            "pictures are looked up on the host": self.vision is not None
            and self.spec.text_vocab_size is None,
            "rotary frequencies depend on the length": rope == "dynamic",
        }
        for reason in (reason for reason, is_met in obstacles.items() if is_met):
            explain_eager(reason)
        return not any(obstacles.values())

    @property
    def sequences_from(self) -> int | None:
        """Number of keys from which windows are best described by sequences; ``None``: never."""
        return sequences_from(
            self.attn_implementation,
            self.device,
            self._compute_dtype(),
            num_heads=self.architecture.kv_heads,
        )

    @property
    def _groups(self) -> int:
        """Query heads that share a key head."""
        return self.architecture.num_heads // self.architecture.kv_heads

    def _compute_dtype(self) -> torch.dtype:
        """Dtype of products: that of autocast where it is on."""
        device = self.device
        return torch.get_autocast_dtype(device.type) if is_autocast(device) else self.dtype

    def head(self, rows: Tensor) -> Tensor:
        """Returns logits ``(..., V)`` of aligned rows ``(..., D)``, ``-inf`` at forbidden ids."""
        # In place: this saves a copy of the logits, which the head's backward does not need.
        return self._head(rows).index_fill_(-1, self._forbidden, float("-inf"))

    def score_tokens(self, rows: Rows, **options: Any) -> TokenStats:
        """Returns cross-entropy, entropy and log-probability of chosen tokens; keeps no logits.

        Training uses this in place of :meth:`denoise`: the prediction is the same, but only the
        scored slots pass the head, a chunk at a time (:mod:`lit_dlm.tensors.fused_head`), in
        float32. There is one entry per scored slot, row by row; a forbidden target has infinite
        cross-entropy. Differentiable. ``canvas[rows.scored] = stats.ce`` puts entries back on a
        canvas.
        """
        return self.score_with_hidden(rows, **options)[0]

    def score_with_hidden(
        self,
        rows: Rows,
        *,
        forbidden_ids: Sequence[int] | None = None,
        id_range: tuple[int, int | None] = (0, None),
        temperature: float = 1.0,
    ) -> tuple[TokenStats, Tensor]:
        """As :meth:`score_tokens`; also returns aligned rows ``(N, D)`` after the final norm.

        ``forbidden_ids``, by default ``spec.forbidden_ids``, have no probability, nor do ids
        outside ``id_range`` (its end excluded), as in sampling
        (:meth:`Sampler.id_range <lit_dlm.decoding.Sampler.id_range>`).
        """
        # As indices: the host waits for them once, before the forward starts.
        scored = rows.scored.nonzero(as_tuple=True)
        hidden = self._hidden(rows, scored)
        weight: Tensor = self.model.lm_head.weight
        known = range(self.vocab_size)[slice(*id_range)]
        if len(known) < self.vocab_size:
            weight = weight[slice(*id_range)]
        forbidden = self.spec.forbidden_ids if forbidden_ids is None else forbidden_ids
        stats = token_stats(
            hidden,
            weight,
            rows.targets[scored] - known.start,
            logit_scale=self.spec.logit_scale / temperature,
            forbidden_ids=[number - known.start for number in forbidden if number in known],
        )
        return stats, hidden

    @torch.no_grad()
    def top_tokens(self, rows: Rows) -> Tensor:
        """Returns ``(N,)`` int64: the most probable token of every scored slot, row by row."""
        hidden = self.encode_rows(rows)
        return top_ids(hidden, self.model.lm_head.weight, forbidden_ids=self.spec.forbidden_ids)

    def encode_rows(self, rows: Rows) -> Tensor:
        """Returns the hidden rows of :meth:`score_with_hidden`, for heads other than the own."""
        return self._hidden(rows, rows.scored.nonzero(as_tuple=True))

    def _hidden(self, rows: Rows, scored: tuple[Tensor, ...]) -> Tensor:
        visible, position_ids, starts = self._context(
            rows.ids, rows.mask, rows.position_ids, rows.response_start
        )
        last, _ = self.encode(rows.ids, visible, position_ids, pictures=rows.pictures)
        if rows.predictors is not None:
            return last[scored[0], rows.predictors.expand(len(rows.ids), -1)[scored]]
        return aligned(last, self.spec.shift, starts=starts)[scored]

    def _context(
        self,
        ids: Tensor,
        mask: Tensor | BlockMask | None,
        position_ids: Tensor | None,
        response_start: int | None,
        *,
        in_blocks: bool = True,
    ) -> tuple[Tensor | BlockMask | None, Tensor | None, Tensor | None]:
        """Returns who sees whom, position ids, and where rows start if that matters."""
        # A mask of pairs says all: neither blocks nor positions are derived from it.
        if isinstance(mask, BlockMask):
            return mask, position_ids, None
        if mask is not None and mask.ndim != 2:
            if mask.ndim != 4 or mask.dtype != torch.bool:
                got = f"{mask.dtype} {tuple(mask.shape)}"
                refuse("mask", "(B, L), or a boolean (B, 1, L, L)", got)
            # A query without any key would get NaN from the softmax, which spreads to all rows.
            return with_own_key(mask), position_ids, None
        visible = None if mask is None else key_visibility(mask)
        if in_blocks:
            visible = attention_visibility(
                self.spec, ids, pad_mask=mask, response_start=response_start
            )
        if mask is None:
            return visible, position_ids, None
        if position_ids is None:
            position_ids = position_ids_for(mask, self.spec.positions)
        # Without a shift every row predicts its own token, wherever a text starts.
        return visible, position_ids, first_column(mask) if self.spec.shift else None

    def encode(
        self,
        ids: Tensor,
        visible: Tensor | BlockMask | None,
        position_ids: Tensor | None,
        *,
        hidden_layers: Sequence[int] = (),
        cache: WindowCache | None = None,
        kept: Tensor | None = None,
        pictures: Sequence[str] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layers over a canvas, or over some columns of it against cached keys and values.

        Args:
            ids: ``(B, W)`` int64 tokens of the columns; ``(1, T)`` where the cache's plan packs
                windows of different widths. So are ``position_ids``.
            visible: ``(B, 1, 1 or W, K)`` bool for the ``K`` keys that the cache returns and ``W``
                queries (with a packing, the width of its grid), ``True`` where the query may see
                the key; ``None`` if it sees all, or those of the plan's sequences.
            cache: a cache whose plan is that of this forward.
            kept: ``(B, K)`` int64 offsets in the window whose last rows are wanted; all by default.

        Returns *raw* rows, not aligned: ``(B, W or K, D)`` after the final norm, and snapshots
        ``(B, W, H, D)`` if requested; ``(1, T, ...)`` with a packing.
        """
        self.convert()
        decoder, end = self.model.model, self.num_layers
        for index in hidden_layers:
            within(f"[{-end - 1}, {end}]", hidden_layers=index)
        layers = [index % (end + 1) for index in hidden_layers]
        plan: dict[str, Any] = {}
        if cache is not None:
            plan["packing"] = cache.plan.packing
            plan[cache_argument(decoder.__class__)] = cache
            if cache.plan.sequences is not None:
                plan["sequences"] = cache.plan.sequences.grouped(self._groups)
        # A snapshot of the last layer needs all columns.
        if kept is not None and end not in layers:
            plan["kept"] = kept
        snapshots: dict[int, Tensor] = {}
        inputs = {"input_ids": ids}
        if self.vision is not None:
            # Noted here: the embedding is not called as a module, so its hook would not run.
            snapshots[0] = self.vision.embed(ids, decoder.embed_tokens, pictures)
            inputs = {"inputs_embeds": snapshots[0]}
        # Hooks rather than transformers' own capture: only the requested layers stay in memory.
        parts = [decoder.embed_tokens, *decoder.layers]
        handles = [
            parts[index].register_forward_hook(
                lambda _module, _args, output, index=index: snapshots.update({index: output})
            )
            for index in set(layers) - {end, *snapshots}
        ]
        try:
            last = decoder(
                **inputs,
                attention_mask=self._mask(visible, is_window=cache is not None),
                position_ids=position_ids,
                use_cache=cache is not None,
                **plan,
            ).last_hidden_state
        finally:
            # A hook that an error left behind would keep the activations of all later forwards.
            for handle in handles:
                handle.remove()
        snapshots[end] = last
        if kept is not None and "kept" not in plan:
            last = gather_rows(last, kept)
        hidden = torch.stack([snapshots[index] for index in layers], dim=2) if layers else None
        return last, hidden

    def _mask(
        self, visible: Tensor | BlockMask | None, *, is_window: bool
    ) -> Tensor | BlockMask | None:
        """Returns the mask in the form that the layers' attention takes."""
        if visible is None or isinstance(visible, BlockMask):
            return visible
        # Training keeps transformers' order of summation.
        if is_window or (visible.shape[2] == 1 and not torch.is_grad_enabled()):
            # On a CPU, wide windows are as fast with heads apart, which need no copies of the mask.
            is_apart = self.device.type == "cpu" and visible.shape[2] >= _WIDE
            groups = 1 if is_apart else self._groups
            return added_mask(visible, groups=groups, dtype=self._compute_dtype())
        return visible

    def _head(self, rows: Tensor) -> Tensor:
        logits = self.model.lm_head(rows)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale


def load_backbone(
    path_or_id: str | Path,
    *,
    dtype: DType | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attn_implementation: AttentionRoute = "auto",
    lora: LoRASettings | None = None,
    adapter: str | Path | None = None,
    load_in_4bit: bool = False,
    vision: VisionSettings | None = None,
    spec_overrides: dict[str, Any] | None = None,
) -> HFBackbone:
    """Loads a frozen backbone for decoding, in evaluation mode; with ``lora``, one to train.

    Calling it with ``(input_ids, mask=None, position_ids=None)`` returns logits ``(B, L, V)`` whose
    row ``i`` predicts token ``i``, see :meth:`HFBackbone.forward`. Weights are read straight to
    ``device``; the other options are those of :class:`HFBackbone`.
    """
    # Weights are read straight to the device; the move below is for what is made on the host.
    with torch.device(device):
        backbone = HFBackbone(
            str(path_or_id),
            dtype=dtype,  # type: ignore[arg-type]
            attn_implementation=attn_implementation,
            lora=lora,
            adapter=None if adapter is None else str(adapter),
            load_in_4bit=load_in_4bit,
            vision=vision,
            spec_overrides=spec_overrides,
        )
    # A trainer does not change the mode, and evaluation mode has no dropout.
    return backbone.to(device).train(lora is not None)
