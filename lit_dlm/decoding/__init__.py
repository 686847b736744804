"""The one decode loop, its components, caches and observers."""

from lit_dlm.decoding.batch import NotANumberError as NotANumberError
from lit_dlm.decoding.caches import (
    BlockCache as BlockCache,
    CacheScheme as CacheScheme,
    DualCache as DualCache,
    NoCache as NoCache,
    PrefixCache as PrefixCache,
    SubBlockCache as SubBlockCache,
)
from lit_dlm.decoding.decoder import Decoder as Decoder, DecodeSettings as DecodeSettings
from lit_dlm.decoding.guidance import Guidance as Guidance
from lit_dlm.decoding.layout import (
    FixedLayout as FixedLayout,
    FractionLayout as FractionLayout,
    Layout as Layout,
    MarkerLayout as MarkerLayout,
    PictureLayout as PictureLayout,
    TemplateLayout as TemplateLayout,
)
from lit_dlm.decoding.loop import decode as decode, decode_queue as decode_queue
from lit_dlm.decoding.pipeline import PipelineWindow as PipelineWindow
from lit_dlm.decoding.policies.base import (
    CommitPolicy as CommitPolicy,
    ConfidencePolicy as ConfidencePolicy,
    DynamicPolicy as DynamicPolicy,
    EBSamplerPolicy as EBSamplerPolicy,
    EntropyBoundedPolicy as EntropyBoundedPolicy,
    EntropyPolicy as EntropyPolicy,
    FactorPolicy as FactorPolicy,
    MarginPolicy as MarginPolicy,
    NoisyConfidencePolicy as NoisyConfidencePolicy,
    RandomPolicy as RandomPolicy,
    SequentialPolicy as SequentialPolicy,
    ThresholdPolicy as ThresholdPolicy,
)
from lit_dlm.decoding.policies.calibrated import PCSamplerPolicy as PCSamplerPolicy
from lit_dlm.decoding.policies.editing import TokenEditingPolicy as TokenEditingPolicy
from lit_dlm.decoding.policies.history import (
    CreditPolicy as CreditPolicy,
    KLASSPolicy as KLASSPolicy,
)
from lit_dlm.decoding.policies.remdm import ReMDMPolicy as ReMDMPolicy
from lit_dlm.decoding.policies.wino import WINOPolicy as WINOPolicy
from lit_dlm.decoding.quotas import (
    BudgetQuota as BudgetQuota,
    CosineQuota as CosineQuota,
    EvenQuota as EvenQuota,
    FixedQuota as FixedQuota,
    NoQuota as NoQuota,
    Quota as Quota,
    ScheduleQuota as ScheduleQuota,
)
from lit_dlm.decoding.region_fill import FillCurves as FillCurves, RegionFill as RegionFill
from lit_dlm.decoding.regions import (
    PlacedRegion as PlacedRegion,
    PlacedRegions as PlacedRegions,
    Region as Region,
)
from lit_dlm.decoding.sampler import Sampler as Sampler
from lit_dlm.decoding.state import (
    Canvas as Canvas,
    DecodeResult as DecodeResult,
    DecodeState as DecodeState,
    Observer as Observer,
    Proposal as Proposal,
    Selection as Selection,
    StepRecord as StepRecord,
    prompt_canvas as prompt_canvas,
)
from lit_dlm.decoding.windows import (
    BlockWindow as BlockWindow,
    FullWindow as FullWindow,
    SlidingWindow as SlidingWindow,
    Window as Window,
)
