"""Checks a GPU in ten minutes: random weights at released sizes, no downloads.

Prints a line per check: PASS or FAIL with its limit, or INFO. Numbers are compared with float32 on
the CPU; times with the chip's limits, if its data sheet is known (``benchmarks/decode.py``). The
exit status is 1 if a check fails.

    python benchmarks/gpu.py                     # Dream-7B, LLaDA-8B, SDAR-4B on the first GPU
    python benchmarks/gpu.py --parts speed       # one part only
    python benchmarks/gpu.py --folder /tmp/gpu   # also real_size.py's commands, on Dream-7B there
    python benchmarks/gpu.py --smoke             # small sizes on any device; times have no limits
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import real_size
import torch
from decode import PEAKS
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from measurement import median_seconds, released_architecture
from torch.nn.functional import cross_entropy

from lit_dlm.backbones.base import Rows, Span
from lit_dlm.backbones.cache import CachedCanvas, WindowCache
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.visibility import block_numbers
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
    NoQuota,
    Observer,
    Sampler,
    SlidingWindow,
    StepRecord,
    ThresholdPolicy,
    decode,
    prompt_canvas,
)
from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.tensors.fused_head import token_stats
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.training.sharding import ShardedStrategy
from lit_dlm.trajectories.capture import TrajectoryCapture

DREAM, LLADA, SDAR = (
    "Dream-org/Dream-v0-Instruct-7B",
    "GSAI-ML/LLaDA-8B-Instruct",
    "JetLM/SDAR-4B-Chat",
)
PARTS = ("numbers", "sequences", "decoding", "speed", "training", "reinforcement")
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
                blocks=block_numbers(length, 4, device=self.device).expand(rows, -1),
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

    def speed(self) -> None:
        """Compares the time of a forward with the time to read the weights and to multiply."""
        rows, cells = (2, 16) if self.smoke else (16, 64)
        backbone = self.model(DREAM)
        with torch.no_grad():  # a nucleus of random logits would be most of the vocabulary
            backbone.model.lm_head.weight.mul_(5)
        floor = self._floor(backbone)
        self.tell("Dream-7B: ms to read the weights once", floor)
        dual = Decoder(
            policy=ThresholdPolicy(0.9), quota=NoQuota(), window=BlockWindow(32), cache=DualCache()
        )
        one = self.canvas(backbone, 1, 128, cells)
        alone = self._forward(dual, backbone, one)
        self.tell("Dream-7B, 1 row, dual cache: x that", alone / floor, most=2.5, is_time=True)
        bare = 1e3 * real_size.bare_seconds(backbone, 1, 32)
        self.tell("the same: x transformers' forward of 32 tokens", alone / bare)
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
        backbone = self.model(SDAR)
        drawn = Decoder(
            policy=DynamicPolicy(0.9),
            sampler=Sampler(temperature=1.0, score_on="filtered"),
            **_BLOCKS,
        )
        one = self.canvas(backbone, 1, 200, cells)
        alone = self._forward(drawn, backbone, one)
        self.tell(
            # 1,104 launches of some 8 us each, where reading the weights takes 2.4 ms.
            "SDAR-4B, 1 row: x its weights",
            alone / self._floor(backbone),
            most=4.0,
            is_time=True,
        )
        rows, prompt = (4, 40) if self.smoke else (64, 1200)
        many = self._forward(drawn, backbone, self.canvas(backbone, rows, prompt, cells))
        self.tell(f"SDAR-4B, {rows} rows after {prompt} tokens: ms a forward", many)
        self._tell_memory("decoding")
        self._tell_caches("decoding")

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
        forwards = decode(backbone, decoder, canvas).num_forwards
        return 1e3 * median_seconds(lambda: decode(backbone, decoder, canvas), 2) / forwards

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
