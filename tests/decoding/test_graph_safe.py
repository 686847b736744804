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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lit_dlm
import lit_dlm.decoding as d
from lit_dlm import lockstep
from lit_dlm.decoding import BlockWindow, CommitPolicy, Decoder
from lit_dlm.decoding.caches import Forwards
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.step import Decision, advance, decide, needs
from lit_dlm.decoding.windows import SteppedBlockWindow, Window
from lit_dlm.tensors import batches
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.decoding.models import scorer, tiny_backbone

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(file: str, name: str) -> Any:
    return run_path(str(EXAMPLES / f"{file}.py"))[name]()


BLOCKS = {"window": BlockWindow(4)}
ALONE = {"quota": d.NoQuota()}
FEW: dict[str, Any] = {"policy": d.ThresholdPolicy(0.1), **ALONE}
THIRDS = d.FractionLayout([d.Region(name=name, fraction=0.3) for name in "abc"])
REGIONS: dict[str, Any] = {**ALONE, "layout": THIRDS}
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
    "jacobi": {**REGIONS, "policy": lockstep.JacobiPolicy(tau=0.1)},
    "gauss-seidel": {**REGIONS, "policy": lockstep.GaussSeidelPolicy(tau=0.1)},
    "lagged": {**REGIONS, "policy": lockstep.LaggedPolicy(tau=0.1), "quota": d.BudgetQuota(6)},
    "bonus": {**REGIONS, "policy": lockstep.BonusPolicy(tau=0.15)},
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


class Recorded(TorchDispatchMode):
    """Refuses what the capture of a graph refuses: reads, uploads, shapes that follow values."""

    reads = (
        *("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2"),
        *("unique_dim", "unique_consecutive", "repeat_interleave", "lift_fresh"),
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_search = name.startswith("index") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2])
        )
        assert not is_search, name
        assert name not in self.reads
        result = func(*args, **(kwargs or {}))
        # On a device of its own, nothing from the host takes part.
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        assert len({tensor.device for tensor in (*tensors, *made) if tensor.ndim}) < 2, name
        return result


def _decoder(case: str, backbone: Any) -> Decoder:
    parts = CASES[case]
    if case.startswith("tracelock"):
        options = {"temperature": 1.0, "max_accept_per_step": None} if "drawn" in case else {}
        policy = TraceLockPolicy(scorer=scorer(backbone, spread=8.0), threshold=0.5, **options)
        parts = {**parts, "policy": policy}
    return Decoder(**parts).on(backbone.spec)


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


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_reads_nothing_decides_the_same(case: str, monkeypatch: pytest.MonkeyPatch):
    backbone = tiny_backbone(edits_tokens=True)
    decoder = _decoder(case, backbone)
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


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_uploaded_after_the_first_step(case: str):
    backbone = tiny_backbone(edits_tokens=True)
    decoder = _decoder(case, backbone)
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


def _shipped(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield from _shipped(kind)
        if kind.__module__.startswith("lit_dlm.") and not inspect.isabstract(kind):
            yield kind


def test_every_policy_window_and_quota_is_among_the_cases():
    for module in pkgutil.walk_packages([*lit_dlm.__path__], "lit_dlm."):
        if module.name.split(".")[1] in ("decoding", "tracelock", "lockstep"):
            import_module(module.name)
    tried = {type(part) for parts in CASES.values() for part in parts.values()}
    for base in (CommitPolicy, Window, Quota):
        assert not {*_shipped(base)} - tried - {TraceLockPolicy}
        assert not base.graph_safe


def test_what_a_graph_cannot_hold_is_not_safe():
    assert not d.Sampler(top_k=5).graph_safe
    assert not d.Sampler(top_p=0.9).graph_safe
    # Its share is one of all rows, and those that have ended leave a batch only without graphs.
    assert not lockstep.BonusPolicy(batch_wide=True).graph_safe


def test_a_class_from_outside_says_itself_that_it_is_safe():
    class Reading(d.ThresholdPolicy):
        def is_sure(self, prob: Tensor) -> Tensor:
            return prob >= min(self.threshold, float(prob.amax()))

    class Plain(d.ThresholdPolicy):
        graph_safe = True

    class Bonus(lockstep.BonusPolicy): ...

    assert not Reading().graph_safe
    assert not Bonus().graph_safe
    assert Plain().graph_safe
