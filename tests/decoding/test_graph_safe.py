"""Parts of decoders in a step that a CUDA graph can record: nothing read, nothing uploaded."""

import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow, CommitPolicy, Decoder
from lit_dlm.decoding.caches import Forwards
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.step import Decision, advance, decide, needs
from lit_dlm.decoding.windows import SteppedBlockWindow, Window
from lit_dlm.tensors import batches
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.decoding.models import scorer, tiny_backbone
from tests.graphs import NoHostReads

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(file: str, name: str) -> Any:
    return run_path(str(EXAMPLES / f"{file}.py"))[name]()


BLOCKS = {"window": BlockWindow(4)}
ALONE = {"quota": d.NoQuota()}
FEW: dict[str, Any] = {"policy": d.ThresholdPolicy(0.1), **ALONE}
TWO = {"quota": d.FixedQuota(2)}
CASES: dict[str, dict[str, Any]] = {
    "threshold": {"policy": d.ThresholdPolicy(0.1), **BLOCKS, **TWO},
    "dynamic": {"policy": d.DynamicPolicy(0.1), "quota": d.EvenQuota(4)},
    "dynamic, blocks": {"policy": d.DynamicPolicy(0.1), **BLOCKS, "quota": d.EvenQuota(6)},
    "factor": {"policy": d.FactorPolicy(2.0), **BLOCKS, **ALONE},
    "entropies": {"policy": d.EntropyBoundedPolicy(4.0), **BLOCKS, **TWO},
    "eb": {"policy": d.EBSamplerPolicy(3.0), **ALONE},
    "random": {"policy": d.RandomPolicy(), "quota": d.ScheduleQuota(5)},
    "confidence": {"policy": d.ConfidencePolicy(), "quota": d.CosineQuota(4)},
    "noisy": {"policy": d.NoisyConfidencePolicy(4), "quota": d.CosineQuota(4)},
    "entropy": {"policy": d.EntropyPolicy(), **BLOCKS, "quota": d.BudgetQuota(7)},
    "margin": {"policy": d.MarginPolicy(), "quota": d.ScheduleQuota(steps_per_block=3), **BLOCKS},
    "sequential": {"policy": d.SequentialPolicy(), **TWO, "window": BlockWindow(5)},
    "rare": {"policy": d.PCSamplerPolicy("tiny"), **TWO},
    "klass": {"policy": d.KLASSPolicy(0.05, max_kl=0.5), **BLOCKS, **ALONE},
    "credit": {"policy": d.CreditPolicy(0.2), **BLOCKS, **TWO},
    "remdm": {"policy": d.ReMDMPolicy(1, loop_steps=2), **BLOCKS},
    "wino": {"policy": d.WINOPolicy(0.1), **BLOCKS, **ALONE},
    "wino, cut": {"policy": d.WINOPolicy(0.1), **ALONE, "window": BlockWindow(5)},
    "edited": {
        "policy": d.TokenEditingPolicy(0.02, edit_threshold=0.0, max_post_steps=2),
        **BLOCKS,
        **ALONE,
    },
    "tracelock": {**ALONE, "window": d.SlidingWindow(6)},
    "tracelock, drawn": {**ALONE, "window": d.SlidingWindow(6)},
    "sequence": {**FEW, "window": BlockWindow(4, origin="sequence")},
    "stepped": {**FEW, "window": SteppedBlockWindow(4, steps=9)},
    "whole": {**FEW, "window": d.FullWindow()},
    "warm": {**FEW, "sampler": d.Sampler(temperature=0.7, score_on="filtered", top_p=1.0)},
    "words": {**FEW, "sampler": d.Sampler(temperature=1.0, allowed_ids=(5, 80))},
    "float64": {**FEW, "sampler": d.Sampler(score_dtype="float64")},
    "ends": {
        **FEW,
        **BLOCKS,
        "settings": d.DecodeSettings(eos_rule="fill", eos_gate=True, max_commits_per_step=2),
    },
    "an example": {"policy": _example("commit_policy", "SurePrefix"), **BLOCKS, **ALONE},
    "takes back": {"policy": _example("taking_back", "SecondThoughts"), **BLOCKS, **ALONE},
    "guided": {**FEW, **BLOCKS, "guidance": d.Guidance(scale=1.5, prompt_ids=[7, 8, 9])},
}
PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate([9, 2, 5])]


class Recorded(NoHostReads):
    """Also refuses tensors of the host among those of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        values = tree_leaves((args, kwargs, result))
        devices = {one.device for one in values if isinstance(one, Tensor) and one.ndim}
        assert len(devices) < 2, func
        return result


def _parts(case: str) -> dict[str, Any]:
    if not case.startswith("tracelock"):
        return CASES[case]
    options = {"temperature": 1.0, "max_accept_per_step": None} if "drawn" in case else {}
    scores = scorer(tiny_backbone(edits_tokens=True), spread=8.0)
    return {**CASES[case], "policy": TraceLockPolicy(scorer=scores, threshold=0.5, **options)}


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
    assert decoder.sampler.graph_safe
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


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_reads_nothing_decides_the_same(case: str, monkeypatch: pytest.MonkeyPatch):
    check_reads_nothing(_parts(case), monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_uploaded_after_the_first_step(case: str):
    check_uploads_nothing(_parts(case))


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


def test_every_policy_window_and_quota_is_among_the_cases():
    check_all_are_tried("lit_dlm.decoding", CASES)
    check_all_are_tried("lit_dlm.tracelock", {case: _parts(case) for case in CASES})
    for base in (CommitPolicy, Window, Quota):
        assert not base.graph_safe


def test_what_a_graph_cannot_hold_is_not_safe():
    assert not d.Sampler(top_k=5).graph_safe
    assert not d.Sampler(top_p=0.9).graph_safe


def test_a_class_from_outside_says_itself_that_it_is_safe():
    class Reading(d.ThresholdPolicy):
        def is_sure(self, prob: Tensor) -> Tensor:
            return prob >= min(self.threshold, float(prob.amax()))

    class Plain(d.ThresholdPolicy):
        graph_safe = True

    assert not Reading().graph_safe
    assert Plain().graph_safe
