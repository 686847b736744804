"""Parts of decoders in a step that a CUDA graph can record: nothing read, nothing uploaded."""

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow, CommitPolicy
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.windows import SteppedBlockWindow, Window
from lit_dlm.tracelock.forks import ForkedPolicy
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.decoding.graph_checks import (
    check_all_are_tried,
    check_reads_nothing,
    check_uploads_nothing,
)
from tests.decoding.models import scorer, tiny_backbone

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
    "tracelock, forked": {**ALONE, **BLOCKS},
    "sequence": {**FEW, "window": BlockWindow(4, origin="sequence")},
    "pipeline": {**FEW, "window": d.PipelineWindow(4, add_at=0.5, full_at=0.75)},
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


def _parts(case: str) -> dict[str, Any]:
    if not case.startswith("tracelock"):
        return CASES[case]
    is_drawn = "drawn" in case or "forked" in case
    options = {"temperature": 1.0, "max_accept_per_step": None} if is_drawn else {}
    scores = scorer(tiny_backbone(edits_tokens=True), spread=8.0)
    policy = TraceLockPolicy(scorer=scores, threshold=0.5, **options)
    if "forked" in case:
        policy = ForkedPolicy.of(policy)
        policy.changed = torch.tensor([[0, 1], [1, 2], [2, 5]])
    return {**CASES[case], "policy": policy}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_reads_nothing_decides_the_same(case: str, monkeypatch: pytest.MonkeyPatch):
    check_reads_nothing(_parts(case), monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_uploaded_after_the_first_step(case: str):
    check_uploads_nothing(_parts(case))


def test_every_policy_window_and_quota_is_among_the_cases():
    check_all_are_tried("lit_dlm.decoding", CASES)
    check_all_are_tried("lit_dlm.tracelock", {case: _parts(case) for case in CASES})
    for base in (CommitPolicy, Window, Quota):
        assert not base.graph_safe


def test_what_a_graph_cannot_hold_is_not_safe():
    assert d.Sampler(top_k=5).is_filtered
    assert d.Sampler(top_p=0.9).is_filtered


def test_a_class_from_outside_says_itself_that_it_is_safe():
    class Reading(d.ThresholdPolicy):
        def is_sure(self, prob: Tensor) -> Tensor:
            return prob >= min(self.threshold, float(prob.amax()))

    class Plain(d.ThresholdPolicy):
        graph_safe = True

    assert not Reading().graph_safe
    assert Plain().graph_safe
