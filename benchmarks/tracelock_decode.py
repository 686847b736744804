"""What TraceLock's policy costs a decode: steps and time, beside a threshold and entropy order.

    python benchmarks/tracelock_decode.py [--json] [--policy runs/tiny/policy] [--problems 100]

All methods decode the same held-out word problems with the embedded model, in one process and in
turn; figures are medians over repetitions. Besides wall time, the process's own CPU time is given,
which other work on the machine disturbs less. ``policy_percent`` is the share of time inside the
policy (features, network, decision). ``step_percent`` is how much more CPU time a step costs than
one of the threshold policy, including what the policy reads (hidden states, entropy and margin).

The arithmetic for a backbone of seven billion parameters is printed as well (``--cells``,
``--prompt``): operations and bytes of policy and backbone, from the shapes alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import measurement
import torch

from lit_dlm.backbones import load_tokenizer
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import FeatureSettings, ProjectorConfig, num_features
from lit_dlm.decoding import Decoder, EntropyPolicy, NoQuota, ThresholdPolicy, decode, prompt_canvas
from lit_dlm.decoding.state import Canvas, DecodeResult
from lit_dlm.tasks import PromptExample
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.network import AcceptanceConfig, AcceptanceHead
from lit_dlm.tracelock.policy import TraceLockPolicy

DREAM = {
    "width": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "inner": 18944, "vocab": 152064
}  # fmt: skip
"""Shape of Dream-v0-Instruct-7B."""


def projection(*, prompt: int, cells: int) -> dict[str, float]:
    """Returns the work of one step at Dream's shape: the canvas forward, the head on the response.

    All cells of the response are rows of the policy. Multiply-adds and bytes read (bfloat16
    backbone, float32 policy) are per step of one row.
    """
    D, L = DREAM["width"], prompt + cells
    head_width = D // DREAM["heads"]
    per_layer = D * (2 * D + 2 * DREAM["kv_heads"] * head_width) + 3 * D * DREAM["inner"]
    layers = DREAM["layers"] * per_layer
    vocabulary = DREAM["vocab"] * D
    backbone = layers * L + vocabulary * cells + DREAM["layers"] * 2 * L * L * D

    projector = ProjectorConfig(hidden_size=D)
    config = AcceptanceConfig()
    with torch.device("meta"):
        network = AcceptanceHead(num_features(projector, FeatureSettings()), config)
    weights = sum(parameter.numel() for parameter in network.parameters())
    maps = sum(projector.groups) * D
    attention = config.num_layers * 2 * (cells + 1) ** 2 * config.width
    policy = maps * cells + weights * (cells + 1) + attention
    # Normalised snapshots and differences are written and read once in float32.
    normalised = 2 * 4 * (2 * projector.num_snapshots - 1) * cells * D
    snapshots = 2 * projector.num_snapshots * cells * D
    parameters = 4 * (weights + (projector.hidden_rank + projector.delta_rank) * D)
    return {
        "backbone_gmacs": backbone / 1e9,
        "policy_gmacs": policy / 1e9,
        "macs_percent": 100.0 * policy / (policy + backbone),
        "backbone_gbytes": 2 * (layers + vocabulary) / 1e9,
        "policy_gbytes": (parameters + normalised + snapshots) / 1e9,
        "bytes_percent": 100.0
        * (parameters + normalised + snapshots)
        / (parameters + normalised + snapshots + 2 * (layers + vocabulary)),
    }


def canvases(
    backbone: HFBackbone, examples: Sequence[PromptExample], *, batch: int, length: int
) -> list[Canvas]:
    """Returns canvases of ``batch`` prompts in the embedded model's chat template."""
    tokenizer = load_tokenizer("tiny")
    prompts: Any = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": example.text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for example in examples
    ]
    return [
        prompt_canvas(
            prompts[first : first + batch],
            response_length=length,
            spec=backbone.spec,
            seeds=range(first, min(first + batch, len(prompts))),
        )
        for first in range(0, len(prompts), batch)
    ]


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the figures of every method."""
    backbone = HFBackbone(path="tiny").eval()
    task = WordProblems("test", num_examples=options.problems, seed=options.seed)
    work = canvases(backbone, task.examples(), batch=options.batch, length=32)
    decoders = {"entropy": Decoder(policy=EntropyPolicy())}
    for value in options.threshold:
        policy = ThresholdPolicy(value)
        decoders[f"threshold-{value}"] = Decoder(policy=policy, quota=NoQuota())
    for folder in options.policy:
        name = "tracelock" if len(options.policy) == 1 else folder
        for value in options.acceptance:
            learned = TraceLockPolicy(folder, threshold=value, max_accept_per_step=None)
            learned.check_backbone(backbone)
            decoders[f"{name}-{value}"] = Decoder(policy=learned, quota=NoQuota())
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in decoders}
    results: dict[str, list[DecodeResult]] = {}
    for repetition in range(options.repetitions + 1):
        for name, decoder in decoders.items():
            cpu, wall = time.process_time(), time.perf_counter()
            results[name] = [decode(backbone, decoder, canvas) for canvas in work]
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            inside = sum(_policy_seconds(result) for result in results[name])
            if repetition:  # the first one warms up
                times[name].append((cpu, wall, inside / wall))
    return {name: _figures(task, results[name], times[name]) for name in decoders}


def _policy_seconds(result: DecodeResult) -> float:
    assert result.policy_seconds is not None
    return float(result.policy_seconds.sum())


def _figures(
    task: WordProblems,
    results: Sequence[DecodeResult],
    times: Sequence[tuple[float, float, float]],
) -> dict[str, Any]:
    tokenizer, examples = load_tokenizer("tiny"), task.examples()
    problems = len(examples)
    responses = [ids for result in results for ids in result.ids[:, result.start :].tolist()]
    texts = [str(tokenizer.decode(ids)).partition(tokenizer.eos_token)[0] for ids in responses]
    right = sum(
        task.grade(example, text).is_correct for example, text in zip(examples, texts, strict=True)
    )
    cpu, wall, share = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "accuracy": right / problems,
        "steps": sum(float(r.num_steps.sum()) for r in results) / problems,
        "cpu_ms": 1e3 * cpu / problems,
        "wall_ms": 1e3 * wall / problems,
        "policy_percent": 100.0 * share,
        "row_steps": sum(int(r.num_steps.sum()) for r in results),
    }


def main() -> None:
    """Prints the figures."""
    options = measurement.options(
        __doc__,
        policy=(["runs/tiny/policy"], "policy folders"),
        problems=100,
        seed=(0, "of the problems"),
        batch=100,
        threshold=[0.9, 0.99],
        acceptance=[0.95, 0.99],
        repetitions=5,
        prompt=(149, "prompt tokens of the projection"),
        cells=(256, "response cells of the projection"),
    )
    figures = measure(options)
    reference = figures[f"threshold-{options.threshold[0]}"]
    per_step = reference["cpu_ms"] / reference["row_steps"]
    for row in figures.values():
        row["step_percent"] = 100.0 * (row["cpu_ms"] / row.pop("row_steps") / per_step - 1.0)
    figures["projection_7b"] = projection(prompt=options.prompt, cells=options.cells)
    values = {
        f"{name}: {key}": value for name, row in figures.items() for key, value in row.items()
    }
    measurement.tell(values, as_json=options.json)


if __name__ == "__main__":
    main()
