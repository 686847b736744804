"""Checks a GPU in ten minutes: random weights at released sizes, no downloads.

Prints a line per check: PASS or FAIL with its limit, or INFO. Numbers are compared with float32 on
the CPU; times with the chip's limits, if its data sheet is known (``benchmarks/decode.py``). The
exit status is 1 if a check fails.

    python benchmarks/gpu.py                     # models of 4 to 16 B, on the first GPU
    python benchmarks/gpu.py --parts graphs speed   # some parts, these in three minutes
    python benchmarks/gpu.py --folder /tmp/gpu   # also real_size.py's commands, on Dream-7B there
    python benchmarks/gpu.py --smoke             # small sizes on any device; times have no limits
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import launches
import real_size
import torch
from decode import PEAKS
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from measurement import median_seconds, released_architecture, synchronize
from torch.nn.functional import cross_entropy

from lit_dlm.backbones.base import Rows, Span
from lit_dlm.backbones.cache import CachedCanvas, WindowCache
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.visibility import block_numbers
from lit_dlm.commands.memory import GRAPH
from lit_dlm.datamodules.rollouts import RolloutDataModule
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
    DynamicPolicy,
    EntropyPolicy,
    EvenQuota,
    Observer,
    Proposal,
    Sampler,
    Selection,
    SlidingWindow,
    StepRecord,
    decode,
    decode_queue,
    prompt_canvas,
)
from lit_dlm.decoding.state import QueueObserver
from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.tensors import graphs
from lit_dlm.tensors.fused_head import token_stats
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.training.sharding import ShardedStrategy, decoding_weights
from lit_dlm.trajectories.capture import TrajectoryCapture

DREAM, LLADA, LLADA2, SDAR = (
    "Dream-org/Dream-v0-Instruct-7B",
    "GSAI-ML/LLaDA-8B-Instruct",
    "inclusionAI/LLaDA2.0-mini",
    "JetLM/SDAR-4B-Chat",
)
PARTS = ("numbers", "sequences", "decoding", "graphs", "speed", "training", "reinforcement")
_SMALL: dict[str, Any] = {
    "vocab_size": 1200, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mask_id": 3, "pad_id": 0, "eos_ids": (1,),
    "bos_id": None, "forbidden_ids": (),
}  # fmt: skip
_TINY_VOCABULARY: dict[str, Any] = {
    "vocab_size": 462, "mask_id": 2, "pad_id": 0, "eos_ids": (1, *range(400, 440)), "bos_id": None,
    "forbidden_ids": (0, 3, 4),
}  # fmt: skip
"""The embedded tokenizer's; a tenth of it ends a response, so rows end at different steps."""
_BLOCKS: dict[str, Any] = {
    "window": BlockWindow(4, origin="sequence"),
    "quota": EvenQuota(steps_per_block=4),
    "cache": BlockCache(),
}
_DUAL = Decoder(policy=ConfidencePolicy(), window=BlockWindow(32), cache=DualCache())
_DRAWN = Decoder(
    policy=DynamicPolicy(0.9), sampler=Sampler(temperature=1.0, score_on="filtered"), **_BLOCKS
)
_EXPERTS = Decoder(
    policy=ConfidencePolicy(), window=BlockWindow(32, origin="sequence"), cache=BlockCache()
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all checks; exits with status 1 if one fails, or there is no GPU and no ``--smoke``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes on any device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--folder", type=Path, help="receives 15 GB of weights, and runs on them")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU is visible; --smoke tries the script without one")
    checks = Checks(smoke=options.smoke)
    gc.disable()  # whatever holds a cache must be freed without it
    for part in options.parts:
        try:
            getattr(checks, part)()
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            checks.failed.append(part)
            print(f"FAIL  {part}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
    gc.enable()
    if options.folder is not None:
        checks.commands(options.folder)
    print("failed:", ", ".join(checks.failed) or "nothing")
    raise SystemExit(bool(checks.failed))


def _num_caches() -> int:
    return sum(type(one) is WindowCache for one in gc.get_objects())


class Checks:
    """The checks by topic; ``smoke`` means small sizes, and no limits on times."""

    def __init__(self, *, smoke: bool) -> None:
        self.smoke = smoke
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.failed: list[str] = []
        self.others = _num_caches()  # of the caller of this script
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        print(f"INFO  {name}, torch {torch.__version__}")
        self.bandwidth, self.compute = next(
            (peaks for key, peaks in PEAKS.items() if key in name), (float("nan"), float("nan"))
        )

    def tell(
        self, name: str, value: float, *, most: float | None = None, is_time: bool = False
    ) -> None:
        """Prints a line and keeps the name of a check that fails.

        The value is NaN where the chip's data sheet is unknown; times have no limit at small sizes.
        """
        if math.isnan(value) or (is_time and self.smoke):
            most = None
        verdict = "INFO" if most is None else "PASS" if value <= most else "FAIL"
        if verdict == "FAIL":
            self.failed.append(name)
        limit = "" if most is None else f" (at most {most:g})"
        print(f"{verdict}  {name}: {value:.4g}{limit}", flush=True)

    def model(
        self,
        release: str,
        sizes: Mapping[str, Any] = MappingProxyType({}),
        *,
        layers: int | None = None,
        dtype: str = "bfloat16",
        **options: Any,
    ) -> HFBackbone:
        """Returns random weights on the device, with a release's sizes except for those given."""
        architecture = released_architecture(release)
        if self.smoke:
            architecture = replace(architecture, **_SMALL)
            if (experts := architecture.experts) is not None:
                few = replace(experts, number=16, per_token=4, width=32)
                architecture = replace(architecture, experts=few)
        architecture = replace(
            architecture, **{"num_layers": layers or architecture.num_layers, **sizes}
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))  # never takes twice the size
        try:
            with torch.device(self.device):
                backbone = HFBackbone(architecture=architecture, dtype=dtype, **options)  # type: ignore[arg-type]
        finally:
            torch.set_default_dtype(before)
        return backbone.to(self.device).eval()

    def canvas(
        self, backbone: HFBackbone, rows: int, prompt: int, cells: int, *, ragged: bool = False
    ) -> Canvas:
        """Random prompts; ragged ones are up to a third shorter."""
        generator = torch.Generator().manual_seed(1)
        lengths = [prompt - (7 * row % (prompt // 3) if ragged else 0) for row in range(rows)]
        return prompt_canvas(
            [torch.randint(10, 1000, (length,), generator=generator) for length in lengths],
            response_length=cells,
            spec=backbone.spec,
            seeds=range(rows),
            device=backbone.device,
        )

    def apart(self, canvas: Canvas, width: int) -> Canvas:
        """Returns the rows in different places of their first block, as if begun one by one."""
        columns = torch.arange(canvas.ids.shape[1], device=canvas.ids.device) - canvas.start
        ahead = 7 * torch.arange(len(canvas.ids), device=canvas.ids.device)[:, None] % width
        is_written = (columns >= 0) & (columns < ahead)
        ids = canvas.ids.masked_fill(is_written, 10)
        return replace(canvas, ids=ids, editable=canvas.editable & ~is_written)

    def numbers(self) -> None:
        """Checks two layers of every layer type, and the head of training."""
        for release in (DREAM, LLADA, SDAR):
            error = real_size.two_layer_error(self.model(release, layers=2))
            self.tell(f"{release}: two layers, relative error to float32", error, most=3e-2)
        rows, width, vocab = (64, 64, 1200) if self.smoke else (64, 3584, 152064)
        hidden = torch.randn(rows, width, device=self.device).bfloat16()
        weight = (torch.randn(vocab, width, device=self.device) * 0.02).bfloat16()
        targets = torch.randint(vocab, (rows,), device=self.device)
        exact = hidden.double().requires_grad_()
        wanted = cross_entropy(exact @ weight.double().T, targets, reduction="none")
        found = token_stats(hidden.requires_grad_(), weight, targets).ce
        most = (found - wanted).detach().abs().max()
        self.tell("fused head, largest error in nats", float(most), most=2e-3)
        (found + wanted).sum().backward()
        assert hidden.grad is not None
        assert exact.grad is not None
        error = (hidden.grad - exact.grad).norm() / exact.grad.norm()
        self.tell("fused head, relative error of gradients", float(error), most=8e-3)

    @torch.no_grad()
    def sequences(self) -> None:
        """Checks the kernel for sequences of different lengths against a mask, out of phase."""
        rows, length = 8, 1024
        logits = []
        for route in ("auto", "sdpa"):
            backbone = self.model(SDAR, layers=2, attn_implementation=route)
            ids = torch.randint(10, 1000, (rows, length), device=self.device)
            columns = torch.arange(length, device=self.device).expand(rows, -1)
            canvas = CachedCanvas(
                backbone,
                pad_mask=None,
                positions=columns,
                blocks=block_numbers(columns, 4, origin=0).expand(rows, -1),
            )
            canvas.run(ids, canvas.plan([Span(0, 800, 800)] * rows, block_causal=True))
            spans = [Span(796, 800 + 4 * (row % 2), 800 + 4 * (row % 2)) for row in range(rows)]
            canvas.run(ids, canvas.plan(spans, block_causal=True))
            logits.append(canvas.read(columns[:, 796:800]).logits)
        finite = logits[1].isfinite()
        error = (logits[0] - logits[1])[finite].float().norm() / logits[1][finite].float().norm()
        self.tell("SDAR-4B out of phase: two layers, relative error to a mask", error, most=1e-2)

    def decoding(self) -> None:
        """Checks that tokens agree with a cache, on the CPU and in records; counts host waits."""
        backbone = self.model(SDAR, layers=2, dtype="float32")
        canvas = self.canvas(backbone, 5, 24, 32, ragged=True)
        whole, blocks = (
            Decoder(policy=ConfidencePolicy(), **_BLOCKS | cache) for cache in ({"cache": None}, {})
        )
        plain, cached = (decode(backbone, decoder, canvas) for decoder in (whole, blocks))
        self.tell("block cache, float32: other cells", _differ(plain, cached), most=0.0)

        sampled = Decoder(
            policy=ConfidencePolicy(),
            sampler=Sampler(temperature=1.0, score_on="filtered"),
            **_BLOCKS,
        )
        capture, canvases = TrajectoryCapture(vocab_size=backbone.vocab_size), _Canvases()
        here = decode(backbone, sampled, canvas, [capture, canvases])
        records = capture.trajectories([str(row) for row in range(5)])
        wrong = sum(
            int((torch.from_numpy(records[row].state_at(step + 1)) != cells).sum())
            for step, states in enumerate(canvases.steps)
            for row, cells in states.items()
        )
        self.tell("captured states: other cells than a synchronous copy", wrong, most=0.0)
        on_cpu = copy.deepcopy(backbone).cpu()
        there = decode(on_cpu, sampled, self.canvas(on_cpu, 5, 24, 32, ragged=True))
        self.tell("draws, float32: share other than the CPU's", _differ(here, there), most=0.02)
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                steps = int(decode(backbone, sampled, canvas).num_steps.max())
            torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(warning.message) for warning in caught)
            self.tell("waits of the host per step", waits / steps, most=1.5)

    def graphs(self) -> None:
        """Checks on two layers that steps are recorded, and that tokens stay those of the loop."""
        cases = {
            "Dream-7B, dual cache": (DREAM, _DUAL),
            "SDAR-4B, drawn": (SDAR, _DRAWN),
            "LLaDA2-mini, experts": (LLADA2, _EXPERTS),
        }
        # An emulator attends in another order, which half precision would show.
        model = partial(self.model, layers=2, dtype="float32" if self.smoke else "bfloat16")
        for name, (release, decoder) in cases.items():
            backbone = model(release)
            # Of these rows no size is padded. Padding would round otherwise, and one other token of
            # random weights changes all that come after it.
            canvas = self.canvas(backbone, 8, 40, 64)
            with _used_graphs() as used:
                result = decode(backbone, decoder, canvas)
            eager = self._eager(backbone, decoder, canvas)
            self.tell(f"{name}: other cells than without graphs", _differ(result, eager), most=0.0)
            one_by_one = 1 - used["replay"] / int(result.num_steps.max())
            most = 0.5 if self._has_graphs(backbone) else None
            self.tell(f"{name}: share of steps without a graph", one_by_one, most=most)
            ragged = self.canvas(backbone, 5, 40, 64, ragged=True)
            result = decode(backbone, decoder, ragged)
            differ = _differ(result, self._eager(backbone, decoder, ragged))
            self.tell(f"{name}: the same of ragged rows, whose sizes are padded", differ)
        backbone = model(SDAR)
        canvas = self.canvas(backbone, 8, 40, 32)
        with patch.object(graphs.logger, "warning") as warned:
            careless = decode(backbone, Decoder(policy=_Careless(), **_BLOCKS), canvas)
        plain = self._eager(backbone, Decoder(policy=ConfidencePolicy(), **_BLOCKS), canvas)
        self.tell("a careless policy: other cells", _differ(careless, plain), most=0.0)
        other_lines = abs(warned.call_count - self._has_graphs(backbone))
        self.tell("a careless policy: other than one line", other_lines, most=0.0)
        self._merges(model(SDAR, lora=LoRASettings(rank=16, alpha=16.0, targets="all")))
        self._tell_memory("graphs")
        self._tell_caches("graphs")

    def _merges(self, backbone: HFBackbone) -> None:
        """Checks that rollouts go on after an update, which merges another adapter in place."""
        canvas = self.canvas(backbone, 8, 40, 32)
        rollouts = []
        for _ in range(2):
            with torch.no_grad():
                for name, weight in backbone.named_parameters():
                    if "lora_B" in name:
                        weight.normal_(std=0.05)
            with decoding_weights(backbone):
                rollouts.append(decode(backbone, _DRAWN, canvas))
                eager = self._eager(backbone, _DRAWN, canvas)
        first, second = rollouts
        self.tell("the second merge: other cells", _differ(second, eager), most=0.0)
        self.tell("the second merge: cells of the first", 1 - _differ(first, second), most=0.9)

    def speed(self) -> None:
        """Compares the time of a step with the time to read the weights and to multiply."""
        rows, cells = (2, 16) if self.smoke else (16, 64)
        backbone = self.model(DREAM)
        with torch.no_grad():  # a nucleus of random logits would be most of the vocabulary
            backbone.model.lm_head.weight.mul_(5)
        floor = self._floor(backbone)
        self.tell("Dream-7B: ms to read the weights once", floor)
        prompt, response = (40, 64) if self.smoke else (512, 512)
        one = self.canvas(backbone, 1, prompt, response)
        name = "Dream-7B, 1 row, dual cache"
        alone = self._step(name, _DUAL, backbone, one)
        self.tell(f"{name}: x its weights", alone / floor, most=2.0, is_time=True)
        bare = 1e3 * real_size.bare_seconds(backbone, 1, 32)
        self.tell("the same: x transformers' forward of 32 tokens", alone / bare)
        many = self.apart(self.canvas(backbone, rows, prompt, response), 32)
        name = f"Dream-7B, {rows} rows out of phase"
        together = self._step(name, _DUAL, backbone, many)
        roofline = self._roofline("dream_b16_dual")
        self.tell(f"{name}: x its roofline", together / roofline, most=1.3, is_time=True)
        equal, ragged = (
            self.canvas(backbone, rows, 160, cells, ragged=is_ragged) for is_ragged in (False, True)
        )
        window = SlidingWindow(128)
        entropy = Decoder(policy=EntropyPolicy(), window=window)
        nucleus = Decoder(
            policy=EntropyPolicy(),
            window=window,
            sampler=Sampler(top_p=0.95, score_on="filtered"),
        )
        whole = self._forward(entropy, backbone, equal)
        padded = self._forward(entropy, backbone, ragged)
        filtered = self._forward(nucleus, backbone, ragged)
        self.tell(
            f"Dream-7B, {rows} rows: padded over equal", padded / whole, most=1.25, is_time=True
        )
        self.tell(
            f"Dream-7B, {rows} rows: top-p over greedy", filtered / padded, most=1.3, is_time=True
        )
        layers = sum(weight.numel() for weight in backbone.model.model.layers.parameters())
        work = 2e3 * layers * rows * (160 + cells) / self.compute
        self.tell(
            f"Dream-7B, {rows} rows: x time to multiply", whole / work, most=2.0, is_time=True
        )
        del backbone
        self._speed_of_blocks()
        self._speed_of_experts()
        self._tell_memory("decoding")
        self._tell_caches("decoding")

    def _speed_of_blocks(self) -> None:
        """Measures SDAR-4B: one row, 64 out of phase, and rollouts of 64 rows."""
        backbone = self.model(SDAR)
        one = self.canvas(backbone, 1, 200, 256)
        floor, name = self._floor(backbone), "SDAR-4B, 1 row"
        alone = self._step(name, _DRAWN, backbone, one)
        self.tell(f"{name}: x its weights", alone / floor, most=2.5, is_time=True)
        rows, prompt, cells = (4, 40, 32) if self.smoke else (64, 1200, 256)
        # Prompts of other lengths are elsewhere in their blocks: a quarter enters one each step.
        canvas = self.canvas(backbone, rows, prompt, cells, ragged=True)
        name = f"SDAR-4B, {rows} rows out of phase"
        many = self._step(name, _DRAWN, backbone, canvas)
        assert canvas.pad_mask is not None
        seen = int(canvas.pad_mask[:, : canvas.start].sum()) + rows * sum(self._counted) // 2
        sizes = backbone.architecture
        keys = seen * 4 * sizes.num_layers * sizes.kv_heads * sizes.head_width
        least = floor + 1e3 * keys / self.bandwidth
        self.tell(f"{name}: x its weights and keys", many / least, most=2.2, is_time=True)
        rollouts = self.canvas(backbone, rows, 40 if self.smoke else 200, cells, ragged=True)
        seconds = []
        for run in (self._eager, decode):
            synchronize()
            began = time.perf_counter()
            run(backbone, _DRAWN, rollouts)
            synchronize()
            seconds.append(time.perf_counter() - began)
        eager, graphed = seconds
        name = f"SDAR-4B, rollouts of {rows} x {cells}"
        self.tell(f"{name}: s", graphed)
        self.tell(f"{name}: x without graphs", graphed / eager, most=1 / 3, is_time=True)

    def _speed_of_experts(self) -> None:
        """Measures LLaDA2-mini's shape."""
        backbone = self.model(LLADA2)
        for rows in (1, 4 if self.smoke else 32):
            prompt = 40 if self.smoke else 512
            canvas = self.apart(self.canvas(backbone, rows, prompt, 256), 32)
            name = f"LLaDA2-mini, rows out of phase: {rows}"
            step = self._step(name, _EXPERTS, backbone, canvas)
            self.tell(f"{name}: x all its weights", step / self._floor(backbone))

    def training(self) -> None:
        """Measures an adapter's training step: eight layers of Dream-7B under autocast."""
        length = 24 if self.smoke else 512
        settings = LoRASettings(rank=16, alpha=16.0, targets="all")
        backbone = self.model(DREAM, layers=2 if self.smoke else 8, lora=settings).train()
        ids = torch.randint(10, 1000, (8, length), device=self.device)
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1:, :9] = False
        scored = real & (torch.rand(8, length, device=self.device) < 0.5)

        def step() -> None:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                backbone.score_tokens(Rows(ids, ids, scored, mask=real)).ce.mean().backward()

        seconds = median_seconds(step, 3)
        layers = sum(
            weight.numel()
            for weight in backbone.model.model.layers.parameters()
            if not weight.requires_grad
        )
        # Frozen weights have no gradient of their own; the head is multiplied three times.
        work = (
            4 * layers * ids.numel() + 6 * int(scored.sum()) * backbone.model.lm_head.weight.numel()
        )
        least = work / self.compute
        self.tell("8 layers of Dream-7B with an adapter, 8 x 512: s a step", seconds)
        self.tell("the same: x time to multiply", seconds / least, most=3.3, is_time=True)
        self._tell_memory("training")

    def reinforcement(self) -> None:
        """Runs TraceRL on SDAR-4B with an adapter under autocast, alone and sharded by FSDP2."""
        small = self.smoke
        strategies: dict[str, str | Strategy] = {
            "one device": "auto",
            "FSDP2": ShardedStrategy(
                data_parallel_size=1,
                tensor_parallel_size=1,
                process_group_backend="nccl" if self.device == "cuda" else "gloo",
            ),
        }
        for name, strategy in strategies.items():
            settings = LoRASettings(rank=16, alpha=16.0, targets="all")
            backbone = self.model(
                SDAR, _TINY_VOCABULARY, layers=2 if small else None, lora=settings
            )
            module = TraceRLModule(
                backbone.train(),
                tokenizer="tiny",
                decoders={
                    "rollout": Decoder(
                        policy=DynamicPolicy(0.9),
                        sampler=Sampler(temperature=1.0, score_on="filtered"),
                        settings=DecodeSettings(eos_rule="fill"),
                        **_BLOCKS,
                    )
                },
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            )
            data = RolloutDataModule(
                [WordProblems("train", num_examples=20)],
                rewards=[_Digits()],
                prompts_per_step=2 if small else 16,
                responses_per_prompt=4,
                response_length=16 if small else 256,
                rollout_batch_size=4 if small else 64,
                batch_size=4,
            )
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(
                    accelerator="gpu" if self.device == "cuda" else "cpu",
                    devices=1,
                    strategy=strategy,
                    precision="bf16-mixed",
                    max_epochs=2,
                    gradient_clip_val=1.0,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    use_distributed_sampler=False,
                    num_sanity_val_steps=0,
                    default_root_dir=folder,
                )
                trainer.fit(module, data)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            steps = [one.record.num_steps for one in module.loop.current.rollouts]
            longest = steps.count(max(steps)) / len(steps)
            self.tell(f"TraceRL, {name}: share of rows that end last", longest, most=0.75)
            moved = [
                float(weight.detach().float().abs().sum())
                for key, weight in module.named_parameters()
                if "lora_B" in key
            ]
            still = sum(not 0.0 < value < math.inf for value in moved)
            self.tell(f"TraceRL, {name}: adapters of {len(moved)} at rest", still, most=0.0)
            self._tell_memory(f"TraceRL, {name}")
            self._tell_caches(f"TraceRL, {name}")

    def commands(self, folder: Path) -> None:
        """Runs the command line on weights from files; a command that fails ends the script."""
        accelerator = "gpu" if self.device == "cuda" else "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        real_size.measure(folder, "dream-7b", accelerator=accelerator, small=self.smoke)
        print(real_size.markdown(real_size.results(folder), ["dream-7b"]))

    def _forward(self, decoder: Decoder, backbone: HFBackbone, canvas: Canvas) -> float:
        """Returns milliseconds per forward, including everything around it."""
        forwards: list[int] = []
        seconds = median_seconds(
            lambda: forwards.append(decode(backbone, decoder, canvas).num_forwards), 2
        )
        return 1e3 * seconds / forwards[0]

    @property
    def _counted(self) -> tuple[int, int]:
        """The steps that are timed: rounds of all blocks, once each size has come up often."""
        return (3, 7) if self.smoke else (72, 104)

    def _step(self, name: str, decoder: Decoder, backbone: HFBackbone, canvas: Canvas) -> float:
        """Returns milliseconds of a step with graphs, and tells those without and the memory."""
        with _without_graphs(backbone):
            seconds = self._timed(decoder, backbone, canvas).seconds
        self.tell(f"{name}: ms a step without graphs", 1e3 * seconds)
        with _used_graphs() as used:
            clock = self._timed(decoder, backbone, canvas)
        self.tell(f"{name}: ms a step", 1e3 * clock.seconds)
        self.tell("the same: graphs", used["record"])
        if self.device == "cuda":
            self.tell("the same: GiB of their pool", clock.pool / 2**30)
            descriptions = clock.outside / 2**20 / max(used["record"], 1)
            self.tell("the same: MiB of a graph outside of it", descriptions, most=GRAPH / 2**20)
        return 1e3 * clock.seconds

    def _timed(self, decoder: Decoder, backbone: HFBackbone, canvas: Canvas) -> _Clock:
        """Decodes until the last step that is timed."""
        clock, canvases = _Clock(*self._counted), iter([canvas])
        rows = len(canvas.ids)
        for _ in decode_queue(
            backbone, decoder, lambda _: next(canvases, None), num_slots=rows, observers=[clock]
        ):
            raise RuntimeError("a row has ended before the last step that is timed")
        return clock

    @staticmethod
    def _eager(backbone: HFBackbone, decoder: Decoder, canvas: Canvas) -> DecodeResult:
        with _without_graphs(backbone):
            return decode(backbone, decoder, canvas)

    @staticmethod
    def _has_graphs(backbone: HFBackbone) -> bool:
        return graphs.runs_graphs(backbone.device)

    def _roofline(self, case: str) -> float:
        """Returns milliseconds of a step by its counted launches, at rates that are reached."""
        if self.smoke:
            return math.nan
        peak = {torch.bfloat16: 0.7 * self.compute}
        with patch.multiple(launches, BANDWIDTH=self.bandwidth / 1.2, PEAK=peak):
            counts = launches.decode_counts(launches.CASES[case])
        return 1e3 * counts.seconds / launches.CASES[case].steps

    def _floor(self, backbone: HFBackbone) -> float:
        """Returns the milliseconds that reading layers and head takes."""
        parts = (backbone.model.model.layers, backbone.model.lm_head)
        num_bytes = sum(weight.nbytes for part in parts for weight in part.parameters())
        return 1e3 * num_bytes / self.bandwidth

    def _tell_caches(self, topic: str) -> None:
        """Checks that the caches of ended decodes are freed."""
        self.tell(f"caches left after {topic}", _num_caches() - self.others, most=0.0)

    def _tell_memory(self, topic: str) -> None:
        if self.device == "cuda":
            self.tell(f"peak of {topic}, GiB", torch.cuda.max_memory_allocated() / 2**30)
            torch.cuda.reset_peak_memory_stats()


class _Digits(Reward):
    """Pays for the share of a response that is digits."""

    name = "digits"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [
            RewardScore(total=sum(map(str.isdigit, one.text)) / max(len(one.text), 1))
            for one in group
        ]


class _Careless(ConfidencePolicy):
    """Says that a graph may hold it, and reads a number on the host."""

    graph_safe = True

    def select(
        self,
        state: DecodeState,
        candidates: torch.Tensor,
        proposal: Proposal,
        quota: torch.Tensor | None,
    ) -> Selection:
        float(proposal.prob.max())
        return super().select(state, candidates, proposal, quota)


class _Clock(QueueObserver):
    """Times the steps from one to another, and ends the decode there.

    Between two calls the host has waited for the device once, so its clock tells a step's time.
    """

    requires = frozenset()

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._num_steps, self._began = 0, 0.0
        self.seconds = math.nan
        """Of a step, on average."""
        self.pool = self.outside = 0
        """Bytes that graphs hold, of the allocator's and of others."""

    def on_start(self, state: DecodeState) -> None:
        """Notes what is in use, also by pools of graphs that are gone."""
        self.outside, self.pool = _bytes_outside(), _bytes_of_pools()

    def on_step(self, record: StepRecord) -> bool:
        self._num_steps += 1
        if self._num_steps == self._first:
            self._began = time.perf_counter()
        is_over = self._num_steps == self._last
        if is_over:
            self.seconds = (time.perf_counter() - self._began) / (self._last - self._first)
            self.outside = _bytes_outside() - self.outside
            self.pool = _bytes_of_pools() - self.pool
        return is_over


def _bytes_outside() -> int:
    """Returns the GPU memory in use that torch's allocator has not reserved."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _bytes_of_pools() -> int:
    """Returns the memory of all pools but the usual one."""
    if not torch.cuda.is_available():
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if one["segment_pool_id"] != (0, 0))


def _without_graphs(backbone: HFBackbone) -> Any:
    """Returns a context in which a backbone's decodes launch each operation."""
    return patch.object(backbone, "cuda_graphs", False)


@contextmanager
def _used_graphs() -> Iterator[Counter[str]]:
    """Counts how often graphs are recorded and replayed."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        plain = getattr(graphs.CudaGraph, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return plain(*arguments)

        return patch.object(graphs.CudaGraph, name, call)

    with counted("record"), counted("replay"):
        yield counts


class _Canvases(Observer):
    """Copies every step's response synchronously."""

    requires = frozenset()

    def __init__(self) -> None:
        self.steps: list[dict[int, torch.Tensor]] = []

    def on_start(self, state: DecodeState) -> None:
        """Nothing is written yet."""

    def on_step(self, record: StepRecord) -> None:
        cells = record.new_ids[:, record.state.start :].cpu()
        self.steps.append(dict(zip(record.state.rows.tolist(), cells, strict=True)))


def _differ(one: DecodeResult, other: DecodeResult) -> float:
    """Returns the share of cells that differ."""
    return float((one.ids.cpu() != other.ids.cpu()).double().mean())


if __name__ == "__main__":
    main()
