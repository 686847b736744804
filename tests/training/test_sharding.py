"""DDP and FSDP2 on two CPU processes against one process on the same global batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, model_parallel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_dlm.backbones import Architecture, HFBackbone, load_backbone
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.cache import WindowCache, WindowPlan
from lit_dlm.backbones.export import export_model
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.training.checkpoint import export_trained
from lit_dlm.training.sharding import (
    ShardedStrategy,
    decoding_weights,
    shard_trained,
    whole_weights,
)
from lit_dlm.training.terms import masked_nelbo
from tests.finetuning.runs import EXPERTS, quiet, small
from tests.processes import in_processes, in_two_processes, own_megabytes

STEPS, ROWS, LENGTH = 2, 4, 9
VARIANTS = {
    "full": {"lora": False, "dtype": "float32"},
    "lora": {"lora": True, "dtype": "float32"},
    "lora_bf16": {"lora": True, "dtype": "bfloat16"},
    "experts": {"lora": True, "dtype": "float32", **EXPERTS},
}
"""The third one mixes a frozen bfloat16 base with float32 adapters in each layer."""


def backbone(*, lora: bool, dtype: Any, tie: bool = True, **more: Any) -> HFBackbone:
    """Two layers, shifted, by default of Qwen2; with LoRA every base weight is frozen."""
    changes = {"vocab_size": 31, "mask_id": 30, "num_kv_heads": 1, "tie_embeddings": tie}
    return small(lora=lora, dtype=dtype, shift=1, **changes, **more)


class Scored(DecodeModule):
    """Cross-entropy and entropy of hidden cells through ``score_tokens``; notes dtypes."""

    def __init__(self, model: HFBackbone, *, visits: int = 0, fused: bool | None = None) -> None:
        super().__init__(model, tokenizer="tiny")
        self.visits = visits
        self.fused = fused
        self.losses: list[float] = []
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def on_train_start(self) -> None:
        """Forwards that differ in number between processes, as decoding would do."""
        with whole_weights(self), torch.no_grad():
            self.dtypes["whole"] = {value.dtype for value in self.backbone.parameters()}
            for _ in range(self.visits):
                self.backbone.denoise(torch.ones(1, 3, dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, hidden = batch
        shown = ids.masked_fill(hidden, 30)
        stats = self.backbone.score_tokens(Rows(shown, ids, hidden, torch.ones_like(hidden)))
        loss = masked_nelbo(stats, hidden).total + 0.1 * stats.entropy.sum() / (len(ids) * LENGTH)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        values = list(self.parameters())
        self.dtypes["kept"] = {value.dtype for value in values}
        self.dtypes["gradients"] = {value.grad.dtype for value in values if value.grad is not None}

    def train_dataloader(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Global batches from the trainer's step onwards; a process takes every second row."""
        generator = torch.Generator().manual_seed(5)
        rows = slice(self.trainer.global_rank, None, self.trainer.world_size)
        accumulate = self.trainer.accumulate_grad_batches
        for step in range(STEPS * accumulate):
            ids = torch.randint(2, 30, (ROWS, LENGTH), generator=generator)
            hidden = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
            if step >= self.trainer.global_step * accumulate:
                yield ids[rows], hidden[rows]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, fused=self.fused)


def trainer(
    folder: Path, strategy: Any, devices: int, *, save: str | None = None, **options: Any
) -> Trainer:
    """Saves every step under the name ``save``."""
    saver = ModelCheckpoint(
        folder,
        filename=save,
        every_n_train_steps=1,
        save_top_k=1 if save == "last" else -1,
        enable_version_counter=save != "last",
    )
    saving = {"enable_checkpointing": True, "callbacks": [saver]} if save else {}
    values = {"max_steps": STEPS, "gradient_clip_val": 0.5, **saving, **options}
    return quiet(folder, devices=devices, strategy=strategy, **values)


def fit(run: Trainer, module: Scored, resume: str | None = None) -> Scored:
    run.fit(module, ckpt_path=resume, weights_only=True)
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    with whole_weights(module):
        return {name: value.detach().float().clone() for name, value in module.named_parameters()}


def strategy(kind: str) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ShardedStrategy(
        process_group_backend="gloo", save_distributed_checkpoint=kind == "fsdp_folder"
    )


RUNS = [f"{kind}/{name}" for kind in ("ddp", "fsdp") for name in VARIANTS]
MIXED = "fsdp/full/bf16-mixed"


def train_everything(rank: int, folder: Path, alone: dict[str, Scored]) -> dict[str, Any]:
    """All strategies and variants one after the other; losses, and the sum of each weight."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for run in (*RUNS, "fsdp_folder/lora", MIXED):
        kind, name, *precision = run.split("/")
        options = {"precision": precision[0] if precision else "32-true"}
        visits = 0 if kind == "ddp" else 1 + 2 * rank
        save = "{step}" if name == "lora" else None
        module = Scored(backbone(**VARIANTS[name]), visits=visits)
        fit(trainer(folder / run, strategy(kind), 2, save=save, **options), module)
        sharded = [type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule)]
        layer = "Glm4Moe" if name == "experts" else "Qwen2"
        layers = 2 * [f"FSDP{layer}DecoderLayer"]
        assert sorted(sharded) == ([] if kind == "ddp" else sorted(["FSDPHFBackbone", *layers]))
        found = weights(module)
        told[run] = (module.losses, {key: float(value.sum()) for key, value in found.items()})
        if precision:
            kept = {key: {torch.float32} for key in ("kept", "gradients")}
            assert module.dtypes == {"whole": {torch.bfloat16}, **kept}
            ids = torch.randint(2, 30, (1, LENGTH))
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                module.backbone(ids)  # as a validation does
            export_trained(module.backbone, "tiny", folder / "model", write=rank == 0)
        elif name != "lora_bf16":
            # Adam divides by the size of a gradient, so small ones show its rounding.
            torch.testing.assert_close(found, weights(alone[name]), rtol=1e-4, atol=5e-5)
        if save:
            resumed = Scored(backbone(**VARIANTS[name]), visits=visits)
            start = weights(resumed)
            for value in filter(lambda one: one.requires_grad, resumed.parameters()):
                nn.init.constant_(value, 0.01)  # what is trained must come from the file
            again = trainer(folder / run / "again", strategy(kind), 2)
            fit(again, resumed, str(folder / run / "step=1.ckpt"))
            assert resumed.losses == module.losses[1:]
            torch.testing.assert_close(weights(resumed), found, rtol=0, atol=0)
            for key, value in found.items():
                assert torch.equal(value, start[key]) == ("lora_" not in key)
    return told


@pytest.mark.ddp
def test_two_processes_train_like_one_on_the_global_batch_and_resume(tmp_path: Path) -> None:
    """With every layer and the backbone sharded under FSDP2; mixed precision gathers bfloat16."""
    alone = {
        name: fit(trainer(tmp_path, "auto", 1), Scored(backbone(**options)))
        for name, options in VARIANTS.items()
    }
    first, second = in_two_processes(train_everything, tmp_path, alone)
    for run, (losses, sums) in first.items():
        others, same = second[run]
        assert sums == same
        # Sums in another order; bfloat16 rounds gradients to three digits before they are added.
        tolerance = 2e-2 if run == MIXED else 1e-2 if "bf16" in run else 1e-6
        mean = np.mean([losses, others], axis=0)
        np.testing.assert_allclose(mean, alone[run.split("/")[1]].losses, rtol=tolerance)
    for name, value in load_file(tmp_path / "model" / "model.safetensors").items():
        assert value.dtype == torch.float32
        assert not value.equal(value.bfloat16().float()), name


REDUCED = {
    "each": {"whole_gradients_gb": 0.0},
    "last": {},
    "replicas each": {"replicas": 2, "whole_gradients_gb": 0.0},
    "replicas last": {"replicas": 2},
}
"""Gradients of an update of two batches: reduced after each, or after the last."""


def train_replicas(rank: int, folder: Path) -> None:
    """Notes how often a part's gradients were summed over shards and over replicas."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Tensor]] = {}
    calls: dict[str, tuple[int, int]] = {}
    cases = [("lora", case) for case in (*REDUCED, "replicas each resumed")]
    for name, case in [*cases, ("full", "each"), ("full", "last")]:
        kind = case.removesuffix(" resumed")
        module = Scored(backbone(**VARIANTS[name]), fused="replicas" in kind)
        run = trainer(
            folder,
            ShardedStrategy(process_group_backend="gloo", **REDUCED[kind]),
            4,
            save="{step}" if case == "replicas each" else None,
            precision="32-true" if name == "lora" else "bf16-mixed",
            accumulate_grad_batches=2,
        )
        with pytest.MonkeyPatch.context() as patch:
            scattered = counted(patch, "reduce_scatter_single", 2 if "replicas" in kind else 4)
            summed = counted(patch, "all_reduce", 2)
            fit(run, module, str(folder / "step=1.ckpt") if case != kind else None)
        found[f"{name} {case}"] = weights(module)
        calls[f"{name} {case}"] = (len(scattered), len(summed))
        one, other = found[f"{name} {case}"], found[f"{name} each"]
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    one, other = (found[f"lora replicas each{part}"] for part in ("", " resumed"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert calls == {
        "lora each": (2 * STEPS * 2, 0),
        "lora last": (2 * STEPS, 0),
        "lora replicas each": (2 * STEPS * 2, 2 * STEPS),
        "lora replicas each resumed": (2 * (STEPS - 1) * 2, 2 * (STEPS - 1)),
        "lora replicas last": (2 * STEPS, 2 * STEPS),
        "full each": (3 * STEPS * 2, 0),
        "full last": (3 * STEPS, 0),
    }


def counted(patch: pytest.MonkeyPatch, name: str, size: int) -> list[None]:
    """One entry for every call of a collective by a group of this size, from now on."""
    calls: list[None] = []
    real = getattr(torch.distributed, name)

    def call(*args: Any, group: Any = None, **options: Any) -> Any:
        calls.extend([None] * (group is not None and group.size() == size))
        return real(*args, group=group, **options)

    patch.setattr(torch.distributed, name, call)
    return calls


@pytest.mark.ddp
def test_gradients_wait_for_the_last_batch_and_replicas_train_like_one_copy(tmp_path: Path) -> None:
    """Two replicas of two shards; layers are reduced apart, as is what is trained beside them."""
    in_processes(4, train_replicas, tmp_path)


def save_not_finite(rank: int, folder: Path) -> None:
    """A weight of rank 1 that is no number is named when it is saved and when it is loaded."""
    module = Scored(backbone(**VARIANTS["full"]))
    run = trainer(folder, strategy("fsdp_folder"), 2, max_steps=1)
    fit(run, module)
    if rank == 1:
        first = next(value for value in module.parameters() if value.requires_grad)
        first.detach().to_local().view(-1)[3] = torch.nan  # type: ignore[attr-defined]
    named = rf"{'backbone.' if rank == 1 else 'a weight '}.*has numbers that are not finite$"
    with pytest.raises(ValueError, match=rf"last\.ckpt: not written, since {named}"):
        run.save_checkpoint(folder / "last.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedStrategy, "_require_finite", lambda *_: None)
        run.save_checkpoint(folder / "old.ckpt")
    with pytest.raises(ValueError, match=rf"old\.ckpt: {named}"):
        fit(trainer(folder, strategy("fsdp_folder"), 2), module, str(folder / "old.ckpt"))


def save_cut_short(rank: int, folder: Path) -> None:
    """Step 1; step 2 from ``last``, whose files are written without the last one; step 2 again."""
    write, losses = model_parallel._distributed_checkpoint_save, []

    def fail(*given: Any) -> None:
        write(*given)
        raise OSError("killed")

    for part in ("begun", "cut", "resumed"):
        module = Scored(backbone(**VARIANTS["full"]))
        steps = 1 if part == "begun" else STEPS
        run = trainer(folder, strategy("fsdp_folder"), 2, save="last", max_steps=steps)
        with pytest.MonkeyPatch.context() as patch:
            if part == "cut":
                patch.setattr(model_parallel, "_distributed_checkpoint_save", fail)
                with pytest.raises(OSError, match="killed"):
                    fit(run, module, "last")
            else:
                fit(run, module, "last")
        losses.append(module.losses)
    begun, cut, resumed = losses
    assert (len(begun), len(cut)) == (1, 1)
    assert resumed == cut
    assert {path.name for path in folder.iterdir()} == {"last.ckpt", "last-former.ckpt"}


@pytest.mark.ddp
@pytest.mark.parametrize("check", [save_cut_short, save_not_finite])
def test_a_save_that_is_cut_short_or_refused_leaves_the_former_checkpoint(
    tmp_path: Path, check: Callable[[int, Path], None]
) -> None:
    in_two_processes(check, tmp_path)


def two_processes() -> DeviceMesh:
    torch.distributed.init_process_group("gloo")
    return init_device_mesh("cpu", (2,))


def shard_twice(rank: int) -> None:
    """A backbone inside another trained part: once is enough, whole weights are the originals."""
    mesh = two_processes()
    module = nn.Module()
    module.value = nn.Module()  # a value model: a backbone and a head beside it
    module.value.backbone = backbone(lora=True, dtype="float32", tie=False)
    module.value.head = nn.Linear(16, 1, bias=False)
    module.frozen = backbone(lora=True, dtype="float32").requires_grad_(False)
    expected = {name: value.detach().clone() for name, value in module.named_parameters()}
    shard_trained(module, mesh)
    for _ in range(2):
        for name, value in module.named_parameters():
            assert isinstance(value, DTensor) == name.startswith("value."), name
        with whole_weights(module):
            assert all(value.equal(expected[name]) for name, value in module.named_parameters())
        shard_trained(module, mesh)


IDS = torch.tensor([[3, 9, 30, 5, 30, 12], [7, 30, 8, 30, 2, 4]])
CELLS = IDS == 30
CHOSEN = Rows(IDS, IDS.masked_fill(CELLS, 6), CELLS)


@torch.no_grad()
def window(model: HFBackbone) -> Tensor:
    """Raw rows of a whole canvas, its keys and values written to a cache."""
    cache = WindowCache(length=6, num_rows=2)
    positions = torch.arange(6).expand(2, -1)
    cache.plan = WindowPlan(rows=torch.arange(2), columns=positions, kv_end=6)
    return model.encode(IDS, None, positions, cache=cache)[0]


CALLS: dict[str, Callable[[HFBackbone], Tensor]] = {
    "denoise": lambda model: model.denoise(IDS).logits.clamp_min(-1e3),
    "forward": lambda model: model(IDS),
    "encode": window,
    "head": lambda model: model.head(window(model)).clamp_min(-1e3),
    "score_tokens": lambda model: model.score_tokens(CHOSEN).ce,
    "score_with_hidden": lambda model: model.score_with_hidden(CHOSEN)[1],
    "encode_rows": lambda model: model.encode_rows(CHOSEN),
}
"""Every public method of a backbone, as the first thing that is asked of it."""


def outcome(model: HFBackbone, name: str) -> list[Tensor]:
    """What a method gives, and the gradients of it and of a training step."""
    found = CALLS[name](model)
    loss = model.score_tokens(CHOSEN).ce.sum()
    if found.requires_grad:
        loss = loss + found.square().mean()
    loss.backward()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
    return [found.detach(), *whole]


def sharded(name: str, mesh: DeviceMesh) -> HFBackbone:
    holder = nn.Module()
    holder.backbone = backbone(**VARIANTS[name])
    shard_trained(holder, mesh)
    return holder.backbone


def call_sharded(rank: int) -> None:
    """Any method may come first, and merged weights come back."""
    mesh = two_processes()
    for kind in ("full", "lora"):
        for name in CALLS:
            found = outcome(sharded(kind, mesh), name)
            expected = outcome(backbone(**VARIANTS[kind]), name)
            assert len(expected) > 10
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
    for name, rounding in ROUNDING.items():
        *found, moved = merged_and_back(sharded(name, mesh))
        *expected, _ = merged_and_back(backbone(**VARIANTS[name]))
        assert moved == []
        assert all(distance(*pair) < rounding for pair in zip(found, expected, strict=True))


@pytest.mark.ddp
@pytest.mark.parametrize("check", [shard_twice, call_sharded])
def test_sharded_weights_are_gathered_where_they_are_needed(check: Callable[[int], None]) -> None:
    in_two_processes(check)


ROUNDING = {"full": 1e-6, "lora": 1e-6, "lora_bf16": 4e-2, "experts": 1e-6}
"""bfloat16 has three digits, in weights and activations alike."""


def distance(logits: Tensor, others: Tensor) -> float:
    """How far the logits of allowed ids lie apart, relative to their size."""
    one, other = (x[x.isfinite()].double() for x in (logits, others))
    return float((one - other).norm() / other.norm())


def merged_and_back(model: HFBackbone) -> tuple[Tensor, Tensor, list[str]]:
    """Logits of the adapter and of merged weights, and the weights that do not come back."""

    def state() -> dict[str, tuple[Tensor, int]]:
        """Weights of this process; those that are whole with their place, perhaps in a file."""
        return {
            name: (value.to_local().clone(), 0)
            if isinstance(value, DTensor)
            else (value.clone(), value.data_ptr())
            for name, value in model.named_parameters()
        }

    with torch.no_grad():
        before = state()
        adapted = model.denoise(IDS).logits
        with decoding_weights(model):
            found = model.denoise(IDS).logits
        after = state()
    moved = [
        name
        for name, (value, place) in before.items()
        if after[name][1] != place or not after[name][0].equal(value)
    ]
    return adapted, found, moved


@pytest.mark.parametrize("name", list(VARIANTS))
def test_decoding_weights_hold_the_adapter_and_leave_nothing_behind(
    name: str, tmp_path: Path
) -> None:
    """The merged sum is rounded once; the weights come back bit by bit."""
    adapted, found, moved = merged_and_back(backbone(**VARIANTS[name]))
    assert moved == []
    assert distance(found, adapted) < ROUNDING[name]
    once = backbone(**VARIANTS[name])
    if once.adapter is None:
        assert found.equal(adapted)
        return
    export_model(once, tmp_path)
    merged = load_backbone(tmp_path, dtype=once.dtype)
    assert found.equal(merged.denoise(IDS).logits)
    assert not found.equal(adapted)


def load_sharded(rank: int, folder: Path) -> None:
    """Weights are mapped, in their own dtype and as they should be; 12 MB of them, 24 in float32.

    Each process keeps a half.
    """
    mesh = two_processes()
    before = own_megabytes()
    holder = nn.Module()
    holder.backbone = model = HFBackbone(str(folder), dtype="float32", trainable=True)
    assert model.dtype == torch.float32
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    shard_trained(holder, mesh)
    model.convert()
    assert own_megabytes() - before < 24
    assert {value.to_local().dtype for value in model.parameters()} == {torch.float32}
    with whole_weights(holder):
        weights = dict(model.named_parameters())
        for key, value in load_file(folder / "model.safetensors").items():
            assert torch.equal(weights[f"model.{key}"], value.float())
        assert model(IDS).isfinite().any()


@pytest.mark.ddp
def test_weights_of_another_dtype_are_never_converted_whole_by_a_process(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}
    ids = {"mask_id": 30, "pad_id": 0, "eos_ids": (1,)}
    architecture = Architecture(num_layers=4, **sizes, **ids)
    export_model(HFBackbone(architecture=architecture, dtype="bfloat16"), tmp_path)
    in_two_processes(load_sharded, tmp_path)


def test_what_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel: Any = ShardedStrategy(replicas=3)
    parallel.parallel_devices = [torch.device("cpu")] * 4
    with pytest.raises(ValueError, match=r"strategy\.replicas: expected a divisor of the 4 proc"):
        parallel.setup_environment()
    monkeypatch.setattr(ModelParallelStrategy, "setup_optimizers", lambda *_: None)
    of_8_bits = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    parallel.optimizers = [of_8_bits([torch.zeros(1)])]
    with pytest.raises(ValueError, match="got one of bitsandbytes; use it with ddp"):
        parallel.setup_optimizers(None)
    module: Any = nn.Module()
    module.backbone = backbone(lora=False, dtype="float32").requires_grad_(False)
    with pytest.raises(ValueError, match="got nothing to train; use ddp"):
        shard_trained(module, parallel)
    module.backbone.requires_grad_(True)
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="got parameters of the module itself"):
        shard_trained(module, parallel)
