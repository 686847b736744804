"""The acceptance network: for each masked position, should its proposal become final now?

A small bidirectional transformer over the features of all visible positions of one state. The
weights of the release (arXiv 2605.24697) come without code: widths, depths and heads are the
published ones, the order of normalisation and the place of the threshold token are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from lit_dlm.system.options import at_least, refuse, within
from lit_dlm.tensors.sampling import top_quota

_MAX_LENGTH = 256
"""Rows of the learned table of positions; later offsets share the last one."""


class PositionState(IntEnum):
    """What a position of the canvas is before a step."""

    PROMPT = 0  # left of the response
    LOCKED = 1  # in the response and no longer masked (written, or given from the start)
    GEN = 2  # in the response and masked


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """Architecture of :class:`AcceptanceHead`; the sizes default to those of arXiv 2605.24697."""

    width: int = 384  # Model width; a multiple of 2 * num_heads
    num_layers: int = 5  # Encoder layers
    num_heads: int = 8  # Attention heads
    ffn_width: int = 768  # Inner width of the feed-forward layers
    dropout: float = 0.1  # Dropout inside the encoder layers
    positions: Literal["frontier", "learned"] = "frontier"
    """``frontier``: sinusoids of the distance to the leftmost masked position, any length;
    ``learned``: a table over response offsets as in the release."""
    use_state_embedding: bool = True
    """Add an embedding of prompt, locked or masked (off in the release)."""

    def __post_init__(self) -> None:
        of = "AcceptanceConfig."
        at_least(1, of=of, width=self.width, num_heads=self.num_heads, ffn_width=self.ffn_width)
        within("[1, 1000]", of=of, num_layers=self.num_layers)
        if self.width % (2 * self.num_heads):
            wanted = f"a multiple of 2 * num_heads = {2 * self.num_heads}"
            refuse("AcceptanceConfig.width", wanted, self.width)
        within("[0, 1)", of=of, dropout=self.dropout)


@dataclass(frozen=True)
class AcceptanceOutput:
    """What the network says about each state of a batch."""

    logits: Tensor  # (B, R) float32 acceptance logits
    tau: Tensor  # (B,) float32 learned threshold

    @property
    def decision_logits(self) -> Tensor:
        """``(B, R)`` logits minus ``tau``: their sigmoid is compared with the threshold."""
        return self.logits - self.tau[:, None]


class AcceptanceHead(nn.Module):
    """Network over the features of one state.

    Rows (``R``) are canvas columns in order: the response, or prompt and response.
    """

    def __init__(self, num_features: int, config: AcceptanceConfig | None = None) -> None:
        """Takes ``num_features`` (``F``) per position."""
        super().__init__()
        config = config or AcceptanceConfig()
        self.num_features = num_features
        self.config = config
        self.in_proj = nn.Linear(num_features, config.width)
        if config.positions == "learned":
            self.position_table = nn.Embedding(_MAX_LENGTH + 1, config.width)
        if config.use_state_embedding:
            self.state_table = nn.Embedding(len(PositionState), config.width)
        self.threshold_token = nn.Parameter(torch.randn(config.width) * 0.02)
        sizes = (config.width, config.num_heads, config.ffn_width, config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(*sizes) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.logit_head = nn.Linear(config.width, 1)
        self.tau_head = nn.Linear(config.width, 1)
        # The threshold is 0 until it is trained: the first decisions are those of the logits alone.
        nn.init.zeros_(self.tau_head.weight)
        nn.init.zeros_(self.tau_head.bias)

    def forward(self, features: Tensor, state: Tensor, visible: Tensor) -> AcceptanceOutput:
        """Scores every position of a batch of states.

        Args:
            features: ``(B, R, F)`` of any floating type; computed in float32. In evaluation they
                may be packed: ``(N, F)``, one row per ``True`` of ``visible``, state by state; only
                these are computed then. It saves most of the work if few positions are visible,
                but needs their number on the host, so it is for the CPU.
            state: ``(B, R)`` int64 :class:`PositionState` of each position.
            visible: ``(B, R)`` bool; other positions (padding, right of the window) are not
                attended to, and their outputs mean nothing (0 if the features are packed).
        """
        if features.ndim == 2:
            return self._packed(features.float(), state, visible)
        # Features that are not visible may be anything, even NaN: they must not reach a product.
        features = features.float().masked_fill(~visible[..., None], 0.0)
        x = self._embed(features, state, self._positions(state, visible))
        # The threshold token has no position and is always attended to, so that a state without
        # visible positions has a softmax over something.
        x = torch.cat([self.threshold_token.expand(len(x), 1, -1), x], dim=1)
        attend = torch.cat([torch.ones_like(visible[:, :1]), visible], dim=1)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, attend)
        x = self.final_norm(x)
        logits = self.logit_head(x[:, 1:]).squeeze(-1).float()  # lower precision under autocast
        return AcceptanceOutput(logits=logits, tau=self.tau_head(x[:, 0]).squeeze(-1).float())

    def _packed(self, features: Tensor, state: Tensor, visible: Tensor) -> AcceptanceOutput:
        """:meth:`forward` on ``(N, F)`` features of the visible positions."""
        index = visible.flatten().nonzero().squeeze(1)
        logits = features.new_zeros(visible.shape)
        positions = self._positions(state, visible).flatten()[index]
        x = self._embed(features, state.flatten()[index], positions)
        # Linear layers run over visible rows alone; only attention needs a rectangle.
        packing = Packing.of(visible)
        x = torch.cat([self.threshold_token.expand(len(visible), -1), x])
        for layer in self.layers:
            x = layer(x, packing.attend, packing)
        x = self.final_norm(x)
        logits.view(-1)[index] = self.logit_head(x[len(visible) :]).squeeze(-1).float()
        tau = self.tau_head(x[: len(visible)]).squeeze(-1).float()
        return AcceptanceOutput(logits=logits, tau=tau)

    def _positions(self, state: Tensor, visible: Tensor) -> Tensor:
        """``(B, R)`` int64 table indices or distances, by the configuration's ``positions``."""
        if self.config.positions == "learned":
            return response_offsets(state)
        # Relative to the first mask: what matters is how far behind it a proposal is, and a decode
        # of any length has seen these distances in training.
        return frontier_distance((state == PositionState.GEN) & visible)

    def _embed(self, features: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.in_proj(features)
        if self.config.positions == "learned":
            x = x + self.position_table(positions)
        else:
            x = x + sinusoids(positions, self.config.width)
        if self.config.use_state_embedding:
            x = x + self.state_table(state)
        return x


def accepted(
    logits: Tensor, candidates: Tensor, *, threshold: float, max_accept: int | None = None
) -> Tensor:
    """``(B, R)`` bool: which candidates a row accepts in one step; a row may be empty.

    Args:
        logits: ``(B, R)`` floating point decision logits.
        threshold: smallest probability with which a candidate is accepted.
        max_accept: most acceptances of a row, which keeps the best ones; ``None`` for no cap.
    """
    accept = candidates & (logits >= as_logit(threshold))
    return accept if max_accept is None else top_quota(logits, accept, max_accept)


@cache
def as_logit(threshold: float) -> float:
    """Returns what decision logits are compared with, for a probability."""
    # Not the other way round: a sigmoid in float32 cannot tell a logit of 17 from 18.
    return torch.logit(torch.tensor(threshold, dtype=torch.float64)).item()


def response_offsets(state: Tensor) -> Tensor:
    """``(B, R)`` int64 rows of the learned table: 0 in the prompt, ``1 + offset`` after it."""
    in_response = state != PositionState.PROMPT
    return (in_response.long().cumsum(1) * in_response).clamp_max(_MAX_LENGTH)


def frontier_distance(is_gen: Tensor) -> Tensor:
    """``(B, R)`` int64 signed distance to the leftmost of the ``(B, R)`` bool masked positions.

    0 at the frontier, negative left of it. Without masks, the frontier is the first position.
    """
    frontier = is_gen.to(torch.uint8).argmax(1)
    return torch.arange(is_gen.shape[1], device=is_gen.device) - frontier[:, None]


def sinusoids(distance: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of signed distances (arXiv 1706.03762, section 3.5).

    ``(..., width)`` float32: sines, then cosines, of wavelengths ``2 pi`` to ``20000 pi`` in
    geometric progression.
    """
    half = width // 2
    exponent = torch.arange(half, device=distance.device, dtype=torch.float32)
    frequency = torch.exp(exponent * (-math.log(10000.0) / max(half - 1, 1)))
    angle = distance[..., None].float() * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


@dataclass(frozen=True)
class Packing:
    """Maps packed rows to the padded ones that attention needs, and back.

    Packed rows are the ``B`` threshold tokens, then all visible positions. Padded, a state's ``K``
    rows are its threshold token, then its visible positions, then fillers.
    """

    padded: Tensor  # (B, K) int64 packed row of each padded one; any row for a filler
    packed: Tensor  # (B + N,) int64 padded row of each packed one, as an index into (B * K,)
    attend: Tensor  # (B, 1, 1, K) bool: False on fillers

    @classmethod
    def of(cls, visible: Tensor) -> Packing:
        """Returns the packing of ``(B, R)`` bool visible positions; waits for their number."""
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
    """Pre-norm self-attention and feed-forward with GELU."""

    # Written out because the fused inference path of ``nn.TransformerEncoderLayer`` returns other
    # numbers in evaluation mode than in training mode, and compacts padded batches.

    def __init__(self, width: int, num_heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, ffn_width), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, attend: Tensor, packing: Packing | None = None) -> Tensor:
        """Maps ``(B, K, width)``, or ``(B + N, width)`` with a packing; ``attend`` (B, 1, 1, K)."""
        qkv = self.qkv(self.norm_attention(x))
        if packing is not None:
            qkv = qkv[packing.padded]
        B, N = qkv.shape[:2]
        width = x.shape[-1]
        heads = qkv.view(B, N, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, N, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attend, dropout_p=dropout
        )
        mixed = mixed.transpose(1, 2).reshape(B, N, width)
        if packing is not None:
            mixed = mixed.view(-1, width)[packing.packed]
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.ffn(self.norm_ffn(x)))
