"""Decoders for rows that come and go: every kind of window, quota, policy and cache."""

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow
from lit_dlm.decoding.windows import SteppedBlockWindow
from tests.decoding.models import in_blocks

FULL = {"policy": d.ThresholdPolicy(0.15), "quota": d.NoQuota()}
BLOCK = {"policy": d.DynamicPolicy(0.15), "quota": d.EvenQuota(steps_per_block=4)}
CASES = {
    "plain": ({}, FULL),
    "shifted": ({"shift": 1}, FULL),
    "arange": ({"positions": "arange"}, FULL),
    "warm": ({}, {**FULL, "sampler": d.Sampler(temperature=1.0, top_k=9)}),
    "random": ({}, {"policy": d.RandomPolicy(), "quota": d.FixedQuota(5)}),
    "scheduled": ({}, {"policy": d.ConfidencePolicy(), "quota": d.ScheduleQuota(5)}),
    "entropy": (
        {},
        {"policy": d.EntropyPolicy(), "quota": d.FixedQuota(2), "window": BlockWindow(5)},
    ),
    "sliding": (
        {},
        {"policy": d.MarginPolicy(), "quota": d.ScheduleQuota(5), "window": d.SlidingWindow(4)},
    ),
    "stopped": ({}, {**FULL, "settings": d.DecodeSettings(eos_rule="stop", max_steps=4)}),
    "klass": ({}, {**FULL, "policy": d.KLASSPolicy(0.05, max_kl=0.5), "window": BlockWindow(6)}),
    "klass, cached": (
        {"shift": 1},
        {
            "policy": d.KLASSPolicy(0.05, max_kl=0.5, history=1),
            "quota": d.NoQuota(),
            "window": BlockWindow(5),
            "cache": d.DualCache(),
        },
    ),
    "wino": ({}, {**FULL, "policy": d.WINOPolicy(0.2), "window": BlockWindow(6)}),
    "wino, stepped": (
        {},
        {**FULL, "policy": d.WINOPolicy(0.2), "window": SteppedBlockWindow(6, steps=24)},
    ),
    "remdm": (
        {},
        {
            "policy": d.ReMDMPolicy(2, loop_steps=3),
            "window": BlockWindow(5),
            "cache": d.DualCache(),
        },
    ),
    "edited": (
        {**in_blocks("sequence"), "edits_tokens": True},
        {
            "policy": d.TokenEditingPolicy(0.02, edit_threshold=0.0, max_post_steps=3),
            "quota": d.NoQuota(),
            "cache": d.BlockCache(),
        },
    ),
    "parts of blocks": (
        {**in_blocks("sequence"), "block_size": 8},
        {
            **FULL,
            "window": BlockWindow(4, origin="sequence"),
            "cache": d.SubBlockCache(),
        },
    ),
    "pipeline": (
        {**in_blocks("response"), "whole_prompt": True},
        {**FULL, "window": d.PipelineWindow(4, add_at=0.5), "cache": d.BlockCache()},
    ),
    "credit": ({}, {**FULL, "policy": d.CreditPolicy(0.2, alpha=2.0), "window": BlockWindow(5)}),
    "prefix": ({}, {**FULL, "window": BlockWindow(5), "cache": d.PrefixCache()}),
    "dual": ({"shift": 1}, {**FULL, "window": BlockWindow(5), "cache": d.DualCache()}),
    **{
        f"blocks of the {origin}": (
            in_blocks(origin),
            {**BLOCK, "window": BlockWindow(4, origin=origin), "cache": d.BlockCache()},
        )
        for origin in ("sequence", "response")
    },
}
"""Changes of the small backbone, and the parts of the decoder."""
