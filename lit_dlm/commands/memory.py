"""Estimates a run's memory and disk by formulas from its configuration; nothing is loaded.

Prompts and responses are as long as the configuration allows, so a plan gives the most that a run
needs. Left out are heads beside the backbone, a picture tokenizer, activations of a vision tower,
allocator overhead, and the context of a GPU or of Python itself (about 0.5 GiB). The lengths of
stored states are unknown: training on them is planned without activations and logits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_dlm.backbones.adapter_files import read_adapter_settings
from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.cache import MOST_TOKENS
from lit_dlm.backbones.loading import torch_dtype
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.resolution import FromAR, resolve
from lit_dlm.decoding.caches import PROMPT_TOKENS
from lit_dlm.predict.decode import default_batch
from lit_dlm.tensors.fused_head import CHUNK_ELEMENTS
from lit_dlm.tensors.graphs import MOST_GRAPHS
from lit_dlm.training.layout import row_tokens
from lit_dlm.vision.base import VisionSettings
from lit_dlm.vision.tower import TowerVision

GIB = 2.0**30
LARGE = 100_000_000  # parameters from which a run prints its plan, or is refused
PROCESSES = (1, 2, 4, 8, 16, 32, 64)
_STATES = {"SGD": 1, "Muon": 1}  # values kept for each trained parameter; others keep two
_SCORED = {"cpu": 48_000_000, "cuda": 640_000_000}
"""Most bytes that the sampler takes beside the logits, which it scores in chunks."""
GRAPH = 16 * 2**20
"""Bytes that a driver takes for the kernels of a graph, about a thousand: an estimate."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes by purpose, for one process unless stated otherwise."""

    model: str
    num_parameters: int
    num_trained: int
    split: dict[str, int] = field(default_factory=dict)
    """What sharded training splits among processes: weights, gradients, optimiser states."""
    training: dict[str, int] = field(default_factory=dict)  # of forward and backward, in addition
    update: int = 0  # what the optimiser's step takes instead of ``training``; split as well
    decoding: dict[str, int] = field(default_factory=dict)  # in addition
    elsewhere: dict[str, int] = field(default_factory=dict)  # on the host and disk
    is_sharded: bool = False

    def parts(self, num_processes: int = 1) -> dict[str, int]:
        """Returns what each of so many processes holds, by name; the last entry is the peak."""
        # Weights, and what training keeps beside them, are split. What a phase takes in addition,
        # such as activations, is each process's own.
        shares = num_processes if self.is_sharded else 1
        split = {name: size // shares for name, size in self.split.items()}
        update = {"update": self.update // shares}
        phases = {"training": self.training, "decoding": self.decoding}
        # The phases follow one another and free what they took, so the largest decides.
        most = sum(split.values()) + max(
            sum(parts.values()) for parts in (*phases.values(), update)
        )
        named = {f"{at}: {name}": n for at, parts in phases.items() for name, n in parts.items()}
        return {**split, **named, **update, "at most at a time": most}

    def least(self, num_processes: int = 1) -> int:
        """Returns what each of so many processes needs at least, whatever the lengths."""
        parts = self.parts(num_processes)
        return sum(parts[name] for name in self.split) + self.decoding.get("whole weights", 0)

    def most(self, num_processes: int = 1) -> int:
        """Returns the peak over forward and backward, the optimiser's step and decoding."""
        return self.parts(num_processes)["at most at a time"]

    def short(self, num_processes: int) -> str:
        parts = self.parts(num_processes).items()
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size)
        return (
            f"plan: {self.num_parameters / 1e9:.2f} B parameters, {self.num_trained / 1e9:.3f} B "
            f"trained; GiB on each of {num_processes}: {listed}"
        )

    def table(self) -> str:
        columns = [self.parts(number) for number in PROCESSES]
        lines = [
            f"{self.model}: {self.num_parameters:,} parameters, {self.num_trained:,} trained\n",
            "GiB per process, processes".ljust(36) + "".join(f"{n:9}" for n in PROCESSES),
        ]
        lines += [
            name.ljust(36) + "".join(f"{column[name] / GIB:9.2f}" for column in columns)
            for name, size in columns[0].items()
            if size
        ]
        others = [f"{name}: {size / GIB:,.2f} GiB" for name, size in self.elsewhere.items()]
        return "\n".join([*lines, "", *others])


class _Model:
    """A backbone by its options: its shapes, and what its forwards take by formulas.

    The letters of the formulas: ``s`` bytes of a number in products, ``r`` in the stream between
    layers, ``D`` its width, ``E`` that of the feed-forward, ``Q`` and ``K`` of queries and keys.
    """

    def __init__(self, options: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
        self.architecture, num_seeing = _described(options)
        self.shapes = self.architecture.parameter_shapes()
        self.num_base = num_seeing + sum(map(math.prod, self.shapes.values()))
        # bitsandbytes packs the matrices of layers; embedding, head and vectors keep their dtype.
        matrices = (math.prod(s) for key, s in self.shapes.items() if ".layers." in key and s[1:])
        self.num_packed = sum(matrices) if options.get("load_in_4bit") else 0
        self.recompute = options.get("gradient_checkpointing", False)
        self.adapters = [_built(LoRASettings, options["lora"])] if options.get("lora") else []
        is_trainable = bool(options.get("trainable"))
        self.trains_adapters = is_trainable or bool(self.adapters)
        # A stored adapter replaces the settings of a new one, as in the backbone.
        if options.get("adapter"):
            self.adapters = [read_adapter_settings(locate(options["adapter"]))]
        self.trains_all = is_trainable and not self.adapters
        strategy = str(trainer.get("strategy"))
        self.is_sharded = "ShardedStrategy" in strategy or "ModelParallelStrategy" in strategy
        self.weight = torch_dtype(options.get("dtype", "float32")).itemsize  # of a base weight
        self.stored = self.weight * (self.num_base - self.num_packed) + self.num_packed // 2
        self.computed = 2 if trainer.get("precision") == "bf16-mixed" else self.weight
        """Bytes of a number in the results of products, in gathered weights and in caches."""
        self.cuda_graphs = options.get("cuda_graphs", True)
        # Sharded decoders receive their inputs, too, in the dtype that they compute in.
        self.stream = self.computed if self.is_sharded else self.weight
        is_copied = self.computed < self.stream and self.trains_all  # autocast keeps such copies
        self.copies = {"bfloat16 weights": self.computed * self.num_base} if is_copied else {}

    @property
    def num_trained(self) -> int:
        return self.num_base if self.trains_all else self.num_adapter * self.trains_adapters

    @property
    def gradients(self) -> int:
        """Bytes of all gradients; those of adapters are float32."""
        return self.num_trained * (self.weight if self.trains_all else 4)

    def adapted(self, lora: LoRASettings) -> list[tuple[int, ...]]:
        """Returns the shapes of adapted matrices; all experts of a layer are in one."""
        # peft adapts the experts of a layer as one parameter with three axes, not as modules.
        modules, adapts_experts = lora.modules(), False
        if self.architecture.experts is not None:
            modules, adapts_experts = lora.beside_experts()
        return [
            shape
            for key, shape in self.shapes.items()
            if (len(shape) == 2 and key.split(".")[-2] in modules)
            or (len(shape) == 3 and adapts_experts)
        ]

    @property
    def num_adapter(self) -> int:
        return sum(
            lora.rank * math.prod(shape[:-2]) * sum(shape[-2:])
            for lora in self.adapters
            for shape in self.adapted(lora)
        )

    def on_host(self) -> dict[str, int]:
        """Returns what rollouts keep to restore the weights after merging an adapter."""
        # Sharded weights are gathered into copies, packed ones not merged: none is restored.
        if self.is_sharded or not self.adapters or self.num_packed:
            return {}
        merged = self.weight * sum(map(math.prod, self.adapted(self.adapters[0])))
        return {"on the host, weights under a merged adapter": merged}

    def training(self, run: Mapping[str, Any]) -> dict[str, int]:
        """Returns what forward and backward take besides weights, gradients, optimiser states."""
        a, s, D = self.architecture, self.computed, self.architecture.hidden_size
        packed = int(run.get("packing") or 1)
        length = sum(row_tokens(run["prompt"], run["response"], a.spec(), copies=packed))
        rows = _training_rows(run)
        scored = rows * packed * run["response"] * (1 + run["module"].endswith("HybridModule"))
        # With recomputation a layer keeps its input alone, and is made again in the backward.
        whole, small, passing = self._layer()
        every = 1 if self.recompute == "selective" else int(self.recompute)
        again = a.num_layers // every if every else 0
        # Of the layers that are computed again, one at a time is whole.
        kept = (a.num_layers - again + bool(again)) * whole + again * small
        parts = {
            "activations": rows * length * (kept + passing + 3 * self.stream * D),
            # Rows and their gradients, logits and their gradient, the gradient of the weight.
            "head": scored * D * (4 + 2 * s)
            + 8 * min(scored * a.vocab_size, CHUNK_ELEMENTS[run["device"]])
            + 4 * a.vocab_size * D * self.trains_all,
        }
        parts["experts with their adapter"] = self._adapted_experts()
        return parts | self._gathered() | self.copies

    def _gathered(self) -> dict[str, int]:
        """Returns what sharded training holds whole: embedding, head and two layers at a time."""
        if not self.is_sharded:
            return {}
        sizes = {key: math.prod(shape) for key, shape in self.shapes.items()}
        last = f".layers.{self.architecture.num_layers - 1}."  # the first ones may lack experts
        layer = sum(size for key, size in sizes.items() if last in key)
        ends = sum(size for key, size in sizes.items() if ".layers." not in key)
        # Gradients in the dtype of products until they are summed in float32, one layer later.
        gradients = self.computed * (layer + ends) + 8 * layer
        return {
            "gathered weights": self.computed * (2 * layer + ends),
            "whole gradients": gradients * self.trains_all,
        }

    def _adapted_experts(self) -> int:
        """Returns the bytes of peft's sums of experts and adapter, kept for the backward."""
        shapes = [shape for one in self.adapters[:1] for shape in self.adapted(one)]
        sums = self.computed * sum(math.prod(shape) for shape in shapes if len(shape) == 3)
        return sums // (self.architecture.num_layers if self.recompute else 1)

    def _layer(self) -> tuple[int, int, int]:
        """Returns bytes per token of a layer: kept whole, kept to recompute, for its backward."""
        # Under a mask, attention repeats keys and values for all query heads.
        a, s, r = self.architecture, self.computed, self.stream
        D, E = a.hidden_size, a.inner_width
        Q, K = a.num_heads * a.head_width, a.kv_heads * a.head_width
        # The gradient of a weight, or of an adapter on it, needs its input. Autocast copies rows of
        # a wider stream for each of them; the input of ``o_proj`` is what attention returns.
        trained = {*(self.adapters[0] if self.adapters else LoRASettings(targets="all")).modules()}
        normed = trained & {"q_proj", "k_proj", "v_proj"}, trained & {"gate_proj", "up_proj"}
        copies = sum(len(places) if r > s else bool(places) for places in normed)
        fed = D * copies + E * ("down_proj" in trained)
        # Inputs of norms; queries, keys, values and output; the gate, its SiLU, what it multiplies.
        whole = 2 * r * D + s * (
            fed + 4 * Q + 3 * E + (Q + K) * (a.decoder not in ("qwen2", "llama"))
        )
        if a.experts is not None:  # each has rows of its own in and out, sorted and in order
            whole += 5 * s * D * a.experts.per_token
        small = r * D
        if self.recompute == "selective":
            small += 2 * s * (Q + K + E + D)  # what attention and seven products return
        return whole, small, r * D + 3 * s * E

    def decoding(self, run: Mapping[str, Any], decoder: Mapping[str, Any]) -> dict[str, int]:
        a, s, D = self.architecture, self.computed, self.architecture.hidden_size
        window, cache = _options(decoder.get("window")), _class(decoder.get("cache"))
        width = window.get("block_length") or window.get("width") or a.block_size or run["response"]
        # Rollouts of RL have a batch of their own, since they need no gradients.
        rows = run.get("rollout_batch_size") or run.get("batch_size")
        rows = rows or default_batch(run["response"])
        keeps_logits = run.get("level") == "logits"
        cells = rows * (run["response"] if keeps_logits else min(width, run["response"]))
        columns = tokens = rows * (run["prompt"] + run["response"])
        if cache.endswith("BlockCache"):  # prompts run separately, a step has two blocks at most
            tokens = min(rows * run["prompt"], max(PROMPT_TOKENS, run["prompt"]))
            tokens += 2 * rows * max(min(width, run["response"]), a.block_size or 0)
        if decoder.get("guidance"):  # rows of both prompts, and the combination of their logits
            tokens, cells = 2 * tokens, 5 * cells
        logits = cells * a.vocab_size
        moved = 0 if a.experts is None else D * a.experts.per_token
        token = 3 * (self.stream * D + s * (a.inner_width + moved))
        parts = {
            "activations": tokens * token,
            "logits": s * logits + min(48 * logits, _SCORED[run["device"]]),
        }
        if keeps_logits:  # a copy, on its way to the host
            parts["kept logits"] = s * rows * run["response"] * a.vocab_size
        # Between refreshes a cache stands in for whole columns, so a policy that reads hidden
        # states needs theirs from before, too.
        is_cached = bool(cache) and not cache.endswith("NoCache")
        has_graphs = run["device"] == "cuda" and self._has_graphs(is_cached, tokens)
        if is_cached:  # keys, values and last hidden rows; padding has a column of its own
            keys = a.num_layers * a.kv_heads * a.head_width
            parts["caches"] = (columns + rows * has_graphs) * (2 * s * keys + self.stream * D)
        if run.get("level") == "features" or "TraceLock" in _class(decoder.get("policy")):
            copies = 1 + is_cached * (1 + has_graphs)  # graphs return theirs in one place
            parts["three hidden states"] = columns * 3 * s * D * copies
        if has_graphs:
            # Their pool, apart from other memory, holds one forward and its logits for all of them,
            # and the results of each: ids, scores and masks of the canvas, 48 bytes a column. Those
            # of a forward are logits, once more.
            pool = min(tokens, MOST_TOKENS) * token + parts["logits"] + s * logits
            parts["graphs"] = pool + MOST_GRAPHS * (48 * columns + GRAPH)
        if self.is_sharded:
            parts["whole weights"] = s * self.num_base
        return parts | self.copies

    def _has_graphs(self, is_cached: bool, tokens: int) -> bool:
        """Whether decodes on a GPU record graphs, for which weights must stay where they are."""
        if self.is_sharded or self.num_packed or self.computed < self.weight:
            return False
        # Whole canvases are recorded once so few rows are left that less is in use than before.
        return self.cuda_graphs and (self.computed == 2 if is_cached else tokens <= MOST_TOKENS)


def _described(options: Mapping[str, Any]) -> tuple[Architecture, int]:
    """Returns the decoder of a backbone's options, and its vision tower's number of parameters."""
    if options.get("architecture"):
        return _built(Architecture, options["architecture"]), 0
    from_ar = options.get("from_ar")
    release = resolve(
        str(options["path"]),
        spec_overrides=options.get("spec_overrides"),
        from_ar=None if from_ar is None else _built(FromAR, from_ar),
    )
    if not (options.get("vision") and "mm_vision_tower" in release.config):
        return release.architecture, 0
    # Counted from the modules themselves, without memory: a tower has no table of shapes.
    with torch.device("meta"):
        tower = TowerVision(VisionSettings(), release.config)
    return release.architecture, sum(part.numel() for part in tower.parameters())


def plan_of(config: Mapping[str, Any], *, trains: bool = True) -> Plan | None:
    """Makes a plan from a resolved configuration, or ``None`` for another than an ``HFBackbone``.

    ``trains`` is false for commands that make no update.
    """
    settings, data, trainer = _options(config["model"]), _options(config["data"]), config["trainer"]
    if not _class(settings.get("backbone")).endswith("HFBackbone"):
        return None
    policy, values = _models(settings, trainer)
    models = list(dict.fromkeys(model for model in (policy, values) if model))
    run = {**settings, **data, **_sizes(data, trainer), "module": _class(config["model"])}
    # RL, too, has responses to each prompt, but its data module trains on them.
    only_decodes = _class(config["data"]).endswith("PromptDataModule")
    is_rl = "responses_per_prompt" in data and not only_decodes
    trained = models if trains and not only_decodes else []
    split = _split(models, trained, _class(settings.get("optimizer")))
    gradients = split["gradients"]
    buckets = gradients if str(trainer.get("strategy")).startswith("ddp") else 0
    stored = {"on disk, a checkpoint": gradients + split["optimiser states"]} if gradients else {}
    return Plan(
        model=str(_options(settings["backbone"]).get("path") or "random weights"),
        num_parameters=sum(model.num_base + model.num_adapter for model in models),
        num_trained=sum(model.num_trained for model in trained),
        split=split,
        training=_training(policy, values, run, buckets) if gradients and run["response"] else {},
        update=gradients if run["device"] == "cuda" else 0,  # AdamW: roots of second moments
        decoding=_decoding(policy, run) if only_decodes or is_rl else {},
        elsewhere=stored | (policy.on_host() if is_rl else {}),
        is_sharded=policy.is_sharded,
    )


def _sizes(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    lengths = data.get("response_length") or 0
    return {
        "device": "cpu" if trainer.get("accelerator") == "cpu" else "cuda",
        "prompt": data.get("max_prompt_length") or 0,
        "response": lengths if isinstance(lengths, int) else max(lengths),
    }


def _split(models: list[_Model], trained: list[_Model], optimizer: str) -> dict[str, int]:
    """Returns weights, gradients, and what the optimiser keeps: as wide as gradients, or a byte."""
    name = optimizer.rpartition(".")[2]
    gradients = sum(model.gradients for model in trained)
    states = gradients * _STATES.get(name, 2)
    if name.endswith("8bit"):
        states = 2 * sum(model.num_trained for model in trained)
    return {
        "weights": sum(model.stored + 4 * model.num_adapter for model in models),
        "gradients": gradients,
        "optimiser states": states,
    }


def _models(
    settings: Mapping[str, Any], trainer: Mapping[str, Any]
) -> tuple[_Model, _Model | None]:
    """Returns the policy, and what runs a forward for values: the policy, another, or ``None``."""
    policy = _Model(_options(settings["backbone"]), trainer)
    backbone = settings.get("value_backbone")
    values = _Model(_options(backbone), trainer) if backbone else None
    if not settings.get("value"):
        return policy, values
    value = _options(settings["value"])
    reader = value.get("backbone", "lora")
    # Values may be read from the policy's own layers: through a second adapter, by a head alone, or
    # from another backbone.
    if reader == "lora":
        policy.adapters.append(_built(LoRASettings, value.get("lora") or {}))
    return policy, values or (None if reader == "head" else policy)


def _training_rows(run: Mapping[str, Any]) -> int:
    """Returns the rows of a forward: states of examples, views of a bound, both sides of a pair."""
    rows, masking = run.get("batch_size", 1), _options(run.get("masking"))
    if "responses_per_prompt" not in run:  # RL has its states in the items of a batch
        rows *= masking.get("copies", 1)
    rows *= masking.get("num_states", 1) * (2 if masking.get("coupled") else 1)
    return int(rows * (2 * run["num_states"] if "num_states" in run else 1))


def _training(
    policy: _Model, values: _Model | None, run: Mapping[str, Any], buckets: int
) -> dict[str, int]:
    """Returns what forward and backward take; a value model's are kept as long as the policy's."""
    parts = policy.training(run)
    of_values = values.training(run) if values else {}
    parts |= {f"{name} of values": n for name, n in of_values.items() if name != "head"}
    return parts | ({"buckets of gradients": buckets} if buckets else {})


def _decoding(policy: _Model, run: Mapping[str, Any]) -> dict[str, int]:
    """Returns what the largest decoder takes, since they decode one after the other."""
    longest = max(run["response"], run.get("val_response_length") or 0)
    swept = [_options(one)["decoder"] for one in (run.get("sweep") or {}).values()]
    decoders = [_options(one) for one in [*(run.get("decoders") or {}).values(), *swept]] or [{}]
    windows = [_options(one) for one in (run.get("windows") or {}).values()]
    placed = [{**one, "cache": None, **window} for one in decoders for window in windows]
    each = [policy.decoding({**run, "response": longest}, one) for one in placed or decoders]
    return max(each, key=lambda parts: sum(parts.values()))


def check_run(config: Mapping[str, Any], *, trains: bool = True) -> str | None:
    """Plans a run of a large model before anything is loaded, and refuses what cannot fit.

    Returns the plan in one line; ``None`` for models of fewer than :data:`LARGE` parameters, and if
    the backbone cannot be described: building it will report why, with the option's place.
    """
    try:
        plan = plan_of(config, trains=trains)
    except (ValueError, TypeError, OSError, LookupError):
        return None
    # Tests and tutorials build small models by the dozen, where a line about memory is noise.
    if plan is None or plan.num_parameters < LARGE:
        return None
    processes, capacity = num_processes(config["trainer"]), device_bytes(config["trainer"])
    # Refused is only what cannot fit whatever the lengths are: a plan is a bound from above, and a
    # run whose prompts are short may still fit.
    needed = plan.least(processes)
    if capacity is None or needed <= capacity:
        return plan.short(processes)
    advice = "a smaller dtype, an adapter (lora)"
    if not plan.is_sharded and plan.num_trained:
        advice += " or split weights (configs/trainer/fsdp.yaml)"
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.split.items() if size)
    raise ValueError(
        f"{plan.model}: {needed / GIB:.1f} GiB are needed on each of {processes} device(s), of "
        f"which each has {capacity / GIB:.1f} (in all: {parts}); try {advice}"
    )


def advice(config: Mapping[str, Any], plan: Plan) -> str | None:
    """Returns a line for a run that recomputes layers whose products the device could keep."""
    config = deepcopy(config)
    backbone: Any = _options(_options(config["model"])["backbone"])
    if not plan.training or backbone.get("gradient_checkpointing") is not True:
        return None
    backbone["gradient_checkpointing"] = "selective"
    selective = plan_of(config)
    assert selective is not None
    number, capacity = num_processes(config["trainer"]), device_bytes(config["trainer"])
    # Without a GPU on this machine, "auto" does not say where the run will be.
    is_here = config["trainer"].get("accelerator") != "auto" or torch.cuda.is_available()
    if is_here and capacity is not None and selective.most(number) > capacity:
        return None
    # Without recomputation a layer multiplies for its output and the gradient of its input, and,
    # where weights are trained, for theirs.
    more = 33 if plan.num_trained == plan.num_parameters else 50
    return (
        f"gradient_checkpointing: true multiplies {more} % more than selective, which takes "
        f"{selective.most(number) / GIB:.3g} GiB on each of {number} instead of "
        f"{plan.most(number) / GIB:.3g}"
    )


def num_processes(trainer: Mapping[str, Any]) -> int:
    """Returns the number of processes that a trainer's settings request, as far as they say."""
    devices: Any = trainer.get("devices", 1)
    if isinstance(devices, str) and "," in devices:  # ids of GPUs, as Lightning reads them
        devices = devices.strip(",").split(",")
    if isinstance(devices, list):
        count = len(devices)
    elif str(devices).isdigit():
        count = int(devices)
    else:  # "auto" or -1
        count = torch.cuda.device_count() if _on_gpus(trainer) else 1
    return max(1, count) * int(trainer.get("num_nodes") or 1)


def device_bytes(trainer: Mapping[str, Any]) -> int | None:
    """Returns the memory of a GPU, or a process's share of this machine's; ``None``: unknown."""
    if _on_gpus(trainer):
        if not torch.cuda.is_available():
            return None
        return int(torch.cuda.get_device_properties(0).total_memory)
    if str(trainer.get("accelerator")) not in ("cpu", "auto"):
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container sees the memory of the whole machine but is killed at its own limit.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total // max(1, num_processes({**trainer, "num_nodes": 1}))


def _on_gpus(trainer: Mapping[str, Any]) -> bool:
    accelerator = str(trainer.get("accelerator"))
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def _options(spec: Any) -> Mapping[str, Any]:
    """Returns the settings of a class, given with or without its path; a bare name has none."""
    if not isinstance(spec, Mapping):
        return {}
    return spec.get("init_args") or ({} if "class_path" in spec else spec)


def _class(spec: Any) -> str:
    return str(spec.get("class_path", "")) if isinstance(spec, Mapping) else str(spec or "")


def _built(kind: Any, values: Any) -> Any:
    """Returns a dataclass of plain settings; the parser may have built it already."""
    return values if isinstance(values, kind) else kind(**_options(values))
