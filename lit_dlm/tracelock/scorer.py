"""Projector, features and network as one object and one folder, made to export and to decode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_dlm.backbones.projection import (
    FeatureSettings,
    Projector,
    ProjectorConfig,
    acceptance_features,
    digest,
    num_features,
)
from lit_dlm.system.files import fitting, read_folder, write_folder
from lit_dlm.system.options import at_least, of_declared_kinds, refuse, within
from lit_dlm.tracelock.network import (
    AcceptanceConfig,
    AcceptanceHead,
    AcceptanceOutput,
    PositionState,
)

FORMAT = "lit-dlm/acceptance"
FORMAT_VERSION = 1

Layout = Literal["generation", "all", "masked"]

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    """What the network is shown, beyond its architecture."""

    layout: Layout = "masked"
    """Rows that the network sees: only the masked positions of the response (``masked``), a third
    to a half of the rows to store and compute, and no less accurate where it was measured; the
    whole response (``generation``); or prompt and response (``all``)."""
    hidden_layers: tuple[int, ...] = (-3, -2, -1)
    """Snapshots, as indices into the backbone's tuple of hidden states."""
    features: FeatureSettings = field(default_factory=FeatureSettings)
    """What the network sees of each position."""


@dataclass(frozen=True, kw_only=True)
class CommitSettings:
    """Which accepted proposals a step commits; by default as in the release of arXiv 2605.24697."""

    threshold: float = 0.99
    """Acceptance probability at or above which a proposal is committed."""
    max_accept_per_step: int | None = 4
    """Most acceptances of a row in one step; ``None`` for no cap."""

    def __post_init__(self) -> None:
        of = f"{type(self).__name__}."
        within("[0, 1]", of=of, threshold=self.threshold)
        at_least(1, of=of, max_accept_per_step=self.max_accept_per_step)


class AcceptanceScorer(nn.Module):
    """Projector and acceptance network in one module: from hidden snapshots to decision logits.

    Args:
        projector: frozen; its number of snapshots must match the hidden layers.
        backbone: facts about the backbone it was trained for (JSON types).
        training: provenance (JSON types); decoding uses only its ``tasks``.
        commits: what the policy was made for; decoders that say nothing else use it.
    """

    def __init__(
        self,
        projector: Projector,
        *,
        head: AcceptanceConfig | None = None,
        settings: ScorerSettings | None = None,
        backbone: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        commits: CommitSettings | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings or ScorerSettings()
        if len(self.settings.hidden_layers) != projector.config.num_snapshots:
            wanted = f"{projector.config.num_snapshots} layers for this projector"
            refuse("ScorerSettings.hidden_layers", wanted, self.settings.hidden_layers)
        self.projector = projector
        self.head = AcceptanceHead(num_features(projector.config, self.settings.features), head)
        self.backbone = dict(backbone or {})
        self.training_facts = dict(training or {})
        self.commits = commits or CommitSettings()

    def features(self, hidden: Tensor, prob: Tensor, **scalars: Tensor | None) -> Tensor:
        """Features ``(..., F)``; see :func:`lit_dlm.backbones.projection.acceptance_features`."""
        return acceptance_features(
            self.projector, hidden, prob, settings=self.settings.features, **scalars
        )

    def forward(self, features: Tensor, state: Tensor, visible: Tensor) -> AcceptanceOutput:
        """Scores states; packed features have a row for each position in :meth:`seen`."""
        output: AcceptanceOutput = self.head(features, state, self.seen(state, visible))
        return output

    def seen(self, state: Tensor, visible: Tensor) -> Tensor:
        """``(B, R)`` bool: which of the visible positions the network sees under the layout."""
        if self.settings.layout == "all":
            return visible
        if self.settings.layout == "masked":
            return visible & (state == PositionState.GEN)
        return visible & (state != PositionState.PROMPT)

    def digest(self) -> str:
        settings = {"head": asdict(self.head.config), "settings": asdict(self.settings)}
        for option in ("hidden", "log_odds"):
            if getattr(self.settings.features, option):
                # As in digests from before the option, which records of decodes name.
                del settings["settings"]["features"][option]
        facts = json.dumps(settings, sort_keys=True) + self.projector.digest()
        return digest(facts, self.head.state_dict())

    def save(self, folder: str | Path) -> None:
        """Writes ``config.json`` and ``model.safetensors`` (float32) into a folder."""
        record = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "head": asdict(self.head.config),
            "settings": asdict(self.settings),
            "projector": asdict(self.projector.config),
            "projector_digest": self.projector.digest(),
            "backbone": self.backbone,
            "training": self.training_facts,
            "commits": asdict(self.commits),
        }
        # In float32 whatever it was trained in: the digest is one of values.
        tensors = {key: value.detach().float() for key, value in self.state_dict().items()}
        write_folder(Path(folder), record, tensors, config=_CONFIG_FILE, weights=_WEIGHTS_FILE)

    @classmethod
    def load(cls, folder: str | Path) -> AcceptanceScorer:
        """Reads a folder written by :meth:`save`; the result is in evaluation mode."""
        folder = Path(folder)
        record, tensors = read_folder(
            folder, config=_CONFIG_FILE, weights=_WEIGHTS_FILE, what="acceptance policy"
        )
        with fitting(folder / _CONFIG_FILE):
            found = (record["format"], record["version"])
            if found != (FORMAT, FORMAT_VERSION):
                raise ValueError(f"expected {FORMAT} version {FORMAT_VERSION}, got {found}")
            stored = record["settings"]
            settings = ScorerSettings(
                layout=stored["layout"],
                hidden_layers=tuple(stored["hidden_layers"]),
                features=FeatureSettings(**stored["features"]),
            )
            with torch.device("meta"):  # sizes of others get no memory before weights fit them
                scorer = cls(
                    Projector(ProjectorConfig(**record["projector"])),
                    head=AcceptanceConfig(**record["head"]),
                    settings=settings,
                    backbone=record["backbone"],
                    training=record["training"],
                    commits=CommitSettings(**record.get("commits", {})),  # older folders have none
                )
            for part in (settings, settings.features, scorer.head.config, scorer.commits):
                of_declared_kinds(part)
            scorer.load_state_dict(tensors, assign=True)
        return scorer.eval()
