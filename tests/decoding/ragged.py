"""20 ragged prompts, more decoders beside the common ones, and all that their rows get."""

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.decoding.cases import CASES, FULL
from tests.decoding.models import in_blocks, scorer, tiny_backbone
from tests.decoding.states import everything

LENGTHS = [9, 8, 30, 2, 1, 7, 3, 31, 2, 1, 5, 6, 12, 1, 1, 17, 4, 22, 9, 3]
PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate(LENGTHS)]
FOURS = {**FULL, "window": BlockWindow(4)}
FOURS_OF_SEQUENCE = {**FULL, "window": BlockWindow(4, origin="sequence")}
IDLE = d.DecodeSettings(stall_rule="idle", max_steps=6)
ENDING = d.DecodeSettings(eos_rule="fill", eos_gate=True, max_commits_per_step=2)

MORE = {
    "fill gate cap": ({}, {**FOURS, "settings": ENDING}),
    "idle": ({}, {**FULL, "policy": d.ThresholdPolicy(0.5), "settings": IDLE}),
    "drawn 64": (
        {},
        {
            "policy": d.RandomPolicy(),
            "sampler": d.Sampler(temperature=1.0, score_on="filtered", score_dtype="float64"),
        },
    ),
    "remdm 64": (
        {},
        {
            "policy": d.ReMDMPolicy(1, loop_steps=2),
            "window": BlockWindow(6),
            "sampler": d.Sampler(score_dtype="float64"),
        },
    ),
    "edited full": (
        {"edits_tokens": True},
        {**FOURS, "policy": d.TokenEditingPolicy(0.02, edit_threshold=0.0, max_post_steps=2)},
    ),
    "guided": ({}, {**FOURS, "guidance": d.Guidance(scale=1.5, prompt_ids=[7, 8])}),
    "horizon": ({"shift": 1}, {**FOURS, "cache": d.PrefixCache(horizon=3)}),
    "filled blocks": (
        in_blocks("sequence"),
        {
            **FOURS_OF_SEQUENCE,
            "cache": d.BlockCache(),
            "settings": d.DecodeSettings(eos_rule="fill"),
        },
    ),
    "budget": ({}, {**FOURS, "policy": d.ThresholdPolicy(0.2), "quota": d.BudgetQuota(6)}),
    "tracelock": ({}, {"quota": d.NoQuota(), "window": d.SlidingWindow(6)}),
}


def everything_of(case: str) -> dict:
    """Steps, results, records and refills of all rows."""
    changes, components = {**CASES, **MORE}[case]
    backbone = tiny_backbone(**changes)
    if case == "tracelock":
        policy = TraceLockPolicy(
            scorer=scorer(backbone, spread=8.0), threshold=0.5, max_accept_per_step=3
        )
        components = {**components, "policy": policy}
    found, _ = everything(d.Decoder(**components), backbone, PROMPTS, 12, 5)
    return found
