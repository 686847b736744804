"""The one decode loop, its plugs, caches and observers."""

from lit_dlm.decoding.caches import BlockCache, CacheScheme, DualCache, NoCache, PrefixCache
from lit_dlm.decoding.decoder import Decoder, decode_prompts
from lit_dlm.decoding.engine import DecodeSettings, NotANumberError, decode
from lit_dlm.decoding.guidance import Guidance
from lit_dlm.decoding.layout import (
    FixedLayout,
    FractionLayout,
    Layout,
    MarkerLayout,
    PictureLayout,
    TemplateLayout,
)
from lit_dlm.decoding.policies import (
    BonusPolicy,
    CommitPolicy,
    ConfidencePolicy,
    DynamicPolicy,
    EntropyBoundedPolicy,
    EntropyPolicy,
    GaussSeidelPolicy,
    JacobiPolicy,
    LaggedPolicy,
    MarginPolicy,
    NoisyConfidencePolicy,
    RandomPolicy,
    SequentialPolicy,
    ThresholdPolicy,
)
from lit_dlm.decoding.quotas import (
    BudgetQuota,
    CosineQuota,
    EvenQuota,
    FixedQuota,
    NoQuota,
    Quota,
    ScheduleQuota,
)
from lit_dlm.decoding.region_fill import FillCurves, RegionFill, lockstep_score
from lit_dlm.decoding.regions import Block, BlockLayout, Region
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    Observer,
    Proposal,
    Selection,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.windows import BlockWindow, FullWindow, SlidingWindow, Window
