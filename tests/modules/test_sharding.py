"""DDP and FSDP2 on two CPU processes against one process on the same global batch."""

from __future__ import annotations

import os
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lit_dlm.backbones import Architecture, HFBackbone, load_backbone
from lit_dlm.backbones.window_cache import WindowCache, WindowPlan
from lit_dlm.losses.terms import masked_nelbo
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.sharding import (
    ShardedStrategy,
    decoding_weights,
    shard_trained,
    whole_weights,
)
from tests.finetuning import quiet, small
from tests.processes import in_processes, in_two_processes, own_megabytes

STEPS, ROWS, LENGTH = 4, 4, 9
VARIANTS = {
    "full": {"lora": False, "dtype": "float32"},
    "lora": {"lora": True, "dtype": "float32"},
    "lora_bf16": {"lora": True, "dtype": "bfloat16"},
}
"""The last one mixes a frozen bfloat16 base with float32 adapters in each layer."""


def backbone(*, lora: bool, dtype: Any, tie: bool = True) -> HFBackbone:
    """Two Qwen2 layers, shifted; with LoRA every base weight is frozen."""
    changes = {"vocab_size": 31, "mask_id": 30, "num_kv_heads": 1, "tie_embeddings": tie}
    return small(lora=lora, dtype=dtype, shift=1, **changes)


class Scored(DecodeModule):
    """Cross-entropy and entropy of hidden cells through ``score_tokens``."""

    def __init__(self, model: HFBackbone, *, visits: int = 0, fused: bool | None = None) -> None:
        super().__init__(model, tokenizer="tiny")
        self.visits = visits
        self.fused = fused
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        """Forwards that differ in number between processes, as decoding would do."""
        with whole_weights(self.backbone), torch.no_grad():
            for _ in range(self.visits):
                self.backbone.denoise(torch.ones(1, 3, dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, hidden = batch
        shown = ids.masked_fill(hidden, 30)
        stats = self.backbone.score_tokens(shown, ids, hidden, mask=torch.ones_like(hidden))
        loss = masked_nelbo(stats, hidden).total + 0.1 * stats.entropy.sum() / (len(ids) * LENGTH)
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Steps(self.trainer), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, fused=self.fused)


class Steps(IterableDataset[tuple[Tensor, Tensor]]):
    """Global batches from the trainer's step onwards; a process takes every second row."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        rows = slice(self.trainer.global_rank, None, self.trainer.world_size)
        accumulate = self.trainer.accumulate_grad_batches
        for step in range(STEPS * accumulate):
            ids = torch.randint(2, 30, (ROWS, LENGTH), generator=generator)
            hidden = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
            if step >= self.trainer.global_step * accumulate:
                yield ids[rows], hidden[rows]


def trainer(
    folder: Path,
    strategy: Any,
    devices: int,
    *,
    save: str | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Trainer:
    """Saves every second step under the name ``save``."""
    saver = ModelCheckpoint(
        folder,
        filename=save,
        every_n_train_steps=2,
        save_top_k=1 if save == "last" else -1,
        enable_version_counter=save != "last",
    )
    return quiet(
        folder,
        max_steps=steps,
        devices=devices,
        strategy=strategy,
        gradient_clip_val=0.5,
        enable_checkpointing=save is not None,
        callbacks=[saver] if save else [],
        **options,
    )


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    with whole_weights(module):
        return {
            name: value.detach().float().clone().numpy()
            for name, value in module.named_parameters()
        }


def strategy(kind: str) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ShardedStrategy(
        process_group_backend="gloo", save_distributed_checkpoint=kind == "fsdp_folder"
    )


def train_everything(rank: int, folder: Path) -> dict[str, Any]:
    """All strategies and variants one after the other in this pair of processes."""
    results: dict[str, Any] = {}
    for kind in ("ddp", "fsdp", "fsdp_folder"):
        for name, options in VARIANTS.items():
            if kind == "fsdp_folder" and name != "lora":
                continue
            at = folder / kind / name
            visits = 0 if kind == "ddp" else 1 + 2 * rank
            module = Scored(backbone(**options), visits=visits)
            saves = name == "lora"
            trainer(at, strategy(kind), 2, save="{step}" if saves else None).fit(module)
            sharded = [type(part).__name__ for part in module.modules() if _is_sharded(part)]
            results[f"{kind}/{name}"] = (module.losses, weights(module), sharded)
            if not saves:
                continue
            resumed = Scored(backbone(**options), visits=visits)
            for value in resumed.parameters():  # what is trained must come from the file
                if value.requires_grad:
                    nn.init.constant_(value, 0.01)
            trainer(at / "again", strategy(kind), 2).fit(
                resumed, ckpt_path=str(at / "step=2.ckpt"), weights_only=True
            )
            results[f"{kind}/{name}/resumed"] = (resumed.losses, weights(resumed), sharded)
    return results


def _is_sharded(part: nn.Module) -> bool:
    return isinstance(part, FSDPModule)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of rank 0 and rank 1."""
    return in_two_processes(train_everything, tmp_path_factory.mktemp("pair"))


@pytest.mark.ddp
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_processes_train_like_one_on_the_global_batch(
    pair: list[dict[str, Any]], tmp_path: Path, kind: str, name: str
) -> None:
    module = Scored(backbone(**VARIANTS[name]))
    trainer(tmp_path, "auto", 1).fit(module)
    mean = np.mean([side[f"{kind}/{name}"][0] for side in pair], axis=0)
    # Sums in another order; bfloat16 rounds gradients to three digits before they are added.
    tolerance = 1e-2 if name == "lora_bf16" else 1e-6
    np.testing.assert_allclose(mean, module.losses, rtol=tolerance)
    if name == "lora_bf16":
        return
    for key, value in weights(module).items():
        found = pair[0][f"{kind}/{name}"][1][key]
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.ddp
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp_folder"])
def test_a_resumed_run_ends_with_the_same_weights(pair: list[dict[str, Any]], kind: str) -> None:
    for side in pair:
        losses, whole, _ = side[f"{kind}/lora"]
        resumed_losses, resumed, _ = side[f"{kind}/lora/resumed"]
        assert resumed_losses == losses[2:]
        assert resumed.keys() == whole.keys()
        for key, value in whole.items():
            np.testing.assert_array_equal(resumed[key], value, err_msg=key)


@pytest.mark.ddp
def test_ranks_agree_and_only_trained_weights_moved(pair: list[dict[str, Any]]) -> None:
    start = {name: value.detach() for name, value in Scored(
        backbone(**VARIANTS["lora"])
    ).named_parameters()}  # fmt: skip
    for key in ("ddp/lora", "fsdp/lora"):
        for name, value in pair[0][key][1].items():
            np.testing.assert_array_equal(value, pair[1][key][1][name])
            assert np.array_equal(value, start[name].numpy()) == ("lora_" not in name)


@pytest.mark.ddp
def test_every_layer_and_the_backbone_are_sharded(pair: list[dict[str, Any]]) -> None:
    for name in VARIANTS:
        assert pair[0][f"ddp/{name}"][2] == []
        names = sorted(pair[0][f"fsdp/{name}"][2])
        assert names == ["FSDPHFBackbone", "FSDPQwen2DecoderLayer", "FSDPQwen2DecoderLayer"]


REDUCED = {
    "each": {"whole_gradients_gb": 0.0},
    "last": {},
    "replicas each": {"replicas": 2, "whole_gradients_gb": 0.0},
    "replicas last": {"replicas": 2},
}
"""Gradients of an update of two batches: reduced after each, or after the last."""


def train_replicas(rank: int, folder: Path) -> dict[str, Any]:
    """Weights, and how often a part's gradients were summed over shards and over replicas."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    cases = [("lora", "32-true", kind) for kind in REDUCED]
    cases += [("full", "bf16-mixed", kind) for kind in ("each", "last")]
    for name, precision, kind in cases:
        at = folder / name / kind
        for part, resume in (("whole", None), ("resumed", str(at / "step=2.ckpt"))):
            if part == "resumed" and kind != "replicas each":
                continue
            module = Scored(backbone(**VARIANTS[name]), fused="replicas" in kind)
            saves = kind == "replicas each" and part == "whole"
            parallel = ShardedStrategy(process_group_backend="gloo", **REDUCED[kind])
            options = {"save": "{step}" if saves else None, "precision": precision}
            with pytest.MonkeyPatch.context() as patch:
                scattered = counted(patch, "reduce_scatter_single", 2 if "replicas" in kind else 4)
                summed = counted(patch, "all_reduce", 2)
                trainer(at, parallel, 4, accumulate_grad_batches=2, **options).fit(
                    module, ckpt_path=resume, weights_only=True
                )
            found[f"{name} {kind} {part}"] = (weights(module), len(scattered), len(summed))
    return found


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
    for found in in_processes(4, train_replicas, tmp_path):
        for run, (trained, *_) in found.items():
            for key, value in found[f"{run.split()[0]} each whole"][0].items():
                np.testing.assert_allclose(trained[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
        whole, resumed = (found[f"lora replicas each {part}"][0] for part in ("whole", "resumed"))
        assert all(np.array_equal(resumed[key], value) for key, value in whole.items())
        calls = {run: tuple(numbers) for run, (_, *numbers) in found.items()}
        assert calls == {
            "lora each whole": (2 * STEPS * 2, 0),
            "lora last whole": (2 * STEPS, 0),
            "lora replicas each whole": (2 * STEPS * 2, 2 * STEPS),
            "lora replicas each resumed": (STEPS * 2, STEPS),
            "lora replicas last whole": (2 * STEPS, 2 * STEPS),
            "full each whole": (3 * STEPS * 2, 0),
            "full last whole": (3 * STEPS, 0),
        }


def cut_short(rank: int, patch: pytest.MonkeyPatch, moment: str) -> None:
    """The save ends early: its files are written but not its last one, or between two renames."""

    def fail(*_: Any) -> None:
        raise OSError("killed")

    if moment == "write":
        write = model_parallel._distributed_checkpoint_save
        patch.setattr(
            model_parallel, "_distributed_checkpoint_save", lambda *given: fail(write(*given))
        )
    elif rank == 0:
        replace = os.replace
        patch.setattr(
            os, "replace", lambda at, to: (fail if "-partial" in Path(at).name else replace)(at, to)
        )
    else:
        barrier = ShardedStrategy.barrier
        patch.setattr(
            ShardedStrategy,
            "barrier",
            lambda self, name=None: fail() if name == "checkpoint in place" else barrier(self),
        )


def save_not_finite(rank: int, folder: Path) -> list[str]:
    """What is said of a weight of rank 1 that is no number, when it is saved and when loaded."""
    module, told = Scored(backbone(**VARIANTS["full"])), []
    run = trainer(folder, strategy("fsdp_folder"), 2, save="last", steps=2)
    run.fit(module)
    if rank == 1:
        (first, *_) = (value for value in module.parameters() if value.requires_grad)
        first.detach().to_local().view(-1)[3] = torch.nan  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not written") as refusal:
        run.save_checkpoint(folder / "last.ckpt")
    told.append(str(refusal.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedStrategy, "_require_finite", lambda *_: None)
        run.save_checkpoint(folder / "old.ckpt")
    again = trainer(folder, strategy("fsdp_folder"), 2)
    with pytest.raises(ValueError, match=r"old\.ckpt: ") as refusal:
        again.fit(module, ckpt_path=str(folder / "old.ckpt"), weights_only=True)
    told.append(str(refusal.value))
    return told


def save_cut_short(rank: int, folder: Path) -> dict[str, Any]:
    """Steps 1 and 2; steps 3 and 4, whose save is cut short; and these again from ``last``."""
    results: dict[str, Any] = {"numbers": save_not_finite(rank, folder / "numbers")}
    for moment in ("write", "rename"):
        at, losses = folder / moment, []
        for part in ("begun", "cut", "resumed"):
            module = Scored(backbone(**VARIANTS["full"]))
            steps = 2 if part == "begun" else STEPS
            run = trainer(at, strategy("fsdp_folder"), 2, save="last", steps=steps)
            with pytest.MonkeyPatch.context() as patch:
                if part == "cut":
                    cut_short(rank, patch, moment)
                    with pytest.raises(OSError, match="killed"):
                        run.fit(module, ckpt_path="last", weights_only=True)
                else:
                    run.fit(module, ckpt_path="last", weights_only=True)
            losses.append(module.losses)
        results[moment] = losses
    return results


@pytest.mark.ddp
def test_a_save_that_is_cut_short_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    for rank, found in enumerate(in_two_processes(save_cut_short, tmp_path)):
        for told in found.pop("numbers"):
            name = "backbone." if rank == 1 else "a weight "
            assert name in told
            assert told.endswith("has numbers that are not finite")
        for begun, cut, resumed in found.values():
            assert (len(begun), len(cut)) == (2, 2)
            assert resumed == cut
    for moment in ("write", "rename"):
        names = {path.name for path in (tmp_path / moment).iterdir()}
        assert names == {"last.ckpt", "last-former.ckpt"}


class Watched(Scored):
    """Notes dtypes while weights are whole, and when training is over."""

    dtypes: dict[str, set[torch.dtype]]

    def on_train_start(self) -> None:
        with whole_weights(self):
            whole = {value.dtype for value in self.backbone.parameters()}
        self.dtypes = {"whole": whole}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.dtypes["kept"] = {value.dtype for value in self.parameters()}
        self.dtypes["gradients"] = {
            value.grad.dtype for value in self.parameters() if value.grad is not None
        }


def train_in_bfloat16(rank: int, folder: Path) -> tuple[list[float], dict[str, set[torch.dtype]]]:
    """Losses and dtypes of mixed precision; the model is exported."""
    torch.set_num_threads(1)
    module = Watched(backbone(**VARIANTS["full"]))
    trainer(folder, strategy("fsdp"), 2, precision="bf16-mixed").fit(module)
    module.backbone.export(folder / "model")
    return module.losses, module.dtypes


@pytest.mark.ddp
def test_mixed_precision_gathers_bfloat16_and_keeps_float32(tmp_path: Path) -> None:
    pair = in_two_processes(train_in_bfloat16, tmp_path)
    alone = Scored(backbone(**VARIANTS["full"]))
    trainer(tmp_path, "auto", 1).fit(alone)
    for _, dtypes in pair:
        assert dtypes == {
            "whole": {torch.bfloat16},
            "kept": {torch.float32},
            "gradients": {torch.float32},
        }
    mean = np.mean([losses for losses, _ in pair], axis=0)
    np.testing.assert_allclose(mean, alone.losses, rtol=2e-2)  # bfloat16 has three digits
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in stored.items():
        assert value.dtype == torch.float32
        assert not value.equal(value.bfloat16().float()), name


def shard_by_hand(rank: int) -> list[Any]:
    """A backbone inside another trained part, sharded twice."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    module = nn.Module()
    module.value = nn.Module()  # a value model: a backbone and a head beside it
    module.value.backbone = backbone(lora=True, dtype="float32", tie=False)
    module.value.head = nn.Linear(16, 1, bias=False)
    module.frozen = backbone(lora=True, dtype="float32").requires_grad_(False)
    expected = {name: value.detach().clone() for name, value in module.named_parameters()}
    shard_trained(module, mesh)
    shard_trained(module, mesh)
    sharded = {name: isinstance(value, DTensor) for name, value in module.named_parameters()}
    with whole_weights(module):
        whole = all(torch.equal(value, expected[name]) for name, value in module.named_parameters())
    again = {name: isinstance(value, DTensor) for name, value in module.named_parameters()}
    return [sharded, whole, again]


@pytest.mark.ddp
def test_sharding_twice_is_sharding_once_and_whole_weights_are_the_originals() -> None:
    for sharded, whole, again in in_two_processes(shard_by_hand):
        assert whole
        assert again == sharded
        for name, is_sharded in sharded.items():
            assert is_sharded == name.startswith("value."), name


IDS = torch.tensor([[3, 9, 30, 5, 30, 12], [7, 30, 8, 30, 2, 4]])
CELLS = IDS == 30
CHOSEN = (IDS, IDS.masked_fill(CELLS, 6), CELLS)


@torch.no_grad()
def window(model: HFBackbone) -> Tensor:
    """Raw rows of a whole canvas, its keys and values written to a cache."""
    cache = WindowCache(length=6, num_rows=2)
    positions = torch.arange(6).expand(2, -1)
    cache.plan = WindowPlan(rows=torch.arange(2), columns=positions, kv_end=6)
    return model.encode_window(IDS, cache=cache, visible=None, position_ids=positions)[0]


CALLS: dict[str, Callable[[HFBackbone], Tensor]] = {
    "denoise": lambda model: model.denoise(IDS).logits.clamp_min(-1e3),
    "forward": lambda model: model(IDS),
    "encode_window": window,
    "head": lambda model: model.head(window(model)).clamp_min(-1e3),
    "score_tokens": lambda model: model.score_tokens(*CHOSEN).ce,
    "score_with_rows": lambda model: model.score_with_rows(*CHOSEN)[1],
    "encode_rows": lambda model: model.encode_rows(IDS, CELLS),
}
"""Every public method of a backbone, as the first thing that is asked of it."""


def outcome(model: HFBackbone, name: str) -> list[Tensor]:
    """What a method gives, and the gradients of it and of a training step."""
    found = CALLS[name](model)
    loss = model.score_tokens(*CHOSEN).ce.sum()
    if found.requires_grad:
        loss = loss + found.square().mean()
    loss.backward()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
    return [found.detach(), *whole]


def call_sharded(rank: int) -> list[tuple[str, str]]:
    """Methods whose outcome is another one when the weights are sharded."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    wrong = []
    for kind in ("full", "lora"):
        for name in CALLS:
            holder = nn.Module()
            holder.backbone = backbone(**VARIANTS[kind])
            shard_trained(holder, mesh)
            found = outcome(holder.backbone, name)
            expected = outcome(backbone(**VARIANTS[kind]), name)
            assert len(expected) > 10
            pairs = zip(found, expected, strict=True)
            if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs):
                wrong.append((kind, name))
    return wrong


@pytest.mark.ddp
def test_any_method_may_come_first_when_weights_are_sharded() -> None:
    assert in_two_processes(call_sharded) == [[], []]


def merged_and_back(model: HFBackbone) -> tuple[Tensor, Tensor, list[str]]:
    """Logits of the adapter and of merged weights, and the weights that do not come back."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    places = {
        name: value.data_ptr()
        for name, value in model.named_parameters()
        if not isinstance(value, DTensor)
    }
    with torch.no_grad():
        adapted = model.denoise(IDS).logits
        with decoding_weights(model):
            found = model.denoise(IDS).logits
    moved = []
    for name, value in model.named_parameters():
        if name in places and value.data_ptr() != places[name]:
            moved.append(name)  # a weight in a file's memory would no longer be
        one, other = value.detach(), before[name]
        if isinstance(one, DTensor) != isinstance(other, DTensor):
            moved.append(name)
        elif isinstance(one, DTensor):
            one, other = one.to_local(), other.to_local()
        if not torch.equal(one, other):
            moved.append(name)
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
    once.export(tmp_path)
    merged = load_backbone(tmp_path, dtype=once.dtype)
    assert found.equal(merged.denoise(IDS).logits)
    assert not found.equal(adapted)


ROUNDING = {"full": 1e-6, "lora": 1e-6, "lora_bf16": 4e-2}
"""bfloat16 has three digits, in weights and activations alike."""


def distance(logits: Tensor, others: Tensor) -> float:
    """How far the logits of allowed ids lie apart, relative to their size."""
    one, other = (x[x.isfinite()].double() for x in (logits, others))
    return float((one - other).norm() / other.norm())


def merge_sharded(rank: int) -> dict[str, tuple[Any, Any, list[str]]]:
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    found = {}
    for name, options in VARIANTS.items():
        holder = nn.Module()
        holder.backbone = backbone(**options)
        shard_trained(holder, mesh)
        adapted, logits, moved = merged_and_back(holder.backbone)
        found[name] = (adapted.float().numpy(), logits.float().numpy(), moved)
    return found


@pytest.mark.ddp
def test_sharded_weights_come_back_too() -> None:
    for side in in_two_processes(merge_sharded):
        for name, (adapted, logits, moved) in side.items():
            assert moved == []
            expected = merged_and_back(backbone(**VARIANTS[name]))
            for one, other in zip((adapted, logits), expected[:2], strict=True):
                assert distance(torch.from_numpy(one), other) < ROUNDING[name]


def load_sharded(rank: int, folder: Path) -> tuple[list[bool], float]:
    """Whether weights are mapped, in their own dtype and as they should be; anonymous memory."""
    torch.distributed.init_process_group("gloo")
    before = own_megabytes()
    holder = nn.Module()
    holder.backbone = model = HFBackbone(str(folder), dtype="float32", trainable=True)
    asked, stored = model.dtype, {value.dtype for value in model.parameters()}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    shard_trained(holder, mesh)
    model.convert()
    taken = own_megabytes() - before
    parts = {value.to_local().dtype for value in model.parameters()}
    facts = [asked == torch.float32, stored == {torch.bfloat16}, parts == {torch.float32}]
    with whole_weights(holder):
        weights = dict(model.named_parameters())
        for key, value in load_file(folder / "model.safetensors").items():
            facts.append(torch.equal(weights[f"model.{key}"], value.float()))
        facts.append(bool(model(IDS).isfinite().any()))
    return facts, taken


@pytest.mark.ddp
def test_weights_of_another_dtype_are_never_converted_whole_by_a_process(tmp_path: Path) -> None:
    """12 MB in the file, 24 MB in float32, of which each process keeps a half."""
    torch.manual_seed(2)
    sizes = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}
    ids = {"mask_id": 30, "pad_id": 0, "eos_ids": (1,)}
    HFBackbone(architecture=Architecture(num_layers=4, **sizes, **ids), dtype="bfloat16").export(
        tmp_path
    )
    for facts, taken in in_two_processes(load_sharded, tmp_path):
        assert all(facts)
        assert taken < 24


def test_checkpoints_hold_no_frozen_decoder_weights() -> None:
    lora = Scored(backbone(**VARIANTS["lora"])).state_dict()
    assert lora
    assert all("lora_" in name for name in lora)
    full = Scored(backbone(**VARIANTS["full"]))
    assert full.state_dict().keys() == {
        name for name, _ in full.named_parameters(remove_duplicate=False)
    }


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
