"""Projection of hidden snapshots: the first, frozen stage of the TraceLock features.

One encoder, shared by all snapshots of a step, shortens each of them; a second one shortens the
differences of neighbouring depths. An encoder is a layer normalisation without parameters, followed
by one affine map or by two with a GELU in between. Ours is fitted by principal components; that of
the release (arXiv 2605.24697), an autoencoder trained with unpublished code, can be loaded as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_dlm.config.files import maker
from lit_dlm.system.files import fitting, read_folder, write_folder
from lit_dlm.system.options import refuse, within

_CONFIG_FILE = "projector.json"
_WEIGHTS_FILE = "projector.safetensors"


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """Shape and origin of a :class:`Projector`."""

    hidden_size: int
    """Width ``D`` of the backbone's hidden states."""
    num_snapshots: int = 3
    """Hidden snapshots ``H`` per position."""
    hidden_rank: int = 256
    """Features ``k_h`` kept of each snapshot (at most ``hidden_size``)."""
    delta_rank: int = 32
    """Features ``k_d`` kept of each difference of neighbouring snapshots."""
    kind: Literal["pca", "autoencoder"] = "pca"
    """How the maps were found."""
    inner_width: int = 0
    """Width between two affine maps of the release's encoders; 0 for a single map."""
    norm_eps: float = 1e-6
    """Added to the variance in the layer normalisation; 1e-5, torch's own, in the release."""

    def __post_init__(self) -> None:
        within("[1, 1000]", of="ProjectorConfig.", num_snapshots=self.num_snapshots)
        ranks = {"hidden_rank": self.hidden_rank, "delta_rank": self.delta_rank}
        within(f"[1, {self.hidden_size}]", of="ProjectorConfig.", **ranks)

    def check_positions(self, count: int) -> None:
        needed = max(self.hidden_rank, self.delta_rank)
        if count < needed:
            ranks = f"hidden_rank={self.hidden_rank} and delta_rank={self.delta_rank}"
            hint = "; take more projector_prompts, longer responses or smaller ranks"
            refuse("PCA of hidden states", f"at least {needed} positions for {ranks}", count, hint)

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the feature groups in output order: ``H`` snapshots, then ``H - 1`` deltas."""
        return (self.hidden_rank,) * self.num_snapshots + (self.delta_rank,) * (
            self.num_snapshots - 1
        )


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over a text and the names and float32 bytes of tensors (hexadecimal)."""
    sha = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return sha.hexdigest()


class Projector(nn.Module):
    """Frozen affine maps from hidden snapshots to short feature vectors.

    All tensors are buffers in float32: they follow ``.to(device)`` and are never trained.
    """

    hidden_weight: Tensor
    hidden_bias: Tensor
    delta_weight: Tensor
    delta_bias: Tensor

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.config = config
        D, inner = config.hidden_size, config.inner_width
        for name, rank in (("hidden", config.hidden_rank), ("delta", config.delta_rank)):
            if inner:
                self.register_buffer(f"{name}_inner_weight", torch.zeros(inner, D))
                self.register_buffer(f"{name}_inner_bias", torch.zeros(inner))
            self.register_buffer(f"{name}_weight", torch.zeros(rank, inner or D))
            self.register_buffer(f"{name}_bias", torch.zeros(rank))

    def forward(self, hidden: Tensor) -> Tensor:
        """Projects ``(..., H, D)`` floating point snapshots, depths in ascending order.

        Returns ``(..., H * k_h + (H - 1) * k_d)`` float32: snapshots, then their differences.
        """
        snapshots, deltas = _normalised_snapshots(hidden, eps=self.config.norm_eps)
        if self.config.inner_width:
            snapshots = F.gelu(self._mapped("hidden_inner", snapshots))
            deltas = F.gelu(self._mapped("delta_inner", deltas))
        parts = [self._mapped("hidden", snapshots), self._mapped("delta", deltas)]
        return torch.cat([part.flatten(-2) for part in parts], dim=-1)

    def _mapped(self, name: str, values: Tensor) -> Tensor:
        return F.linear(values, getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias"))

    def digest(self) -> str:
        config = asdict(self.config)
        for option, default in (("inner_width", 0), ("norm_eps", 1e-6)):
            if config[option] == default:
                del config[option]  # as in digests from before the option
        return digest(json.dumps(config, sort_keys=True), dict(self.named_buffers()))

    def save(self, folder: str | Path) -> None:
        record = {"config": asdict(self.config), "digest": self.digest()}
        tensors = dict(self.named_buffers())
        write_folder(Path(folder), record, tensors, config=_CONFIG_FILE, weights=_WEIGHTS_FILE)

    @classmethod
    def load(cls, folder: str | Path) -> Projector:
        """Reads a folder of :meth:`save`, or the file of the TraceLock release's autoencoder.

        The latter is ``best_val_loss.pt`` of the hub id ``BOB12311/tracelock-dream-ae``.
        """
        folder = Path(folder)
        if folder.is_file():
            return read_released(folder)
        if not folder.exists():
            raise ValueError(f"projector folder {folder}: there is no such folder; {maker(folder)}")
        record, tensors = read_folder(
            folder, config=_CONFIG_FILE, weights=_WEIGHTS_FILE, what="projector"
        )
        with fitting(folder / _CONFIG_FILE):
            with torch.device("meta"):  # sizes of others get no memory before weights fit them
                projector = cls(ProjectorConfig(**record["config"]))
            projector.load_state_dict(tensors, assign=True)
        return projector


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a file of ``torch.save`` on the CPU, without running code from it."""
    try:
        stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (torch.serialization.pickle.UnpicklingError, RuntimeError, EOFError, LookupError) as err:
        reason = str(err).split("\n", maxsplit=1)[0]
        raise ValueError(f"{path}: not a checkpoint of tensors ({reason})") from None
    return stored


def read_released(path: Path) -> Projector:
    """Reads the projection autoencoder of the TraceLock release as a projector in float32.

    The code for its weights is unpublished; this assumes that a normalisation with a weight and a
    bias is a layer normalisation, and that an encoder of two maps has a GELU in between.
    """
    stored = read_checkpoint(path)
    with fitting(path):
        state, sizes = stored["projection_state"], stored["autoencoder_config"]
        maps = {
            name: _folded(state[f"{name}_norm"], state[f"{name}_encoder"])
            for name in ("hidden", "delta")
        }
        first = maps["hidden"][0][0]
        config = ProjectorConfig(
            hidden_size=int(sizes["d_model"]),
            hidden_rank=int(sizes["d_hidden_bottleneck"]),
            delta_rank=int(sizes["d_delta_bottleneck"]),
            kind="autoencoder",
            inner_width=len(first) if len(maps["hidden"]) > 1 else 0,
            norm_eps=1e-5,
        )
        projector = Projector(config)
        suffixes = ["_inner", ""] if config.inner_width else [""]
        weights = {}
        for name, layers in maps.items():
            for suffix, (weight, bias) in zip(suffixes, layers, strict=True):
                weights[f"{name}{suffix}_weight"] = weight.float()
                weights[f"{name}{suffix}_bias"] = bias.float()
        projector.load_state_dict(weights)
    return projector


def _folded(norm: dict[str, Tensor], encoder: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns an encoder's affine maps, with the weight and bias of its norm in the first."""
    names = [key.removesuffix("weight") for key in encoder if key.endswith("weight")]
    layers = [
        (encoder[f"{name}weight"].double(), encoder[f"{name}bias"].double()) for name in names
    ]
    # W (g * x + b) + c = (W g) x + (W b + c)
    first, offset = layers[0]
    layers[0] = (first * norm["weight"].double(), first @ norm["bias"].double() + offset)
    return layers


class Autoencoder(nn.Module):
    """Trainable encoders and mirrored decoders of snapshots and deltas.

    This is our reconstruction: the loss is the mean squared error on the normalised snapshots plus
    that on the normalised deltas.
    """

    def __init__(self, config: ProjectorConfig, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.hidden_encoder = nn.Linear(D, config.hidden_rank)
        self.hidden_decoder = nn.Linear(config.hidden_rank, D)
        self.delta_encoder = nn.Linear(D, config.delta_rank)
        self.delta_decoder = nn.Linear(config.delta_rank, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        """Mean squared errors ``hidden`` and ``delta`` of rebuilding ``(N, H, D)`` snapshots."""
        snapshots, deltas = _normalised_snapshots(hidden)
        return {
            "hidden": self._error(snapshots, self.hidden_encoder, self.hidden_decoder),
            "delta": self._error(deltas, self.delta_encoder, self.delta_decoder),
        }

    def _error(self, values: Tensor, encoder: nn.Module, decoder: nn.Module) -> Tensor:
        rebuilt: Tensor = decoder(self.dropout(encoder(values)))
        # A single snapshot has no deltas; their sum is 0.
        return (rebuilt - values).square().sum() / max(values.numel(), 1)

    @torch.no_grad()
    def projector(self) -> Projector:
        """The encoders as a frozen projector, on the CPU."""
        projector = Projector(self.config)
        for name, encoder in (("hidden", self.hidden_encoder), ("delta", self.delta_encoder)):
            getattr(projector, f"{name}_weight").copy_(encoder.weight)
            getattr(projector, f"{name}_bias").copy_(encoder.bias)
        return projector


class PCAFitter:
    """Streaming principal component analysis of normalised snapshots and differences.

    The components of each map are scaled by one common factor that makes the average variance of
    its features 1 on the data it was fitted on.
    """

    def __init__(self, config: ProjectorConfig) -> None:
        self.config = config
        D = config.hidden_size
        self._hidden = _Moments(D)
        self._delta = _Moments(D)

    def update(self, hidden: Tensor) -> None:
        """Adds ``(N, H, D)`` snapshots of ``N`` positions."""
        snapshots, deltas = _normalised_snapshots(hidden.detach())
        self._hidden.add(snapshots.reshape(-1, self.config.hidden_size))
        self._delta.add(deltas.reshape(-1, self.config.hidden_size))

    def finish(self) -> Projector:
        self.config.check_positions(self._hidden.count // self.config.num_snapshots)
        projector = Projector(self.config)
        self._hidden.solve(projector.hidden_weight, projector.hidden_bias)
        if self._delta.count:  # a single snapshot has no neighbours
            self._delta.solve(projector.delta_weight, projector.delta_bias)
        return projector


class _Moments:
    """Count, sum and second moment of rows, in float64 on the CPU."""

    # Float64, so that the result does not depend on how rows are split into updates.

    def __init__(self, width: int) -> None:
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64)
        self.second = torch.zeros(width, width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        rows = rows.to("cpu", torch.float64)
        self.count += rows.shape[0]
        self.total += rows.sum(0)
        self.second += rows.T @ rows

    def solve(self, weight: Tensor, bias: Tensor) -> None:
        """Fills in ``(rank, D)`` scaled directions by descending variance, and their offset."""
        rank = len(weight)
        mean = self.total / self.count
        # In float64, as this difference cancels where the mean is large.
        covariance = self.second / self.count - torch.outer(mean, mean)
        variance, directions = torch.linalg.eigh(covariance)
        top = torch.arange(variance.numel() - 1, variance.numel() - 1 - rank, -1)
        variance, directions = variance[top].clamp_min(0.0), directions[:, top].T
        # The sign of an eigenvector is arbitrary: its largest entry is made positive.
        peak = directions.abs().argmax(dim=1, keepdim=True)
        directions = directions * directions.gather(1, peak).sign()
        scale = variance.mean().clamp_min(1e-12).rsqrt()
        weight.copy_(directions * scale)
        bias.copy_(-((directions * scale) @ mean))


def _normalised_snapshots(hidden: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Layer-normalised snapshots ``(..., H, D)`` and differences of neighbours, float32."""
    hidden = hidden.float()
    width = (hidden.shape[-1],)
    # After the conversion: neighbouring depths are alike, and half precision would cancel.
    deltas = hidden[..., 1:, :] - hidden[..., :-1, :]
    return F.layer_norm(hidden, width, eps=eps), F.layer_norm(deltas, width, eps=eps)


LOG_ODDS_LIMIT = 10.0
"""Bound of the log-odds feature: a probability within 4.5e-5 of 0 or 1 saturates it."""


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What a policy sees of a position: projected hidden snapshots, then scalars."""

    entropy: bool = True
    """Append the entropy of the proposal distribution, in nats."""
    margin: bool = True
    """Append the log-odds of the proposal's margin over the second-best token."""
    hidden: bool = True
    """Begin with the projected snapshots; without them a policy sees only scalars, as in
    arXiv 2512.09106."""
    log_odds: bool = True
    """Append the log-odds of the proposal's probability; without, the probability itself, as in
    the release of TraceLock."""

    @property
    def scores(self) -> frozenset[str]:
        """Names of the scalars besides the probability."""
        return frozenset(name for name in ("entropy", "margin") if getattr(self, name))


def feature_groups(projector: ProjectorConfig, settings: FeatureSettings) -> tuple[int, ...]:
    """Sizes of groups with one int8 scale: ``k_h`` a snapshot, ``k_d`` a delta, 1 a scalar."""
    hidden = projector.groups if settings.hidden else ()
    return hidden + (1,) * (1 + settings.entropy + settings.margin)


def num_features(projector: ProjectorConfig, settings: FeatureSettings) -> int:
    """Features ``F`` per position: 833 for the widths of arXiv 2605.24697 and no extras."""
    return sum(feature_groups(projector, settings))


def log_odds(prob: Tensor) -> Tensor:
    """Clipped log-odds ``log p - log(1 - p)`` in float32, of any shape."""
    # A probability near 1 saturates in half precision (0.9998 and 1 are neighbours there).
    return torch.logit(prob.float()).clamp(-LOG_ODDS_LIMIT, LOG_ODDS_LIMIT)


def acceptance_features(
    projector: Projector,
    hidden: Tensor,
    prob: Tensor,
    *,
    settings: FeatureSettings,
    entropy: Tensor | None = None,
    margin: Tensor | None = None,
) -> Tensor:
    """Returns the features of each position of a state, before anything is committed in it.

    Args:
        hidden: ``(..., H, D)`` aligned snapshots: entry ``i`` belongs to token ``i``.
        prob: ``(...)`` probability of the proposed token at temperature 1, unfiltered.
        entropy: ``(...)`` nats; needed when ``settings.entropy``.
        margin: ``(...)`` best minus second-best probability; needed when ``settings.margin``.

    Returns:
        ``(..., F)`` float32: projected snapshots, projected deltas, ``prob`` or its log-odds, then
        the extras. Scalars that are not finite (positions without a proposal) become 0.
    """
    scalars = [log_odds(prob) if settings.log_odds else prob.float()]
    if settings.entropy:
        assert entropy is not None
        scalars.append(entropy.float())
    if settings.margin:
        assert margin is not None
        scalars.append(log_odds(margin))
    stacked = torch.nan_to_num(torch.stack(scalars, dim=-1), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.cat([projector(hidden), stacked], dim=-1) if settings.hidden else stacked
