"""Counts what a step asks of a GPU, without one: launches, bytes, waits and mixed devices.

The decode loop and the training steps run on meta tensors at the sizes of released models: every
shape, branch and transfer is real and nothing is computed. ``meta`` takes the place of the GPU, so
an operation that mixes CPU and meta tensors is a mistake that a GPU would refuse or wait for. What
the host reads of a batch is made up. Training runs as shipped, in bf16-mixed: the casts of autocast
count, those of weights once per step.

In the roofline, a launch takes as long as its bytes or its arithmetic, whichever is longer, at 4.0
TB/s and 700 TFLOP/s (float32: 50), about what an H200 gives in practice. Attention counts whole
tiles of 128 queries by 64 keys for each sequence and head that the kernel treats separately; under
a mask it counts three times, since the only kernel with masks is that much slower than the flash
kernel. Where launches are the bottleneck, at 5 to 10 microseconds each, their number is the time.

Steps of a decode with a cache are counted twice: as the host launches them one by one, and as CUDA
graphs, which a stand-in records and replays. Then the host launches what is outside of the graph,
the replay included.

    python benchmarks/launches.py
    python benchmarks/launches.py --json
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import measurement
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_dlm.backbones.base import BackboneSpec, Denoised
from lit_dlm.backbones.cache import CachedCanvas
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Canvas,
    ConfidencePolicy,
    Decoder,
    DecodeResult,
    DecodeSettings,
    DecodeState,
    DualCache,
    Sampler,
    SlidingWindow,
    StepRecord,
    decode,
)
from lit_dlm.decoding.batch import Batch
from lit_dlm.decoding.state import RUNNING, STEP_LIMIT, initial_state
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule
from lit_dlm.rl.batch import RolloutBatch, Tokens
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.tensors import fused_head, graphs, precision
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.states import StateBatch
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import States

T = TypeVar("T")
_LOOK = Batch.look
DREAM, SDAR = "Dream-org/Dream-v0-Instruct-7B", "JetLM/SDAR-8B-Chat"
SDAR_4B, LLADA2 = "JetLM/SDAR-4B-Chat", "inclusionAI/LLaDA2.0-mini"
BANDWIDTH = 4.0e12
"""Bytes/s."""
PEAK: dict[torch.dtype | None, float] = {torch.bfloat16: 700e12, torch.float16: 700e12}
"""FLOP/s; 50e12 for other dtypes."""
MASKED_SLOWDOWN = 3

_VIEWS = {
    "view", "_unsafe_view", "_reshape_alias", "transpose", "permute", "expand", "slice", "select",
    "unsqueeze", "squeeze", "t", "as_strided", "detach", "alias", "unflatten", "split",
    "split_with_sizes", "unbind", "diagonal", "unfold", "lift_fresh", "empty", "empty_like",
    "empty_strided", "new_empty",
}  # fmt: skip
_GATHERS = {"embedding", "gather", "index", "index_select"}
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
_READS = (Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.item)


@dataclass
class Counts:
    """Sums over the operations of one or more steps."""

    launches: int = 0
    """By the host: a graph's own are :attr:`inside`."""
    inside: int = 0
    """Launches of the graphs that were replayed."""
    looks: int = 0
    """Those of :attr:`launches` that were for a look."""
    bytes: float = 0.0
    seconds: float = 0.0
    """By the roofline."""
    waits: Counter[str] = field(default_factory=Counter)
    """Operations for which the host waits for the device."""
    mixed: Counter[str] = field(default_factory=Counter)
    """Operations on tensors of both devices."""
    by_name: Counter[str] = field(default_factory=Counter)
    """Launches of each operation."""
    bytes_by_name: Counter[str] = field(default_factory=Counter)
    tile_flops: float = 0.0
    """Of attention, in whole tiles."""

    def add(
        self, name: str, size: float, flops: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        """Counts a launch that moves ``size`` bytes and takes ``flops`` operations."""
        self.launches += 1
        self.by_name[name] += 1
        self.bytes += size
        self.bytes_by_name[name] += int(size)
        self.seconds += max(size / BANDWIDTH, flops / PEAK.get(dtype, 50e12))


class _Operations(TorchDispatchMode):
    """Counts what reaches the device."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in inputs + outputs):
            self.counter.see(name, inputs, outputs, kwargs)
        return result


class LaunchCounter(TorchFunctionMode):
    """Counts operations on meta tensors while it is entered.

    Args:
        answer: returns what the host reads where it asks for the values of a tensor.
        num_true: true entries found wherever a boolean tensor is searched for them.
    """

    def __init__(self, answer: Callable[[Tensor], Any], *, num_true: int = 0) -> None:
        super().__init__()
        self.num_true = num_true
        self.counts = Counts()
        self.ranges: dict[str, list[int]] = {}
        """Ranges of the sequences in attention, see ``CachedCanvas._ranges``."""
        self._answer = answer
        self._operations = _Operations(self)

    def __enter__(self) -> LaunchCounter:
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._operations.__exit__(*exception)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and args[0].is_meta:
            self.counts.waits[func.__name__] += 1
            return self._answer(args[0])
        if func in (Tensor.nonzero, torch.nonzero) and args[0].is_meta:
            return self._positions(args[0], **kwargs)
        if func is Tensor.__getitem__ and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            indices: list[Any] = []
            for one in index:
                is_mask = isinstance(one, Tensor) and one.dtype == torch.bool
                indices += self._positions(one, as_tuple=True) if is_mask else [one]
            return func(args[0], tuple(indices))
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return self._attention(*args[:3], **kwargs)
        if func is F.rms_norm and args[0].is_meta:  # one kernel on a GPU
            return _Kernel.apply(self, "rms_norm", 2 * _size(args[0]), 0.0, *args[:1])
        return func(*args, **kwargs)

    def _positions(self, mask: Tensor, as_tuple: bool = False) -> Any:
        """Returns the positions of the true entries, for whose number the host waits."""
        self.counts.waits["nonzero"] += 1
        self.counts.add("nonzero", _size(mask))
        positions = mask.new_empty(self.num_true, mask.ndim, dtype=torch.long)
        return positions.unbind(1) if as_tuple else positions

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask")
        size = 2 * _size(query) + _size(key) + _size(value)
        heads = query[..., 0, 0].numel()
        flops = 4.0 * heads * query.shape[-1] * _tiles(query.shape[-2], key.shape[-2])
        self.counts.tile_flops += flops
        if mask is not None:
            if mask.dtype == torch.bool:  # first made an additive mask, in every layer
                dense = mask.numel() * query.element_size()
                self.counts.add("mask", _size(mask) + dense)
                size += dense
            else:
                size += _size(mask)
            flops *= MASKED_SLOWDOWN
        return _Kernel.apply(self, "attention", size, flops, query, key, value)

    def see(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], kwargs: dict[str, Any]
    ) -> None:
        """Counts an operation that reaches the dispatcher."""
        devices = {tensor.device.type for tensor in inputs if tensor.ndim}
        if name in ("_to_copy", "copy_"):
            if {tensor.device.type for tensor in inputs[:2] + outputs} == {"cpu", "meta"}:
                if not (kwargs.get("non_blocking") or name == "copy_"):
                    self.counts.waits["copy"] += 1
                self.counts.add("upload", 0)
                return
        elif len(devices) > 1:
            self.counts.mixed[name] += 1
        if name == "nonzero" or (
            name == "index" and any(t.dtype == torch.bool for t in inputs[1:])
        ):
            self.counts.waits[name] += 1
        in_place = name.endswith("_")
        if name in _VIEWS or (
            not in_place and inputs and all(_shares(inputs[0], tensor) for tensor in outputs)
        ):
            return
        written = sum(map(_size, outputs))
        size = sum(map(_size, inputs)) + (0 if in_place else written)
        flops = 0.0
        if name in _GATHERS:
            size = 2 * written
        elif name in ("index_put_", "index_copy_", "scatter_"):
            size = 2 * _size(inputs[-1])
        elif name == "index_fill_":
            size = 0
        elif name in _PRODUCTS:
            left, right = inputs[-2:]
            flops = 2.0 * left.numel() * right.shape[-1]
            size += written * in_place  # what it is added to is read as well
            outputs = [left]  # its dtype decides which cores multiply
        elif name == "_grouped_mm":  # of the experts, those that a row goes to are read
            rows, experts = inputs[:2]
            of_one = _size(experts) // len(experts)
            size = _size(rows) + written + of_one * min(len(rows), len(experts))
            flops = 2.0 * rows.numel() * experts.shape[-1]
        elif name == "_varlen_attn":
            query, key = inputs[:2]
            starts, seen = self.ranges["query_starts"], self.ranges["num_keys"]
            groups = len(query) // starts[-1]
            tiles = sum(
                _tiles(groups * (stop - first), keys)
                for (first, stop), keys in zip(pairwise(starts), seen, strict=True)
            )
            flops = 4.0 * query[0].numel() * tiles
            self.counts.tile_flops += flops
            size = 2 * _size(query) + 2 * sum(seen) * _size(key[0])
        self.counts.add(name, size, flops, outputs[0].dtype if outputs else None)


class _Kernel(torch.autograd.Function):
    """A fused kernel, whose backward moves 2 times the bytes and takes 2.5 times the operations."""

    @staticmethod
    def forward(
        ctx: Any, counter: LaunchCounter, name: str, size: float, flops: float, *inputs: Tensor
    ) -> Tensor:
        ctx.counter, ctx.kernel = counter, (f"{name}_backward", 2 * size, 2.5 * flops)
        ctx.inputs = inputs
        counter.counts.add(name, size, flops, inputs[0].dtype)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.counts.add(*ctx.kernel, ctx.inputs[0].dtype)
        return *[None] * 4, *[torch.empty_like(one) for one in ctx.inputs]


class CountedGraph:
    """Takes the place of a CUDA graph: what its call launches counts as inside, at each replay."""

    counter: ClassVar[LaunchCounter]

    pool = None

    def __init__(self, _pool: object) -> None:
        self._launches = 0

    def record(self, call: Callable[[], T]) -> T:
        outside, inside = self.counter.counts, Counts()
        self.counter.counts = inside
        try:
            result = call()
        finally:
            self.counter.counts = outside
        if inside.waits or inside.by_name["upload"]:
            raise RuntimeError(f"no graph waits or uploads, here {dict(inside.waits)}")
        outside.mixed += inside.mixed
        self._launches = inside.launches
        return result

    def replay(self) -> None:
        self.counter.counts.add("replay", 0)
        self.counter.counts.inside += self._launches


def _size(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's own memory; broadcast dimensions take none."""
    cells = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        cells *= length if stride else 1
    return cells * tensor.element_size()


def _tiles(queries: int, keys: int) -> int:
    """Returns the number of scores that a kernel computes, in whole tiles."""
    return -(-queries // 128) * 128 * (-(-keys // 64) * 64)


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def meta_backbone(release: str, **options: Any) -> HFBackbone:
    """Returns the model of a key of :data:`~tests.twins.RELEASES` without its weights."""
    architecture = measurement.released_architecture(release)
    with torch.device("meta"):
        return HFBackbone(architecture=architecture, dtype="bfloat16", **options).eval()


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """A batch in the middle of its responses; every step fills a cell of each row."""

    release: str
    components: dict[str, Any]
    rows: int
    prompt: int
    response: int
    begin: int
    """First masked cell of the response when counting begins."""
    steps: int = 2
    """Steps to count: whole rounds, where rows enter their blocks in turn."""
    is_padded: bool = False
    phases: int = 1
    """One more than the most cells that a row is ahead of another."""
    skipped: int = 2
    """Steps before the counted ones; the first fills the cache, prompts included."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backbone."""


_VARLEN = {"attn_implementation": "varlen"}  # what ``auto`` is on a GPU
_BLOCKS = {"window": BlockWindow(4, origin="sequence"), "cache": BlockCache()}
_WIDE_BLOCKS = {"window": BlockWindow(32, origin="sequence"), "cache": BlockCache()}

CASES = {
    "dream_b1_dual": DecodeCase(
        release=DREAM,
        components={"window": BlockWindow(32), "cache": DualCache()},
        rows=1, prompt=512, response=512, begin=260,
    ),
    "dream_b1_top_p": DecodeCase(
        release=DREAM,
        components={
            "window": BlockWindow(32), "cache": DualCache(),
            "sampler": Sampler(temperature=0.2, top_p=0.95),
        },
        rows=1, prompt=512, response=512, begin=260,
    ),
    "dream_b16_dual": DecodeCase(
        release=DREAM,
        components={"window": BlockWindow(32), "cache": DualCache()},
        rows=16, prompt=512, response=512, begin=256, steps=32, phases=32, options=_VARLEN,
    ),
    "dream_b16": DecodeCase(
        release=DREAM, components={"window": SlidingWindow(128)},
        rows=16, prompt=512, response=512, begin=256,
    ),
    "dream_b16_padded": DecodeCase(
        release=DREAM, components={"window": SlidingWindow(128)},
        rows=16, prompt=512, response=512, begin=256, is_padded=True,
    ),
    "dream_b64_dual": DecodeCase(
        release=DREAM,
        components={"window": BlockWindow(32), "cache": DualCache()},
        rows=64, prompt=128, response=256, begin=128, steps=32, phases=32, options=_VARLEN,
    ),
    "sdar_b1": DecodeCase(
        release=SDAR,
        components=_BLOCKS,
        rows=1, prompt=1024, response=1024, begin=376, steps=4,
    ),
    "sdar_b64": DecodeCase(
        release=SDAR,
        components=_BLOCKS,
        rows=64, prompt=1024, response=1024, begin=376, steps=4, is_padded=True,
        phases=4, options=_VARLEN,
    ),
    "sdar_4b_b1": DecodeCase(
        release=SDAR_4B, components=_BLOCKS,
        rows=1, prompt=1024, response=1024, begin=376, steps=4,
    ),
    "sdar_4b_b64": DecodeCase(
        release=SDAR_4B, components=_BLOCKS,
        rows=64, prompt=1024, response=1024, begin=376, steps=4, is_padded=True,
        phases=4, options=_VARLEN,
    ),
    "llada2_b1": DecodeCase(
        release=LLADA2, components=_WIDE_BLOCKS,
        rows=1, prompt=1024, response=1024, begin=388, options=_VARLEN,
    ),
    "llada2_b64": DecodeCase(
        release=LLADA2, components=_WIDE_BLOCKS,
        rows=64, prompt=1024, response=1024, begin=384, steps=32, is_padded=True,
        phases=32, options=_VARLEN,
    ),
    "sdar_b64_prompts": DecodeCase(
        release=SDAR,
        components=_BLOCKS,
        rows=64, prompt=512, response=1024, begin=0, steps=1, skipped=0, is_padded=True,
        options=_VARLEN,
    ),
}  # fmt: skip


class _Steps:
    """Counts from the end of one step to the end of another, and answers the host's reads."""

    requires: frozenset[str] = frozenset()

    def __init__(self, case: DecodeCase) -> None:
        self.case = case
        self.counter = LaunchCounter(self.answer)
        self.counted = Counts()
        self._asked = 0

    def answer(self, tensor: Tensor) -> Any:
        if tensor.ndim == 0:
            return False
        case = self.case
        if tensor.shape == (2, case.rows):  # a look
            return [[0] * case.rows] * 2
        if tensor.ndim == 2:  # masks and tokens of the prompt
            others = tensor.shape[1] - 2
            return [[case.response, case.prompt, *[row] * others] for row in range(case.rows)]
        return [0] * case.rows  # columns of the first tokens

    def look(self, batch: Batch) -> None:
        """Tells the batch every row's first masked column, as it asks before each step."""
        before = self.counter.counts.launches
        _LOOK(batch)  # to be counted
        self.counter.counts.looks += self.counter.counts.launches - before
        case = self.case
        at = case.prompt + case.begin - case.skipped + self._asked
        is_over = self._asked == case.skipped + case.steps
        self._asked += 1
        batch.first_mask = [at + 7 * row % case.phases for row in range(case.rows)]
        batch.status = [STEP_LIMIT if is_over else RUNNING] * case.rows

    def on_start(self, state: DecodeState) -> None:
        """Drops what was counted while the cache was set up."""
        self.counter.counts = Counts()

    def on_step(self, record: StepRecord) -> None:
        first, last = self.case.skipped - 1, self.case.skipped - 1 + self.case.steps
        if self._asked - 1 in (first, last):  # it looks before every step
            self.counted, self.counter.counts = self.counter.counts, Counts()

    def on_end(self, result: DecodeResult) -> None:
        """All steps are counted."""


def decode_counts(case: DecodeCase, *, graphed: bool = False, **options: Any) -> Counts:
    """Returns the counts of all steps of a case together, for options of the backbone.

    ``graphed`` steps replay a graph: each of its sizes has come up before.
    """
    backbone = meta_backbone(case.release, **{**case.options, **options})
    shape = case.rows, case.prompt + case.response
    canvas = Canvas(
        ids=torch.empty(shape, dtype=torch.long, device="meta"),
        editable=torch.empty(shape, dtype=torch.bool, device="meta"),
        seeds=torch.empty(case.rows, dtype=torch.long, device="meta"),
        start=case.prompt,
        pad_mask=torch.empty(shape, dtype=torch.bool, device="meta") if case.is_padded else None,
    )
    steps = _Steps(case)
    decoder = Decoder(
        policy=ConfidencePolicy(),
        settings=DecodeSettings(max_steps=case.skipped + case.steps),
        **case.components,
    )
    plain = CachedCanvas._ranges

    def watched(*arguments: Any) -> Any:
        ranges = plain(*arguments)
        steps.counter.ranges = ranges or {}
        return ranges

    with (
        steps.counter,
        patch.object(Batch, "look", lambda batch: steps.look(batch)),
        patch.object(CachedCanvas, "_ranges", watched),
        patch.object(CountedGraph, "counter", steps.counter, create=True),
        patch.object(graphs, "CudaGraph", CountedGraph),
        patch.object(graphs, "RECORDED_USE", 1),
        patch("lit_dlm.backbones.hf.runs_graphs", return_value=graphed),
    ):
        decode(backbone, decoder, canvas, [steps])
    return steps.counted


GRAPHED = tuple(
    name for name, case in CASES.items() if "cache" in case.components and case.skipped > 0
)
"""The cases with graphs: of steps or, under a filter, of forwards. Others compute for longer than
the host takes to launch."""


def graph_report(cases: Sequence[str] = GRAPHED) -> dict[str, float]:
    """Returns what a step of these :data:`CASES` asks of the host beside its graph, and within."""
    figures: dict[str, float] = {}
    for name in cases:
        # A graph needs attention without masks.
        counts, steps = decode_counts(CASES[name], graphed=True, **_VARLEN), CASES[name].steps
        figures[f"{name}_inside_graph"] = counts.inside / steps
        figures[f"{name}_outside"] = (counts.launches - counts.looks) / steps
        figures[f"{name}_outside_with_look"] = counts.launches / steps
        figures[f"{name}_uploads"] = counts.by_name["upload"] / steps
        figures[f"{name}_waits"] = counts.waits.total() / steps
    return figures


SAMPLERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=1.0, score_on="filtered"),
    "filtered": Sampler(temperature=1.0, top_k=50, score_on="filtered"),
}
"""``drawn`` samples as dLLM-RL's configurations of block models do."""


def sampling_counts(
    sampler: Sampler, *, rows: int = 64, cells: int = 4, vocab: int = 151_936
) -> Counts:
    """Returns the counts of proposing tokens for a block of every row, from bfloat16 logits."""
    spec = BackboneSpec(family="counted", mask_id=0, pad_id=1, eos_ids=(2,))
    canvas = Canvas(
        ids=torch.empty(rows, 2 * cells, dtype=torch.long, device="meta"),
        editable=torch.empty(rows, 2 * cells, dtype=torch.bool, device="meta"),
        seeds=torch.empty(rows, dtype=torch.long, device="meta"),
        start=cells,
    )
    denoised = Denoised(
        logits=torch.empty(rows, cells, vocab, dtype=torch.bfloat16, device="meta"),
        columns=torch.empty(rows, cells, dtype=torch.long, device="meta"),
    )
    counter = LaunchCounter(lambda _: False)
    with counter:
        state = initial_state(spec, canvas)
        counter.counts = Counts()
        sampler.propose(state, denoised, frozenset())
    return counter.counts


def report(cases: Sequence[str] = tuple(CASES), **options: Any) -> dict[str, Any]:
    """Returns the counts per step of some :data:`CASES`, and figures derived from them."""
    counted = {name: decode_counts(CASES[name], **options) for name in cases}
    figures: dict[str, Any] = {}
    for name, counts in counted.items():
        steps = CASES[name].steps
        figures[f"{name}_launches"] = counts.launches / steps
        figures[f"{name}_roofline_ms"] = 1e3 * counts.seconds / steps
        figures[f"{name}_gigabytes"] = counts.bytes / steps / 1e9
        figures[f"{name}_tile_gflops"] = counts.tile_flops / steps / 1e9
    if "dream_b16_padded" in counted and "dream_b16" in counted:
        figures["dream_b16_padded_bytes_ratio"] = (
            counted["dream_b16_padded"].bytes / counted["dream_b16"].bytes
        )
    figures["host_waits_per_step"] = max(
        # Rows that enter cost one wait, for their prompts.
        counts.waits.total() / CASES[name].steps - (CASES[name].skipped == 0)
        for name, counts in counted.items()
    )
    figures["mixed_devices"] = sum(counts.mixed.total() for counts in counted.values())
    for name, sampler in SAMPLERS.items():
        counts = sampling_counts(sampler)
        figures[f"sampling_{name}_launches"] = counts.launches
        figures[f"sampling_{name}_gigabytes"] = counts.bytes / 1e9
    return figures


# -- training ----------------------------------------------------------------------------------

ROWS, PROMPT, RESPONSE = 8, 256, 256
SUPERVISED = ROWS * RESPONSE // 2
"""Supervised cells of a batch."""


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _responses() -> SupervisedBatch:
    return SupervisedBatch(
        ids=_empty(ROWS, PROMPT + RESPONSE),
        pad_mask=_empty(ROWS, PROMPT + RESPONSE, dtype=torch.bool),
        start=PROMPT,
        num_prompt=_empty(ROWS),
        maskable=_empty(ROWS, RESPONSE, dtype=torch.bool),
        steps=_empty(ROWS, RESPONSE),
        seeds=_empty(ROWS),
        uids=[str(row) for row in range(ROWS)],
    )


def _adapted() -> Any:
    return meta_backbone(DREAM, lora=LoRASettings(rank=16, alpha=16.0, targets="all")).train()


def _fine_tuning(kind: type[SFTModule]) -> Callable[[], Tensor]:
    module: Any = kind(_adapted(), tokenizer="tiny")
    batch = _responses()
    return lambda: module.training_step(batch)


def _tracerl() -> Callable[[], Tensor]:
    module = TraceRLModule(
        _adapted(),
        tokenizer="tiny",
        decoders={"rollout": Decoder(policy=ConfidencePolicy())},
        value=ValueObjective(backbone="lora"),
    ).to("meta")
    states = States(
        response=_empty(ROWS),
        hidden=_empty(ROWS, RESPONSE, dtype=torch.bool),
        supervised=_empty(ROWS, RESPONSE, dtype=torch.bool),
        sample=_empty(ROWS),
    )
    known = ("weight", "kl_weight", "sampled", "advantage", "returns", "old_log_prob", "old_value")
    tokens = Tokens(
        sample=_empty(SUPERVISED),
        response=_empty(SUPERVISED),
        position=_empty(SUPERVISED),
        **{name: _empty(SUPERVISED, dtype=torch.float32) for name in known},
    )
    batch = RolloutBatch(
        responses=_responses(),
        states=states,
        tokens=tokens,
        spec=module.row_spec,
        size=_empty(ROWS, dtype=torch.float64),
        num_slots=ROWS,
        num_rows=float(ROWS),
    )
    return lambda: module.training_step(batch)


def _tracelock() -> Callable[[], Tensor]:
    backbone = meta_backbone(DREAM)
    config = ProjectorConfig(hidden_size=backbone.hidden_size)
    module = TraceLockModule(
        backbone, tokenizer="tiny", projector=Projector(config), head=AcceptanceConfig()
    )
    module.to("meta").train()
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        accumulate_grad_batches=1, world_size=1, global_rank=0, global_step=0
    )
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **kwargs: None)
    rows, length = 64, RESPONSE
    batch = StateBatch(
        ids=_empty(rows, PROMPT + length),
        target=_empty(rows, PROMPT + length),
        masked=_empty(rows, PROMPT + length, dtype=torch.bool),
        pad_mask=_empty(rows, PROMPT + length, dtype=torch.bool),
        is_real=_empty(rows, dtype=torch.bool),
        start=PROMPT,
        mask_id=backbone.spec.mask_id,
        features=_empty(rows, length, module.scorer.head.num_features, dtype=torch.bfloat16),
        proposals=_empty(rows, length),
    )
    return lambda: module.training_step(batch, 0)


TRAINING_CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "sft": lambda: _fine_tuning(SFTModule),
    "tabom": lambda: _fine_tuning(TABOMModule),
    "tracelock": _tracelock,
    "tracerl": _tracerl,
}
"""Adapters of rank 16 on Dream-7B with 8 rows of 512, half of each response supervised; TraceLock's
network on stored features of 64 states; TraceRL with a value model on an adapter of its own."""


class MixedPrecision(TorchFunctionMode):
    """Casts meta tensors, which autocast ignores, as autocast to bfloat16 casts on a GPU.

    The lists are those of torch's ``ATen/autocast_mode.h``, as far as models and losses need them.
    """

    HALF = (
        "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
        "scaled_dot_product_attention",
    )  # fmt: skip
    FULL = (
        "exp", "log", "pow", "__pow__", "rsqrt", "reciprocal", "softplus", "layer_norm", "rms_norm",
        "logsumexp", "softmax", "log_softmax", "sum", "cumsum", "prod", "nll_loss", "mse_loss",
        "binary_cross_entropy_with_logits",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.is_enabled and name in self.HALF + self.FULL:
            to = torch.bfloat16 if name in self.HALF else torch.float32
            args = [self._cast(value, to) for value in args]
            kwargs = {key: self._cast(value, to) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16):
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype != dtype):
            return value.to(dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value.to(dtype)
        return self._weights[id(value)]

    @contextmanager
    def switched(self, _kind: str, *_: Any, enabled: bool = True) -> Iterator[None]:
        """Takes the place of ``torch.autocast``."""
        before, self.is_enabled = self.is_enabled, enabled
        try:
            yield
        finally:
            self.is_enabled = before


def training_counts(case: str) -> Counts:
    """Returns the counts of one step of a case."""
    step = TRAINING_CASES[case]()
    counter = LaunchCounter(_read_of_training, num_true=SUPERVISED)
    mixed = MixedPrecision()
    # Meta takes the place of a GPU, which has tensor cores.
    with (
        patch.object(fused_head, "_has_tensor_cores", return_value=True),
        patch.object(torch, "autocast", mixed.switched),
        patch.object(precision, "is_autocast", lambda _: mixed.is_enabled),
        counter,
    ):
        with mixed:
            loss = step()
        loss.backward()
    return counter.counts


def _read_of_training(tensor: Tensor) -> Any:
    """Answers the host: nothing is broken, the last item is the last row, lists are zeros."""
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        return False
    return ROWS - 1 if tensor.ndim == 0 else [0] * len(tensor)


def training_report() -> dict[str, float]:
    """Returns launches, roofline, gigabytes and waits of every case."""
    figures: dict[str, float] = {}
    for name in TRAINING_CASES:
        counts = training_counts(name)
        figures[f"{name}_launches"] = counts.launches
        figures[f"{name}_roofline_ms"] = 1e3 * counts.seconds
        figures[f"{name}_gigabytes"] = counts.bytes / 1e9
        figures[f"{name}_host_waits"] = counts.waits.total()
        figures[f"{name}_mixed_devices"] = counts.mixed.total()
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts and prints."""
    options = measurement.options(
        __doc__,
        arguments,
        cases=(list(CASES), "of decoding, and no others"),
        operations=(False, "what is launched most, by name"),
    )
    if options.operations:
        for name in options.cases:
            counts, steps = decode_counts(CASES[name]), CASES[name].steps
            print(f"{name}: launches and GB a step; waits {dict(counts.waits)}")
            for operation, launches in counts.by_name.most_common(20):
                size = counts.bytes_by_name[operation] / steps / 1e9
                print(f"  {operation:<24}{launches / steps:>8.1f}{size:>10.3f}")
        return
    figures = report(options.cases)
    figures |= graph_report([name for name in options.cases if name in GRAPHED])
    if options.cases == list(CASES):
        figures |= training_report()
    measurement.tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
