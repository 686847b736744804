"""Encoder layer of the acceptance network, on padded states and on packed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Packing:
    """Where packed rows stand when attention needs them state by state.

    Packed rows are the ``B`` threshold tokens, then all visible positions. Padded, a state's ``K``
    rows are its threshold token, then its visible positions, then fillers.
    """

    padded: Tensor
    """``(B, K)`` int64 packed row of each padded one; some row or other for a filler."""
    packed: Tensor
    """``(B + N,)`` int64 padded row, counted through, of each packed one."""
    attend: Tensor
    """``(B, 1, 1, K)`` bool: no filler."""

    @classmethod
    def of(cls, visible: Tensor) -> Packing:
        """The packing of ``(B, R)`` bool visible positions; it waits for their number."""
        B = len(visible)
        counts = visible.sum(1)
        last = counts.cumsum(0)
        width = int(counts.max()) + 1
        columns = torch.arange(width - 1, device=visible.device)
        is_row = columns < counts[:, None]
        positions = (B + (last - counts)[:, None] + columns).clamp_max(B + int(last[-1]) - 1)
        starts = torch.arange(B, device=visible.device)[:, None]
        return cls(
            padded=torch.cat([starts, positions], dim=1),
            packed=torch.cat([starts[:, 0] * width, (starts * width + 1 + columns)[is_row]]),
            attend=nn.functional.pad(is_row, (1, 0), value=True)[:, None, None, :],
        )


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward with GELU.

    Written out because the fused inference path of ``nn.TransformerEncoderLayer`` gives other
    numbers in evaluation than in training mode and compacts padded batches.
    """

    def __init__(self, width: int, num_heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, ffn_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(ffn_width, width),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, attend: Tensor, packing: Packing | None = None) -> Tensor:
        """One layer.

        Args:
            x: ``(B, K, width)`` float32; with a packing ``(B + N, width)``.
            attend: ``(B, 1, 1, K)`` bool keys that may be attended to.
            packing: where packed rows stand.

        Returns:
            As ``x``.
        """
        qkv = self.qkv(self.norm_attention(x))
        if packing is not None:
            qkv = qkv[packing.padded]
        B, N = qkv.shape[:2]
        width = x.shape[-1]
        heads = qkv.view(B, N, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, N, width / heads)
        mixed = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attend,
            dropout_p=self.dropout if self.training else 0.0,
        )
        mixed = mixed.transpose(1, 2).reshape(B, N, width)
        if packing is not None:
            mixed = mixed.view(-1, width)[packing.packed]
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.ffn(self.norm_ffn(x)))
