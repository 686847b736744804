"""Released sizes on one machine: what a user's first commands cost, through the command line.

Writes random weights in the layout and sizes of Dream-7B and SDAR-4B into a folder (15 and 9 GB),
then runs shipped configurations on them, each in its own process: decoding with every cache that
the model supports, capturing traces, and one step each of fine-tuning and of reinforcement learning
of an adapter. Seconds and peak memory of every phase are measured. Decoding is also compared with
transformers' forwards of the same columns, and the first two layers with themselves in float32.

On a CPU, ratios use the process's own CPU seconds (over all threads), which other work on the
machine disturbs less. Results stay in ``results.json``; what has one is not run again.

    OMP_NUM_THREADS=2 python benchmarks/real_size.py /tmp/sizes
    python benchmarks/real_size.py /tmp/sizes --markdown    # prints the tables of its page
    python benchmarks/real_size.py /tmp/small --small       # the same on small twins, in minutes
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measurement
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dlm.backbones.hf import HFBackbone

ROOT = Path(__file__).resolve().parents[1]
RELEASES = {"dream-7b": "Dream-org/Dream-v0-Instruct-7B", "sdar-4b": "JetLM/SDAR-4B-Chat"}

_PROBLEM = "[{class_path: WordProblems, init_args: {split: test, num_examples: 1}}]"
_BLOCKS = "{class_path: BlockWindow, init_args: {block_length: 32}}"
_QUOTA = "{class_path: EvenQuota, init_args: {steps_per_block: 4}}"
_DREAM = f"policy: ConfidencePolicy, window: {_BLOCKS}, quota: {_QUOTA}"
_SDAR = (
    "window: {class_path: BlockWindow, init_args: {block_length: 4, origin: sequence}}, "
    f"quota: {_QUOTA}"
)
_TRACE = {
    "data.tasks": _PROBLEM,
    "data.mix": "null",
    "data.methods": "[entropy]",
    "data.response_length": "32",
    "model.projector_prompts": "1",
    "model.hidden_rank": "64",
    "model.step_ratio": "0.5",
}
_RL = {
    "data.tasks": _PROBLEM,
    "data.val_tasks": "null",
    "data.filters": "[]",
    "data.prompts_per_step": "1",
    "data.responses_per_prompt": "2",
    "data.response_length": "32",
    "data.batch_size": "8",
    "trainer.max_epochs": "1",
    "trainer.num_sanity_val_steps": "0",
    "data.rows_per_update": "8",
}
RUNS: dict[str, dict[str, tuple[str, Mapping[str, str]]]] = {
    "dream-7b": {
        "decode": (
            "predict --config benchmark_dream",
            {
                "model.decoders": f"{{none: {{{_DREAM}}}, prefix: {{{_DREAM}, cache: PrefixCache}},"
                f" dual: {{{_DREAM}, cache: DualCache}}}}",
                "data.tasks": _PROBLEM,
                "data.methods": "[none, prefix, dual]",
                "data.response_length": "64",
            },
        ),
        "trace": (
            "predict --config generate_dream",
            {
                **_TRACE,
                "model.decoders": f"{{entropy: {{policy: EntropyPolicy, window: {_BLOCKS}, quota: "
                "{class_path: EvenQuota, init_args: {steps_per_block: 8}}, "
                "sampler: {top_p: 0.95, score_on: filtered}}}",
            },
        ),
        "tabom": (
            "fit --config tabom_dream_prm12k",
            {
                "data.sources": "[{class_path: RecordedDecodes, init_args: "
                "{shards: runs/dream-7b/trace/traces, only_correct: false, methods: [entropy]}}]",
                "data.response_length": "32",
                "data.batch_size": "1",
                "data.rows_per_update": "1",
                "model.cut_range": "full",
                "trainer.max_steps": "1",
            },
        ),
        "tracerl": (
            "fit --config tracerl_dream",
            # Rollouts merge the adapter and keep copies of the weights that it changes. With all
            # linear layers these are 13 GB, and more than 24 GB of memory are needed in all.
            {
                **_RL,
                "data.response_length": "16",
                "model.backbone.lora": "{rank: 16, alpha: 16, targets: [q_proj, v_proj]}",
            },
        ),
    },
    "sdar-4b": {
        "decode": (
            "predict --config benchmark_sdar",
            {
                "model.decoders": f"{{none: {{policy: ConfidencePolicy, {_SDAR}}}, "
                f"block: {{policy: ConfidencePolicy, {_SDAR}, cache: BlockCache}}}}",
                "data.tasks": _PROBLEM,
                "data.methods": "[none, block]",
                "data.response_length": "8",
                "data.responses_per_prompt": "1",
            },
        ),
        "trace": (
            "predict --config generate_dream",
            {
                **_TRACE,
                "model.backbone.path": RELEASES["sdar-4b"],
                "model.tokenizer": RELEASES["sdar-4b"],
                "model.decoders": f"{{entropy: {{policy: EntropyPolicy, {_SDAR}}}}}",
            },
        ),
        "sft": (
            "fit --config sft_sdar",
            {
                "data.sources": "[{class_path: TaskReferences, init_args: "
                f"{{tasks: {_PROBLEM}}}}}]",
                "data.response_length": "32",
                "data.rows_per_update": "1",
                "trainer.max_steps": "1",
            },
        ),
        "tracerl": (
            "fit --config tracerl_sdar",
            {
                **_RL,
                "data.batch_size": "2",  # of four rows each
                "model.backbone.path": RELEASES["sdar-4b"],
                "model.tokenizer": RELEASES["sdar-4b"],
                "model.backbone.dtype": "bfloat16",
                "model.backbone.trainable": "false",
                "model.backbone.lora": "{rank: 16, alpha: 16, targets: all}",
            },
        ),
    },
}
"""Commands and the options that shrink them, by model and run; configurations are shipped ones."""

_COMMAND, _OPTIONS = RUNS["dream-7b"]["decode"]
_FOUR = {"data.tasks": _PROBLEM.replace("1}", "4}"), "data.batch_size": "4"}
RUNS["dream-7b"]["decode_4"] = (_COMMAND, {**_OPTIONS, **_FOUR})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, or prints the tables of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="receives weights, runs and results.json")
    parser.add_argument("--models", nargs="+", choices=list(RELEASES), default=list(RELEASES))
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--small", action="store_true", help="small twins, to try this script")
    parser.add_argument("--markdown", action="store_true", help="only print tables of results.json")
    options = parser.parse_args(arguments)
    if not options.markdown:
        options.folder.mkdir(parents=True, exist_ok=True)
        for model in options.models:
            measure(options.folder, model, accelerator=options.accelerator, small=options.small)
    print(markdown(results(options.folder), options.models))


def results(folder: Path) -> dict[str, Any]:
    """Returns the contents of ``results.json``: a list of phases by ``model/run``."""
    path = folder / "results.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def measure(folder: Path, model: str, *, accelerator: str, small: bool) -> None:
    """Writes the weights and runs every command that has no result yet; one that fails ends it."""

    def keep(run: str, phases: list[dict[str, Any]]) -> None:
        text = json.dumps({**results(folder), f"{model}/{run}": phases}, indent=1)
        (folder / "draft.json").write_text(text)
        (folder / "draft.json").replace(folder / "results.json")

    release = RELEASES[model]
    if f"{model}/write" not in results(folder):
        sys.path.insert(0, str(ROOT))  # where the tests are
        from tests.twins import write_twin

        began = time.perf_counter()
        write_twin(folder / release, release, full_size=not small)
        keep("write", [{"phase": "shards", "seconds": time.perf_counter() - began}])
    for run in RUNS[model]:
        if f"{model}/{run}" in results(folder):
            continue
        report = folder / "phases.json"
        report.unlink(missing_ok=True)
        shutil.rmtree(folder / "runs" / model / run, ignore_errors=True)  # it would be resumed
        command = [sys.executable, str(ROOT / "cli.py"), *_flags(model, run)]
        command += [f"--trainer.accelerator={accelerator}", "--trainer.devices=1"]
        command += ["--trainer.strategy=auto", "--trainer.enable_progress_bar=false"]
        command += ["--trainer.callbacks+=real_size.Clock", f"--trainer.callbacks.file={report}"]
        command += [f"--trainer.callbacks.compare={str(run.startswith('decode')).lower()}"]
        print(f"{model}/{run}: {shlex.join(command)}", flush=True)
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        began = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,  # a folder with a release's name takes precedence over the hub
            # Waiting threads sleep, so that CPU seconds of the process are work.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "HF_HUB_OFFLINE": "1",
                "OMP_WAIT_POLICY": "passive",
            },
        )
        if done.returncode:
            raise SystemExit(f"{model}/{run} ended with status {done.returncode}")
        total = {"phase": "process", "seconds": time.perf_counter() - began}
        keep(run, [*json.loads(report.read_text()), total])


def _flags(model: str, run: str) -> list[str]:
    command, options = RUNS[model][run]
    start, _, name = command.rpartition(" ")
    flags = [f"--{option}={value}" for option, value in options.items()]
    return [*start.split(), f"exp/{name}", f"--run_dir=runs/{model}/{run}", *flags]


class Clock(Callback):
    """Measures seconds and peak memory between the events of a run; writes them when it ends.

    Args:
        file: receives the phases as JSON. Memory is that of the process, on a GPU the allocator's.
        compare: also compares decoding with bare forwards, and two layers with float32.
    """

    def __init__(self, file: str, compare: bool = False) -> None:
        self.file = Path(file)
        self.compare = compare
        self.phases: list[dict[str, Any]] = []
        self._last = _now()
        self._shapes: Counter[tuple[int, ...]] = Counter()
        self._weights = 0

    def _note(self, phase: str, **more: Any) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        seconds, own = (now - last for now, last in zip(_now(), self._last, strict=True))
        most = torch.cuda.max_memory_allocated() if on_gpu else measurement.peak()
        self.phases.append(
            {
                "phase": phase,
                "seconds": seconds,
                "own_seconds": own,
                "peak": most,
                "weights": self._weights,
                **more,
            }
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            measurement.trim()  # what earlier phases left does not count
            measurement.reset_peak()
        self._last = _now()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The model is loaded."""
        backbone: Any = pl_module.backbone
        self._weights = sum(p.nbytes for p in backbone.parameters() if not p.requires_grad)
        self._note("load")

        def count(_module: object, _args: object, inputs: dict[str, Any]) -> None:
            self._shapes[tuple(inputs["input_ids"].shape)] += 1

        backbone.model.model.register_forward_pre_hook(count, with_kwargs=True)

    def on_predict_batch_start(self, *_: Any) -> None:
        """Preparations before a prompt, such as fitting a projector, are done."""
        self._note("prepare")
        self._shapes.clear()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """One method has decoded its prompts."""
        self._note(batch.method, forwards=list(self._shapes.items()))

    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Compares decoding with bare forwards of the same model."""
        if not self.compare:
            return
        decodes = [phase for phase in self.phases if "forwards" in phase]
        shapes = {shape for phase in decodes for shape, _ in phase["forwards"]}
        bare = {shape: bare_seconds(pl_module.backbone, *shape) for shape in shapes}
        for phase in decodes:
            least = sum(bare[shape] * times for shape, times in phase["forwards"])
            phase["ratio"] = _own(phase["seconds"], phase["own_seconds"]) / least
        self._note("bare forwards")
        self._note("two layers", error=two_layer_error(pl_module.backbone))

    def on_train_batch_start(self, *_: Any) -> None:
        """Data, or scored rollouts, are ready."""
        self._note("prepare")

    def on_train_batch_end(self, *_: Any) -> None:
        """Forward, backward and the optimiser's step are done."""
        self._note("step")

    def teardown(self, *_: Any, **__: Any) -> None:
        """Checkpoints and exports are written."""
        self._note("end")
        self.file.write_text(json.dumps(self.phases))


@torch.no_grad()
def bare_seconds(backbone: HFBackbone, rows: int, width: int) -> float:
    """Returns the median time of transformers' forward of some rows, with logits of all columns."""
    ids = torch.randint(1000, (rows, width), device=backbone.device)
    config = backbone.model.config
    ours, config._attn_implementation = config._attn_implementation, "sdpa"
    seconds = measurement.median_seconds(lambda: backbone.model(input_ids=ids, use_cache=False), 3)
    config._attn_implementation = ours
    return seconds


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _own(seconds: float, own_seconds: float) -> float:
    return seconds if torch.cuda.is_initialized() else own_seconds


@torch.no_grad()
def two_layer_error(backbone: HFBackbone) -> float:
    """Returns the relative error of two layers' logits against float32 on the CPU.

    It ruins the model, which loses its other layers, and ends as float32 on the CPU.
    """
    decoder = backbone.model.model
    del decoder.layers[2:]
    decoder.config.num_hidden_layers = 2
    ids = torch.randint(1000, (2, 96), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, :19] = False
    device = backbone.device
    ours = backbone.denoise(ids.to(device), pad_mask=real.to(device)).logits.float().cpu()
    wanted = backbone.cpu().float().denoise(ids, pad_mask=real).logits
    # Forbidden ids are -inf in both; logits of padding mean nothing.
    chosen = wanted.isfinite() & real[..., None]
    return float((ours[chosen] - wanted[chosen]).norm() / wanted[chosen].norm())


UNTABLED = ("shards", "end", "process")
"""Phases around a run, and what took no time, are in ``results.json`` alone."""


def markdown(found: Mapping[str, Any], models: Sequence[str]) -> str:
    """Returns tables of the results, and the commands that produced them."""
    lines = ["| model | run | phase | s | CPU s | forwards | x bare | peak GiB | over weights |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|---:|"]
    commands, notes = [], []
    for model in models:
        for run in ("write", *RUNS[model]):
            for phase in found.get(f"{model}/{run}", []):
                if phase["phase"] not in UNTABLED and _took_time(phase):
                    lines.append(_row(model, run, phase))
                if "error" in phase:
                    notes.append(f"{model}: two layers against float32, {phase['error']:.1e}")
            if run != "write":
                parts = _flags(model, run)
                commands.append(f"# {model}/{run}\nlit-dlm {shlex.join(parts)}")
    return "\n".join([*lines, "", *notes, "", "```bash", *commands, "```"])


def _took_time(phase: Mapping[str, Any]) -> bool:
    return phase["phase"] != "prepare" or phase["seconds"] > 2


def _row(model: str, run: str, phase: Mapping[str, Any]) -> str:
    forwards = sum(times for _, times in phase.get("forwards", []))
    peak, weights = phase.get("peak"), phase.get("weights", 0)
    cells = [
        f"{phase['seconds']:.1f}",
        f"{phase['own_seconds']:.1f}" if "own_seconds" in phase else "",
        str(forwards or ""),
        f"{phase['ratio']:.2f}" if "ratio" in phase else "",
        "" if peak is None else f"{peak / 2**30:.2f}",
        "" if peak is None else f"{(peak - weights) / 2**30:.2f}",
    ]
    return f"| {model} | {run} | {phase['phase']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
