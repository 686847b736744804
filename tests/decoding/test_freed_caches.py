"""Caches go with their decode, also where no garbage is collected: each holds gigabytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

from lit_dlm.backbones.window_cache import WindowCache
from lit_dlm.decoding import BlockCache, CacheScheme, DualCache, PrefixCache
from tests.rollouts import FAMILIES, decoded, policy

SCHEMES: dict[str, tuple[CacheScheme, dict[str, Any]]] = {
    "block": (BlockCache(), FAMILIES["block from the sequence"]),
    "prefix": (PrefixCache(), FAMILIES["dream"]),
    "dual": (DualCache(), FAMILIES["llada"]),
}


class Caches(WeakSet[WindowCache]):
    """Those that are alive, and how many there were."""

    made = 0


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Caches]:
    alive = Caches()
    begin = WindowCache.__init__

    def watched(self: WindowCache, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        alive.add(self)
        alive.made += 1

    monkeypatch.setattr(WindowCache, "__init__", watched)
    gc.collect()
    gc.disable()
    yield alive
    gc.enable()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decode_leaves_no_cache(scheme: str, caches: Caches) -> None:
    cache, family = SCHEMES[scheme]
    backbone = policy(**family)
    for _ in range(3):
        decoded(backbone, cache=cache)
        assert not caches
    assert caches.made == 3
