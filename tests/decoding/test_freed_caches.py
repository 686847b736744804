"""Caches go with their decode, also where no garbage is collected: each holds gigabytes."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from lightning.pytorch import Callback

from lit_dlm.backbones.cache import WindowCache
from lit_dlm.decoding import BlockCache, CacheScheme, DualCache, PrefixCache
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.toy.word_problems import WordProblems
from tests.rollouts import FAMILIES, decoded, fit, learner, policy, rollout_data

BLOCK, DUAL = (BlockCache(), "block from the sequence"), (DualCache(), "llada")


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


@pytest.mark.parametrize(("cache", "family"), [BLOCK, DUAL, (PrefixCache(), "dream")])
def test_a_decode_leaves_no_cache(cache: CacheScheme, family: str, caches: Caches) -> None:
    backbone = policy(**FAMILIES[family])
    for _ in range(3):
        decoded(backbone, cache=cache)
        assert not caches
    assert caches.made == 3


@pytest.mark.parametrize(("cache", "family"), [BLOCK, DUAL])
def test_rollouts_and_validations_leave_no_cache(
    cache: CacheScheme, family: str, caches: Caches, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    class Looking(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append((len(caches), caches.made))

        on_train_batch_end = on_validation_end = on_train_batch_start

    value = ValueObjective(backbone="lora")
    rl = learner(cache=cache, family=FAMILIES[family], value=value)
    data = rollout_data(prompts_per_step=2, val_tasks=[WordProblems("test", num_examples=2)])
    fit(rl, data, tmp_path, steps=2, callbacks=[Looking()])
    alive, made = zip(*seen, strict=True)
    assert set(alive) == {0}
    assert made[-1] >= 4
