"""DDP and FSDP2 through the command line: two CPU processes, stopped and resumed.

Experiments of every kind run, too, those that decode with a cache.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.backbones.export import export_model
from lit_dlm.reports.plots import read_points
from lit_dlm.training.checkpoint import copy_tokenizer
from tests.e2e.runs import (
    ARCHITECTURE,
    QUIET,
    added,
    assert_same_weights,
    compact,
    problems,
    results,
    run,
    write_jsonl,
)
from tests.processes import in_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

SAVER = "lightning.pytorch.callbacks.ModelCheckpoint"
SAVED = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}
PRETRAIN = f"""fit --config=exp/pretrain_tiny --trainer.max_steps=4
    --model.backbone.init_args.architecture={compact({**ARCHITECTURE, "tie_embeddings": True})}
    --model.warmup_steps=2 --model.compile=false --model.export_dtype=float32
    --data.init_args.drills=null --data.init_args.batch_size=4""".split()
ONE_FILE = "--trainer.strategy.init_args.save_distributed_checkpoint=false"
STRATEGIES = {
    "ddp": ["--config=trainer/ddp_cpu"],
    "fsdp": ["--config=trainer/fsdp_cpu"],
    "fsdp_one_file": ["--config=trainer/fsdp_cpu", ONE_FILE],
}


SHARDED = ("fsdp", "fsdp_one_file")


def whole_and_resumed(rank: int, folder: Path) -> None:
    """Every strategy: an uninterrupted run, with FSDP2 then one from its second step.

    That DDP goes on from a checkpoint is tried with two nodes.
    """
    torch.set_num_threads(1)
    for name, strategy in STRATEGIES.items():
        resume = [f"--ckpt_path={folder / name / 'whole' / 'checkpoints' / 'step=2.ckpt'}"]
        parts = {"whole": []} | ({"resumed": resume} if name in SHARDED else {})
        for part, more in parts.items():
            at = folder / name / part
            flags = [*strategy, f"--run_dir={at}", f"--model.export_dir={at}/model", *more]
            saver = added(SAVER, dirpath=f"{at}/checkpoints", **SAVED)
            bare = "--trainer.callbacks=[]"
            run(*PRETRAIN[:2], *flags, *PRETRAIN[2:], *QUIET, bare, saver)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    in_two_processes(whole_and_resumed, folder)
    return folder


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], **most: float) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, **{"rtol": 0.02, **most})


@pytest.mark.parametrize("name", SHARDED)
def test_a_resumed_run_exports_the_same_weights_and_strategies_agree(runs: Path, name: str) -> None:
    parts = [runs / name / part / "model/model.safetensors" for part in ("whole", "resumed")]
    assert_same_weights(*parts)
    assert not (runs / name / "resumed" / "checkpoints" / "step=2.ckpt").exists()
    # Muon multiplies in bfloat16, and shards round their parts of a product by themselves. Each of
    # the four updates moves an entry of a matrix with 16 columns by about 0.01 / sqrt(16).
    one, other = (exported(runs / strategy / "whole") for strategy in ("ddp", name))
    assert one.keys() == other.keys()
    assert max(float((one[key] - other[key]).abs().mean()) for key in one) < 1e-3


def test_checkpoints_are_folders_or_files(runs: Path) -> None:
    files = {path.name for path in (runs / "fsdp/whole/checkpoints/step=4.ckpt").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt"} <= files
    one = runs / "fsdp_one_file/whole"
    state = torch.load(one / "checkpoints/step=4.ckpt", weights_only=True)["state_dict"]
    norm = state["backbone.model.model.norm.weight"]
    torch.testing.assert_close(norm, exported(one)["model.norm.weight"])


def block_model(folder: Path) -> str:
    """A random model of SDAR's family, with the embedded tokenizer."""
    torch.manual_seed(3)
    blocks = {"decoder": "qwen3", "family": "sdar", "attention": "block", "block_size": 4}
    given = {**ARCHITECTURE, **blocks, "initializer_range": 0.3, "eos_ids": (1,)}
    export_model(HFBackbone(architecture=Architecture(**given)), folder)
    copy_tokenizer("tiny", folder)
    return str(folder)


BLOCKS = {
    "policy": {"class_path": "DynamicPolicy", "init_args": {"threshold": 0.9}},
    "window": {"class_path": "BlockWindow", "init_args": {"block_length": 8}},
    "quota": {"class_path": "EvenQuota", "init_args": {"steps_per_block": 4}},
}
CACHED = {
    name: {"class_path": "Decoder", "init_args": {**BLOCKS, "cache": {"class_path": scheme}}}
    for name, scheme in (("prefix", "PrefixCache"), ("dual", "DualCache"))
}


def experiments(folder: Path) -> dict[str, list[str]]:
    """An RL step, SFT, TABOM and a benchmark; small."""
    at = folder.parent
    model = f"--model.backbone.init_args.path={at}/model --model.tokenizer={at}/model"
    found = {
        "rl": f"""fit --config=exp/tracerl_sdar {model} --trainer.max_epochs=1
        --trainer.check_val_every_n_epoch=1 --data.rows_per_update=8 --data.filters=null
        --data.prompts_per_step=3 --data.responses_per_prompt=2 --data.response_length=8
        --data.rollout_batch_size=2 --data.val_responses=1 --data.num_workers=1
        --data.tasks={problems(8)} --data.val_tasks={problems(3)}""",
        "sft": f"""fit --config=exp/sft_sdar {model} --data.rows_per_update=2
            --data.response_length=16 --data.sources.init_args.path={at}/sft.jsonl""",
        "tabom": f"""fit --config=exp/tabom_tiny --trainer.max_steps=2
            --data.sources.init_args.shards={at}/traces --data.batch_size=2
            --data.val_fraction=0""",
        "benchmark": f"""predict --config=exp/benchmark_tiny --model.sweep=null
            --model.decoders={compact(CACHED)} --data.tasks={problems(6)} --data.batch_size=2""",
    }
    return {name: command.split() for name, command in found.items()}


def every_experiment(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in ("ddp", "fsdp"):
        for name, arguments in experiments(folder / kind).items():
            flags = [f"--config=trainer/{kind}_cpu", *QUIET]
            # The trainer's file stands behind the experiment's, flags behind both.
            run(*arguments[:2], *flags, *arguments[2:], f"--run_dir={folder / kind / name}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    block_model(folder / "model")
    turns = [{"prompt": f"{n} + 1 = ?", "response": f"{n + 1}"} for n in range(8)]
    write_jsonl(folder / "sft.jsonl", turns)
    distill = ["predict", "--config=exp/distill_tiny", f"--data.tasks={problems(12)}"]
    run(*distill, f"--run_dir={folder}", *QUIET)
    in_two_processes(every_experiment, folder)
    return folder


def test_reinforcement_learning_of_a_block_model_is_that_of_ddp(finished: Path) -> None:
    """Rollouts with a block cache, all weights trained."""
    folders = [finished / kind / "rl" for kind in ("ddp", "fsdp")]
    points, others = (read_points(folder / "reward_curve.jsonl") for folder in folders)
    assert [point["step"] for point in points] == [0, 1]
    assert points[1]["updates"] >= 1
    assert [p["val/reward"] for p in points] == [p["val/reward"] for p in others]
    for part in ("best", "last"):
        one, other = (load_file(at / "policy" / part / "model.safetensors") for at in folders)
        assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize("name", ["sft", "tabom"])
def test_fine_tuned_adapters_are_those_of_ddp(finished: Path, name: str) -> None:
    one, other = (
        load_file(finished / kind / name / "adapter" / "adapter_model.safetensors")
        for kind in ("ddp", "fsdp")
    )
    assert any(value.any() for key, value in one.items() if "lora_B" in key)
    assert_close(one, other, atol=1e-4)


def test_benchmarks_decode_alike_under_every_strategy(finished: Path) -> None:
    """Nothing is trained, so nothing is sharded: processes take other numbers of steps."""
    found, others = (results(finished / kind / "benchmark") for kind in ("ddp", "fsdp"))
    assert {method for _, method in found} == set(CACHED)
    assert all(len(rows) == 6 for rows in found.values())
    assert found == others
