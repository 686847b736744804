"""The one decode loop, its four plugs and its observers."""

from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import DecodeSettings, decode
from lit_dlm.decoding.observers import Observer
from lit_dlm.decoding.policies import (
    CommitPolicy,
    ConfidencePolicy,
    EntropyPolicy,
    MarginPolicy,
    RandomPolicy,
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
    "BlockWindow",
    "Canvas",
    "CommitPolicy",
    "ConfidencePolicy",
    "DecodeResult",
    "DecodeSettings",
    "DecodeState",
    "Decoder",
    "EntropyPolicy",
    "EvenQuota",
    "FixedQuota",
    "FullWindow",
    "MarginPolicy",
    "NoQuota",
    "Observer",
    "Proposal",
    "Quota",
    "RandomPolicy",
    "Sampler",
    "ScheduleQuota",
    "Selection",
    "SlidingWindow",
    "StepRecord",
    "ThresholdPolicy",
    "Window",
    "decode",
    "prompt_canvas",
]
