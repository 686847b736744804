"""Cached decoding, slowly: one unpadded row and one layer at a time, no cache class.

Keys and values lie in plain tensors by layer; a pass over columns ``[a, b)`` writes them there and
attends to ``[0, kv_end)``. Only weights are taken from the model.
"""

import torch
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding of ``(W, heads, d)``."""
    d = x.shape[-1]
    angles = positions[:, None].float() * theta ** (-torch.arange(0, d, 2).float() / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class SlowRow:
    """One row's keys and values; what no pass has written is no number."""

    def __init__(self, backbone: HFBackbone, length: int) -> None:
        self.backbone, config = backbone, backbone.architecture
        shape = (backbone.num_layers, length, config.kv_heads, config.head_width)
        self.keys, self.values = torch.full((2, *shape), torch.nan)

    @torch.no_grad()
    def run(self, ids: Tensor, a: int, b: int, kv_end: int) -> Tensor:
        """Raw last hidden rows of columns ``[a, b)``."""
        decoder, config = self.backbone.model.model, self.backbone.architecture
        positions = torch.arange(a, b)
        x = decoder.embed_tokens(ids[a:b])
        for layer, keys, values in zip(decoder.layers, self.keys, self.values, strict=True):
            attention, h = layer.self_attn, rms(x, layer.input_layernorm)
            q, k, v = (
                getattr(attention, f"{name}_proj")(h).view(b - a, -1, config.head_width)
                for name in "qkv"
            )
            if hasattr(attention, "q_norm"):
                q, k = rms(q, attention.q_norm), rms(k, attention.k_norm)
            q, k = (rotate(t, positions, config.rope_theta) for t in (q, k))
            keys[a:b], values[a:b] = k, v
            repeat = config.num_heads // config.kv_heads
            k, v = (kept[:kv_end].repeat_interleave(repeat, 1) for kept in (keys, values))
            scores = torch.einsum("ihd,jhd->ihj", q, k) / config.head_width**0.5
            rows = torch.einsum("ihj,jhd->ihd", scores.softmax(-1), v)
            x = x + attention.o_proj(rows.flatten(1))
            x = x + layer.mlp(rms(x, layer.post_attention_layernorm))
        return rms(x, decoder.norm)

    def probs(self, rows: Tensor) -> Tensor:
        logits = self.backbone.model.lm_head(rows)
        logits[..., list(self.backbone.spec.forbidden_ids)] = -torch.inf
        return logits.softmax(-1)


def choose(probs: dict[int, Tensor], quota: int, threshold: float | None) -> list[int]:
    """Columns to commit: all over the threshold, at least the ``quota`` best (or the best)."""
    ranked = sorted(probs, key=lambda j: (-float(probs[j].max()), j))
    over = 0 if threshold is None else sum(float(p.max()) >= threshold for p in probs.values())
    return ranked[: max(quota, over, 1)]


@torch.no_grad()
def slow_decode(
    backbone: HFBackbone,
    prompt: list[int],
    *,
    response: int,
    block: int,
    scheme: str,
    horizon: int | None = None,
    steps_per_block: int | None = None,
    threshold: float | None = None,
) -> tuple[list[int], int]:
    """Final response and number of forwards under the semantics of a scheme."""
    mask, shift, start = backbone.spec.mask_id, backbone.spec.shift, len(prompt)
    ids = torch.tensor(prompt + [mask] * response)
    T, forwards = len(ids), 0
    row = SlowRow(backbone, T)
    for s in range(start, T, block):
        e = min(s + block, T)
        masks, step, carried = e - s, 0, None
        while (ids[s:e] == mask).any():
            masked = [j for j in range(s, e) if ids[j] == mask]
            quota = 0
            if steps_per_block is not None:
                quota = masks // steps_per_block + (step < masks % steps_per_block)
            if step == 0:
                a, hidden = 0, row.run(ids, 0, T, T)
            else:
                prefix_end = T if horizon is None else min(e + horizon, T)
                a, end = s, {"prefix": prefix_end, "dual": e}[scheme]
                hidden = row.run(ids, s, end, T if scheme == "dual" else end)
            if shift and step == 0:
                carried = hidden[s - 1]
            probs = {}
            for j in masked:
                source = j - shift - a
                probs[j] = row.probs(carried if source < 0 else hidden[source])
            chosen = choose(probs, quota, threshold)
            for j in [s] if shift and step == 0 else chosen:
                ids[j] = probs[j].argmax()
            step += 1
            forwards += 1
    return ids[start:].tolist(), forwards


def slow_visibility(prompt: int, length: int, size: int) -> Tensor:
    """The prompt sees itself, each block everything before its end."""
    seen = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for query in range(length):
        end = prompt
        while query >= end:
            end += size
        seen[..., query, :end] = True
    return seen
