"""The one decode loop, its plugs, caches and observers."""

from lit_dlm.decoding.caches import BlockCache, CacheScheme, DualCache, NoCache, PrefixCache
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import DecodeSettings, decode
from lit_dlm.decoding.observers import Observer
from lit_dlm.decoding.policies import (
    CommitPolicy,
    ConfidencePolicy,
    DynamicPolicy,
    EntropyBoundedPolicy,
    EntropyPolicy,
    MarginPolicy,
    RandomPolicy,
    SequentialPolicy,
    ThresholdPolicy,
)
from lit_dlm.decoding.quotas import EvenQuota, FixedQuota, NoQuota, Quota, ScheduleQuota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    Proposal,
    Selection,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.windows import BlockWindow, FullWindow, SlidingWindow, Window

__all__ = [
    "BlockCache",
    "BlockWindow",
    "CacheScheme",
    "Canvas",
    "CommitPolicy",
    "ConfidencePolicy",
    "DecodeResult",
    "DecodeSettings",
    "DecodeState",
    "Decoder",
    "DualCache",
    "DynamicPolicy",
    "EntropyBoundedPolicy",
    "EntropyPolicy",
    "EvenQuota",
    "FixedQuota",
    "FullWindow",
    "MarginPolicy",
    "NoCache",
    "NoQuota",
    "Observer",
    "PrefixCache",
    "Proposal",
    "Quota",
    "RandomPolicy",
    "Sampler",
    "ScheduleQuota",
    "Selection",
    "SequentialPolicy",
    "SlidingWindow",
    "StepRecord",
    "ThresholdPolicy",
    "Window",
    "decode",
    "prompt_canvas",
]
