"""Checks of the parts of a decoder whose steps a CUDA graph is to record."""

import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lit_dlm.decoding as d
from lit_dlm.decoding import CommitPolicy, Decoder
from lit_dlm.decoding.caches import Forwards
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.step import Decision, advance, decide, needs
from lit_dlm.decoding.windows import Window
from lit_dlm.tensors import batches
from tests.decoding.models import tiny_backbone
from tests.graphs import NoHostReads

PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate([9, 2, 5])]


class Recorded(NoHostReads):
    """Also refuses tensors of the host among those of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        values = tree_leaves((args, kwargs, result))
        devices = {one.device for one in values if isinstance(one, Tensor) and one.ndim}
        assert len(devices) < 2, func
        return result


def _begun(decoder: Decoder, backbone: Any) -> d.DecodeState:
    """Three ragged rows, the last of which has nothing to fill."""
    seeds = range(3)
    canvas = d.prompt_canvas(PROMPTS, response_length=12, spec=backbone.spec, seeds=seeds)
    ids = canvas.ids.clone()
    ids[2, canvas.start :] = 11
    return decoder.begin(backbone, replace(canvas, ids=ids))


def _step(state: d.DecodeState, decoder: Decoder, backbone: Any) -> Decision:
    requires, layers = needs(decoder.policy)
    forwards = Forwards(backbone, decoder.policy, layers)
    with torch.no_grad():
        return decide(state, decoder, forwards, requires=requires)


def check_reads_nothing(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a decoder that read nothing on the host decide what others do."""
    backbone = tiny_backbone(edits_tokens=True)
    decoder = Decoder(**parts).on(backbone.spec)
    assert decoder.policy.graph_safe
    assert decoder.window.graph_safe
    assert decoder.quota.graph_safe
    assert not decoder.sampler.is_filtered
    guided = decoder.guided(backbone)
    state = _begun(decoder, backbone)
    for _ in range(8):
        expected = _step(state, decoder, guided)
        after = advance(expected)
        with monkeypatch.context() as patch, Recorded():
            patch.setattr(batches, "FREE_READS", frozenset())
            found = _step(state, decoder, guided)
            found_after = advance(found)
        for name in ("candidates", "commit", "new_ids"):
            assert torch.equal(getattr(found.record, name), getattr(expected.record, name)), name
        for name in ("by_policy", "ended", "kept_open"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))
        for name in ("status", "block", "block_step", "block_masks", "memory"):
            torch.testing.assert_close(getattr(found_after, name), getattr(after, name))
        torch.testing.assert_close(found.record.state.inside, expected.record.state.inside)
        state = after


def check_uploads_nothing(parts: dict[str, Any]) -> None:
    """After the first step nothing of the host is among a device's tensors."""
    backbone = tiny_backbone(edits_tokens=True)
    decoder = Decoder(**parts).on(backbone.spec)
    state = _begun(decoder, backbone)
    backbone = backbone.to("meta")

    def moved(one: Any) -> Any:
        tensors = {name: value for name, value in vars(one).items() if torch.is_tensor(value)}
        return replace(one, **{name: value.to("meta") for name, value in tensors.items()})

    state = moved(state)
    if state.regions is not None:
        state = replace(state, regions=moved(state.regions))
    guided = decoder.guided(backbone)
    state = advance(_step(state, decoder, guided))
    with Recorded():
        advance(_step(state, decoder, guided))


def _shipped(base: type, room: str) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield from _shipped(kind, room)
        if kind.__module__.startswith(room) and not inspect.isabstract(kind):
            yield kind


def check_all_are_tried(room: str, cases: dict[str, dict[str, Any]]) -> None:
    """Every policy, window and quota of a package is in one of the decoders."""
    package = import_module(room)
    for module in pkgutil.walk_packages([*package.__path__], f"{room}."):
        import_module(module.name)
    tried = {type(part) for parts in cases.values() for part in parts.values()}
    for base in (CommitPolicy, Window, Quota):
        assert not {*_shipped(base, room)} - tried
