"""What a run takes of memory and disk, from its configuration alone; nothing is loaded.

Parameters are those of the backbone on the meta device, its adapter included. Activations come from
the backbone's own code: a training step and a forward run on tensors without memory, two and three
layers deep, while the bytes that are alive are counted; every further layer adds as much as the
third did. Logits, caches, optimiser states and records are counted by their shapes.

Prompts and responses are taken as long as the configuration allows, so a plan says what a run needs
at most. It leaves out heads beside the backbone (a few MB), what the allocator loses, and the
context of a GPU or Python itself (about 0.5 GiB).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.location import in_hub_cache, is_local, locate
from lit_dlm.backbones.lora_settings import LoRASettings, read_adapter_settings
from lit_dlm.backbones.resolution import FromAR, resolve
from lit_dlm.backbones.visibility import attention_visibility
from lit_dlm.heads.projection import ProjectorConfig
from lit_dlm.modules.supervised_batch import row_tokens
from lit_dlm.ops.fused_head import CHUNK_ELEMENTS
from lit_dlm.twins import RELEASES

GIB = 2.0**30
LARGE = 100_000_000
"""Parameters from which on a run prints its plan and is refused where it cannot fit."""
PROCESSES = (1, 2, 4, 8, 16, 32, 64)
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Muon": 1, "RMSprop": 1, "Adagrad": 1}
"""Numbers that an optimiser keeps of each trained parameter; others are taken to keep two."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes by what they are for; of one process unless said otherwise."""

    model: str
    """Where the weights come from."""
    num_parameters: int
    """Of the backbone and its adapter."""
    num_trained: int
    """Those that are trained."""
    split: dict[str, int] = field(default_factory=dict)
    """What sharded training splits among processes: weights, gradients, optimiser states."""
    training: dict[str, int] = field(default_factory=dict)
    """What an update takes besides on every process; empty where nothing is trained."""
    decoding: dict[str, int] = field(default_factory=dict)
    """What decoding takes besides the weights on every process; empty where nothing is decoded."""
    disk: dict[str, int] = field(default_factory=dict)
    """Bytes on disk, of all processes together."""
    is_sharded: bool = False
    """Whether the strategy splits what is trained."""
    gathered: int = 0
    """Whole weights while a sharded policy decodes."""
    host: dict[str, int] = field(default_factory=dict)
    """Memory of the host beside that of the device."""

    def held(self, num_processes: int = 1) -> int:
        """Weights, gradients and optimiser states on one of so many processes."""
        whole = sum(self.split.values())
        return whole // num_processes if self.is_sharded else whole

    def least(self, num_processes: int = 1) -> int:
        """What one process needs in any case, whatever the lengths: see :meth:`held`."""
        return self.held(num_processes) + (self.gathered if self.is_sharded else 0)

    def most(self, num_processes: int = 1) -> int:
        """The larger of an update and of decoding on one of so many processes."""
        gathered = self.gathered if self.is_sharded else 0
        return self.held(num_processes) + max(
            sum(self.training.values()),
            sum(self.decoding.values()) + gathered if self.decoding else 0,
        )

    def short(self, num_processes: int = 1) -> str:
        """One line for the start of a run."""
        shares = {
            name: size // (num_processes if self.is_sharded else 1)
            for name, size in self.split.items()
        }
        parts = {**shares, **self.training, **self.decoding}
        told = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        return (
            f"plan: {self.num_parameters / 1e9:.2f} B parameters, {self.num_trained / 1e9:.3f} B "
            f"trained; GiB on each of {num_processes}: {told}; at most "
            f"{self.most(num_processes) / GIB:.2f} at a time"
        )

    def table(self) -> str:
        """All of it, for 1 to 64 processes."""
        lines = [
            f"{self.model}: {self.num_parameters:,} parameters, {self.num_trained:,} trained",
            "",
            _row("GiB per process, processes", [f"{number:,}" for number in PROCESSES]),
        ]
        for name, size in self.split.items():
            if not size:
                continue
            parts = [size / (number if self.is_sharded else 1) for number in PROCESSES]
            lines.append(_row(name, [f"{part / GIB:.2f}" for part in parts]))
        rest = {f"training: {name}": size for name, size in self.training.items()}
        rest |= {f"decoding: {name}": size for name, size in self.decoding.items()}
        if self.is_sharded and self.decoding:
            rest["decoding: whole weights"] = self.gathered
        lines += [_row(name, [f"{size / GIB:.2f}"] * len(PROCESSES)) for name, size in rest.items()]
        lines.append(
            _row("at most at a time", [f"{self.most(number) / GIB:.2f}" for number in PROCESSES])
        )
        lines.append("")
        lines += [
            f"on the host, {name}: {size / GIB:,.2f} GiB"
            for name, size in self.host.items()
            if size
        ]
        lines += [f"on disk, {name}: {size / 1e6:,.1f} MB" for name, size in self.disk.items()]
        return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return name.ljust(34) + "".join(cell.rjust(9) for cell in cells)


def plan_of(config: Mapping[str, Any], *, offline: bool = False) -> Plan | None:
    """Reads a plan from a resolved configuration.

    Args:
        config: with ``model``, ``data`` and ``trainer``, as the parser gives it.
        offline: a release that is not on this machine is described by the packaged table of
            :mod:`lit_dlm.twins` instead of the hub.

    Returns:
        The plan; ``None`` where the module has no :class:`~lit_dlm.backbones.hf.HFBackbone`.

    Raises:
        ValueError: the backbone's description cannot be found or used.
    """
    module, data, trainer = config["model"], config["data"], config["trainer"]
    settings, given = _options(module), _options(data)
    backbones = {
        name: _options(settings[name])
        for name in ("backbone", "value_backbone")
        if str((settings.get(name) or {}).get("class_path", "")).endswith("HFBackbone")
    }
    if "backbone" not in backbones:
        return None
    options = backbones["backbone"]
    models = [_meta(_architecture(one, offline=offline), one) for one in backbones.values()]
    architecture = models[0].architecture
    if (settings.get("value") or {}).get("backbone") == "lora":
        models[0].add_side_adapter("value", _built(LoRASettings, settings["value"]["lora"]))
    weights = [weight for model in models for weight in model.parameters()]
    decodes_only = str(data["class_path"]).endswith("PromptDataModule")
    trained = [weight for weight in weights if weight.requires_grad and not decodes_only]
    optimizer = str((settings.get("optimizer") or {}).get("class_path", "")).rpartition(".")[2]
    states = 0 if optimizer == "SGD" else _STATES.get(optimizer, 2)
    is_rl = "responses_per_prompt" in given and not decodes_only
    prompt, response = given.get("max_prompt_length", 0), _longest(given.get("response_length", 0))
    dtype = models[0].dtype
    is_mixed = str(trainer.get("precision")) == "bf16-mixed"
    computed = 2 if is_mixed else dtype.itemsize
    strategy = str(trainer.get("strategy"))
    is_sharded = "ShardedStrategy" in strategy or "ModelParallelStrategy" in strategy
    training: dict[str, int] = {}
    if trained and prompt + response:
        rows, lengths, scored = _training_rows(settings, given, architecture, prompt, response)
        training["activations"] = _activations(
            architecture, options, rows, lengths, is_mixed=is_mixed
        )
        training["head"] = _head(
            models[0], scored, CHUNK_ELEMENTS["cuda" if _on_gpus(trainer) else "cpu"]
        )
        if is_sharded:  # embedding, head and two layers are whole at a time
            layers = models[0].model.model.layers
            ends = (models[0].model.model.embed_tokens, models[0].model.lm_head)
            shown = {id(one): one for part in (*layers[:2], *ends) for one in part.parameters()}
            training["gathered weights"] = computed * sum(one.numel() for one in shown.values())
        elif computed < dtype.itemsize:  # autocast keeps copies until the forward ends
            training["bfloat16 weights"] = computed * sum(one.numel() for one in trained)
    decoding: dict[str, int] = {}
    if decodes_only or is_rl:
        rows = given.get("rollout_batch_size") or given.get("batch_size", 1)
        decoding = _decoding(
            settings, architecture, options, rows, prompt, response, is_mixed=is_mixed
        )
    trained_bytes = sum(weight.nbytes for weight in trained)
    disk: dict[str, int] = {}
    if trained:
        disk["a checkpoint"] = trained_bytes * (1 + states)
    if decoding:
        record = _record(settings, prompt, response, is_rl=is_rl)
        disk["1,000 records before compression"] = 1000 * record
        if is_rl:
            count = given["prompts_per_step"] * given["responses_per_prompt"]
            disk["records of an RL step before compression"] = count * record
    return Plan(
        model=str(options.get("path") or "random weights"),
        num_parameters=sum(weight.numel() for weight in weights),
        num_trained=sum(weight.numel() for weight in trained),
        split={
            "weights": sum(weight.nbytes for weight in weights),
            "gradients": trained_bytes,
            "optimiser states": trained_bytes * states,
        },
        training=training,
        decoding=decoding,
        disk=disk,
        is_sharded=is_sharded,
        gathered=computed * sum(one.numel() for one in models[0].parameters()) if is_rl else 0,
        host={"weights under the adapter while it is merged": _adapted(models[0])} if is_rl else {},
    )


def _adapted(model: HFBackbone) -> int:
    """Bytes of the weights that an adapter adapts, 0 without one."""
    if model.adapter is None:
        return 0
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    return sum(layer.get_base_layer().weight.nbytes for layer in layers)


def check_run(config: Mapping[str, Any]) -> str | None:
    """Plans a run of a large model before anything is loaded, and refuses what cannot fit.

    Returns:
        The plan in one line; ``None`` for models of less than :data:`LARGE` parameters, and where
        the backbone cannot be described: building it says so, with its place.

    Raises:
        ValueError: see :func:`check_fits`.
    """
    options = _options((_options(config["model"])).get("backbone"))
    if not (options.get("path") or options.get("architecture")):
        return None
    try:
        shapes = _architecture(options, offline=False).parameter_shapes()
        if sum(map(math.prod, shapes.values())) < LARGE:
            return None
        plan = plan_of(config)
    except (ValueError, TypeError, OSError):
        return None
    if plan is None:
        return None
    check_fits(plan, config["trainer"])
    return plan.short(num_processes(config["trainer"]))


def check_fits(plan: Plan, trainer: Mapping[str, Any]) -> None:
    """Refuses a run whose weights, gradients and optimiser states alone exceed the device.

    Raises:
        ValueError: they do.
    """
    processes = num_processes(trainer)
    capacity = device_bytes(trainer)
    needed = plan.least(processes)
    if capacity is None or needed <= capacity:
        return
    advice = "a smaller dtype, an adapter (lora)"
    if not plan.is_sharded and plan.num_trained:
        advice += " or split weights (configs/trainer/fsdp.yaml)"
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.split.items() if size)
    raise ValueError(
        f"{plan.model}: {needed / GIB:.1f} GiB are needed on each of {processes} device(s), of "
        f"which each has {capacity / GIB:.1f} (in all: {parts}); try {advice}"
    )


def num_processes(trainer: Mapping[str, Any]) -> int:
    """Processes that a trainer's settings ask for, as far as they say."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and not devices.isdigit():
        listed = [part for part in devices.split(",") if part.strip()]
        on_gpus = _on_gpus(trainer)
        count = len(listed) if "," in devices else torch.cuda.device_count() if on_gpus else 1
    else:
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 0:
            count = torch.cuda.device_count()
    return max(1, count) * int(trainer.get("num_nodes") or 1)


def device_bytes(trainer: Mapping[str, Any]) -> int | None:
    """Memory of a device: of a GPU, or a process's share of this machine's; ``None``: unknown."""
    if _on_gpus(trainer):
        if not torch.cuda.is_available():
            return None
        return int(torch.cuda.get_device_properties(0).total_memory)
    if str(trainer.get("accelerator")) not in ("cpu", "auto"):
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total // max(1, num_processes({**trainer, "num_nodes": 1}))


def _on_gpus(trainer: Mapping[str, Any]) -> bool:
    accelerator = str(trainer.get("accelerator"))
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def _options(spec: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of a class, given with its path or without."""
    if not spec:
        return {}
    return spec.get("init_args") or ({} if "class_path" in spec else spec)


def _longest(length: int | Sequence[int]) -> int:
    return length if isinstance(length, int) else max(length)


def _architecture(options: Mapping[str, Any], *, offline: bool) -> Architecture:
    if options.get("architecture"):
        return _built(Architecture, options["architecture"])
    path, from_ar = str(options["path"]), options.get("from_ar")
    description: str | Mapping[str, Any] = path
    if offline and not is_local(path) and not in_hub_cache(path, weights=False):
        if path not in RELEASES:
            raise ValueError(f"{path} is not on this machine; fetch it with lit-dlm download")
        description = RELEASES[path].config
    found = resolve(
        description,
        spec_overrides=options.get("spec_overrides"),
        from_ar=None if from_ar is None else _built(FromAR, from_ar),
        source=f"{path}: ",
    )
    return found.architecture


def _built(kind: Any, values: Any) -> Any:
    """A dataclass of plain settings, which the parser may have built already."""
    return values if isinstance(values, kind) else kind(**_options(values))


def _meta(architecture: Architecture, options: Mapping[str, Any]) -> HFBackbone:
    """The backbone without memory."""
    lora, adapter = options.get("lora"), options.get("adapter")
    if adapter and not options.get("merge_adapter"):
        lora = read_adapter_settings(locate(adapter))
    trainable = bool(options.get("trainable"))
    with torch.device("meta"):
        model = HFBackbone(
            architecture=architecture,
            dtype=options.get("dtype", "float32"),
            trainable=trainable and not lora,
            lora=None if lora is None else _built(LoRASettings, lora),
            gradient_checkpointing=options.get("gradient_checkpointing", False),
        )
    if adapter and not trainable:
        model.requires_grad_(False)
    return model


def _training_rows(
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
    architecture: Architecture,
    prompt: int,
    response: int,
) -> tuple[int, int, int]:
    """Rows of a batch, their tokens, and scored cells of all of them, at most."""
    copies = int(settings.get("packing") or 1)
    parts = row_tokens(prompt, response, architecture.spec(), copies=copies)
    length = sum(parts)
    limit = data.get("max_tokens_per_batch")
    rows = data.get("batch_size", 1) if limit is None else max(1, limit // length)
    return rows, length, rows * copies * response


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _activations(
    architecture: Architecture,
    options: Mapping[str, Any],
    rows: int,
    length: int,
    *,
    is_mixed: bool = False,
    trains: bool = True,
) -> int:
    """Most bytes alive in a step of all layers, besides weights and their gradients."""
    every = options.get("gradient_checkpointing", False)
    stride = every if isinstance(every, int) and every > 1 else 1
    sizes = []
    for layers in (2 * stride, 3 * stride):
        model = _meta(replace(architecture, num_layers=layers), {**options, "adapter": None})
        sizes.append(_step(model, rows, length, is_mixed=is_mixed, trains=trains))
    per_layer = (sizes[1] - sizes[0]) / stride
    return int(sizes[1] + per_layer * (architecture.num_layers - 3 * stride))


def _step(model: HFBackbone, rows: int, length: int, *, is_mixed: bool, trains: bool) -> int:
    """Most bytes alive in one forward, and a backward where there is one, of a small model."""
    model.train(trains)
    with FakeTensorMode(), torch.set_grad_enabled(trains):
        _without_memory(model)
        alive = _Alive()
        for weight in model.parameters():
            alive.known.add(weight.untyped_storage()._cdata)
            if weight.requires_grad:  # as from the batch before it
                weight.grad = torch.empty_like(weight)
                alive.known.add(weight.grad.untyped_storage()._cdata)
        with alive, torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            ids = torch.zeros(rows, length, dtype=torch.long)
            visible: Tensor | None
            if trains and model.spec.attention == "block":  # two copies under a matrix
                visible = torch.ones(rows, 1, length, length, dtype=torch.bool)
            else:
                pad = torch.ones(rows, length, dtype=torch.bool)
                visible = attention_visibility(model.spec, ids, pad_mask=pad, response_start=0)
            last, _ = model._encode(ids, visible, ids)
            if trains:
                last.sum().backward()
    return alive.peak


def _without_memory(model: nn.Module) -> None:
    """Replaces tensors on the meta device by fake ones on the CPU, which autocast knows."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                store[name] = made[id(tensor)]


def _head(model: HFBackbone, scored: int, elements: int) -> int:
    """What :func:`~lit_dlm.ops.fused_head.token_stats` takes for so many cells."""
    weight = model.model.lm_head.weight
    V, D = weight.shape
    gradient = 4 * V * D if weight.requires_grad else 0
    return scored * D * (4 + 2 * weight.itemsize) + 2 * 4 * min(scored * V, elements) + gradient


def _decoding(
    settings: Mapping[str, Any],
    architecture: Architecture,
    options: Mapping[str, Any],
    rows: int,
    prompt: int,
    response: int,
    *,
    is_mixed: bool,
) -> dict[str, int]:
    decoders = [_options(one) for one in (settings.get("decoders") or {}).values()]
    itemsize = 2 if is_mixed else getattr(torch, options.get("dtype", "float32")).itemsize
    length = prompt + response
    widths = [_window(decoder, response) for decoder in decoders] or [response]
    found = {
        "activations": _activations(
            architecture,
            {**options, "lora": None},
            rows,
            length,
            is_mixed=is_mixed,
            trains=False,
        ),
        # In the model's dtype, and once more in float32 for probabilities.
        "logits": rows * max(widths) * architecture.vocab_size * (itemsize + 4),
    }
    if any(decoder.get("cache") for decoder in decoders):
        width = architecture.kv_heads * architecture.head_width
        found["cache"] = 2 * rows * length * architecture.num_layers * width * itemsize
    return found


def _window(decoder: Mapping[str, Any], response: int) -> int:
    options = _options(decoder.get("window"))
    return min(response, options.get("block_length") or options.get("width") or response)


def _record(settings: Mapping[str, Any], prompt: int, response: int, *, is_rl: bool) -> int:
    """Bytes of a stored decode of one token a step (docs/trajectory_format.md).

    Ids take three bytes, steps one or two, names and digests some 200. A level adds numbers for
    every cell, and for every row: a cell that is masked before a step.
    """
    rows = response * (response + 1) // 2
    size = 3 * (prompt + response) + (1 if response < 256 else 2) * response + 200
    size += 5 * settings.get("top_k", 0) * rows + 4 * settings.get("step_times", False) * response
    level = settings.get("level")
    if is_rl:  # log-probability, value and advantage
        size += 8 * response
    elif level == "signals":
        size += 6 * response + 7 * rows
    elif level == "features":
        shown = _options(settings.get("settings"))
        scores = 3 - list(_options(shown.get("features")).values()).count(False)
        snapshots = ProjectorConfig.num_snapshots  # and the differences of neighbours
        width = settings["hidden_rank"] * snapshots + settings["delta_rank"] * (snapshots - 1)
        groups = 2 * snapshots - 1 + scores  # each with a scale of its own in int8
        is_int8 = settings.get("scheme", "int8") == "int8"
        row = 3 + (width + scores + 2 * groups if is_int8 else 2 * (width + scores))
        cells = {"generation": response, "all": prompt + response}
        kept = round(settings["step_ratio"] * response)
        size += int(kept * cells.get(shown.get("layout", "masked"), (response + 1) / 2) * row)
    return size
