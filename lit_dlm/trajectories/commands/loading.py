"""Models and tokenizers for the commands, by default those that a set's run names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_dlm.backbones.location import embedded_names
from lit_dlm.trajectories.identity import run_of_shard

logger = logging.getLogger(__name__)


def tokenizer_of(shards: Sequence[Path], name: str | None) -> Any:
    """A tokenizer by name, or that of the run.

    Args:
        shards: shards of the set.
        name: embedded name, folder or hub id; ``None`` for what the run names, if that is on this
            machine (nothing is downloaded unless it was asked for).

    Raises:
        ValueError: there is no such tokenizer, or the run names none that is here.
    """
    from lit_dlm.backbones.tokenizer import load_tokenizer

    if name is not None:
        return load_tokenizer(name)
    path = run_of_shard(shards[0])[0].tokenizer.get("path")
    if isinstance(path, str) and (path in embedded_names() or Path(path).is_dir()):
        return load_tokenizer(path)
    raise ValueError(f"--tokenizer: the run's tokenizer {path!r} is not on this machine; name one")
