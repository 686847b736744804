"""DDP and FSDP2 through the command line: two CPU processes, stopped and resumed.

Experiments of every kind run, too, those that decode with a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.modules.checkpoint import copy_tokenizer
from lit_dlm.reports.plots import read_points
from tests.e2e.runs import QUIET, ROOT, compact, problems, results, run, write_jsonl
from tests.processes import in_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

ARCHITECTURE = {
    "vocab_size": 462,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "mask_id": 2,
    "pad_id": 0,
    "eos_ids": [1],  # ids of the tokenizer tiny
}
SAVED = {"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}
PRETRAIN = f"""fit --config=configs/exp/pretrain_tiny.yaml --trainer.max_steps=6
    --model.backbone.init_args.architecture={compact({**ARCHITECTURE, "tie_embeddings": True})}
    --model.warmup_steps=2 --model.compile=false --model.export_dtype=float32
    --data.init_args.drills=null --data.init_args.batch_size=4""".split()
STRATEGIES = {
    "ddp": ["--config=configs/trainer/ddp_cpu.yaml"],
    "fsdp": ["--config=configs/trainer/fsdp_cpu.yaml"],
    "fsdp_one_file": [
        "--config=configs/trainer/fsdp_cpu.yaml",
        "--trainer.strategy.init_args.save_distributed_checkpoint=false",
    ],
}


def whole_and_resumed(rank: int, folder: Path) -> None:
    """Every strategy: an uninterrupted run, then one that goes on from its third step."""
    torch.set_num_threads(1)
    for name, strategy in STRATEGIES.items():
        resume = [f"--ckpt_path={folder / name / 'whole' / 'checkpoints' / 'step=3.ckpt'}"]
        for part, more in (("whole", []), ("resumed", resume)):
            at = folder / name / part
            saver = {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {**SAVED, "dirpath": str(at / "checkpoints")},
            }
            flags = [*strategy, f"--run_dir={at}", f"--model.export_dir={at}/model", *more]
            flags += [f"--trainer.callbacks={compact([saver])}"]
            run(*PRETRAIN[:2], *flags, *PRETRAIN[2:], *QUIET)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        in_two_processes(whole_and_resumed, folder)
    return folder


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_resumed_run_exports_the_same_weights(runs: Path, name: str) -> None:
    whole, resumed = exported(runs / name / "whole"), exported(runs / name / "resumed")
    assert whole.keys() == resumed.keys()
    assert all(resumed[key].equal(value) for key, value in whole.items())
    assert not (runs / name / "resumed" / "checkpoints" / "step=3.ckpt").exists()


def test_strategies_agree(runs: Path) -> None:
    expected = exported(runs / "ddp" / "whole")
    for name in ("fsdp", "fsdp_one_file"):
        found = exported(runs / name / "whole")
        for key, value in expected.items():
            # Six steps of Muon, whose products sum in another order when sharded.
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_checkpoints_are_folders_or_files(runs: Path) -> None:
    files = {path.name for path in (runs / "fsdp/whole/checkpoints/step=6.ckpt").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt"} <= files
    state = torch.load(
        runs / "fsdp_one_file/whole/checkpoints/step=6.ckpt", weights_only=True
    )["state_dict"]  # fmt: skip
    weights = exported(runs / "fsdp_one_file/whole")
    torch.testing.assert_close(
        state["backbone.model.model.norm.weight"], weights["model.norm.weight"]
    )


def block_model(folder: Path) -> str:
    """A random model of SDAR's family, with the embedded tokenizer."""
    torch.manual_seed(3)
    blocks = {"decoder": "qwen3", "family": "sdar", "attention": "block", "block_size": 4}
    given = {**ARCHITECTURE, **blocks, "initializer_range": 0.3, "eos_ids": (1,)}
    HFBackbone(architecture=Architecture(**given)).export(folder)
    copy_tokenizer("tiny", folder)
    return str(folder)


LORA = '{"rank":2,"alpha":4,"targets":"all"}'
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
    """An RL step with and without an adapter, SFT, TABOM and a benchmark; small."""
    at = folder.parent
    model = f"--model.backbone.init_args.path={at}/model --model.tokenizer={at}/model"
    rl = f"""fit --config=configs/exp/tracerl_sdar.yaml {model} --trainer.max_epochs=1
        --trainer.check_val_every_n_epoch=1 --data.rows_per_update=8 --data.filters=null
        --data.prompts_per_step=3 --data.responses_per_prompt=2 --data.response_length=8
        --data.rollout_batch_size=2 --data.val_responses=1 --data.num_workers=1
        --data.tasks={problems(8)} --data.val_tasks={problems(3)}"""
    found = {
        "rl": rl,
        "rl_lora": f"""{rl} --model.backbone.init_args.trainable=false
            --model.backbone.init_args.lora={LORA}""",
        "sft": f"""fit --config=configs/exp/sft_sdar.yaml {model} --data.rows_per_update=2
            --data.response_length=16 --data.sources.init_args.path={at}/sft.jsonl""",
        "tabom": f"""fit --config=configs/exp/tabom_tiny.yaml --trainer.max_steps=2
            --data.sources.init_args.shards={at}/traces --data.batch_size=2
            --data.val_fraction=0""",
        "benchmark": f"""predict --config=configs/exp/benchmark_tiny.yaml --model.sweep=null
            --model.decoders={compact(CACHED)} --data.tasks={problems(6)} --data.batch_size=2""",
    }
    return {name: command.split() for name, command in found.items()}


def every_experiment(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in ("ddp", "fsdp"):
        for name, arguments in experiments(folder / kind).items():
            flags = [f"--config=configs/trainer/{kind}_cpu.yaml", *QUIET]
            # The trainer's file stands behind the experiment's, flags behind both.
            run(*arguments[:2], *flags, *arguments[2:], f"--run_dir={folder / kind / name}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    block_model(folder / "model")
    turns = [{"prompt": f"{n} + 1 = ?", "response": f"{n + 1}"} for n in range(8)]
    write_jsonl(folder / "sft.jsonl", turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        distill = ["predict", "--config=configs/exp/distill_tiny.yaml"]
        run(*distill, f"--run_dir={folder}", f"--data.tasks={problems(12)}", *QUIET)
        in_two_processes(every_experiment, folder)
    return folder


def test_reinforcement_learning_of_a_block_model_is_that_of_ddp(finished: Path) -> None:
    """Rollouts with a block cache, with all weights trained and with an adapter."""
    for name, file in (("rl", "model.safetensors"), ("rl_lora", "adapter_model.safetensors")):
        folders = [finished / kind / name for kind in ("ddp", "fsdp")]
        points, others = (read_points(folder / "reward_curve.jsonl") for folder in folders)
        assert [point["step"] for point in points] == [0, 1]
        assert points[1]["updates"] >= 1
        for point, other in zip(points, others, strict=True):
            assert point["val/reward"] == other["val/reward"]
        for part in ("best", "last"):
            one, other = (load_file(folder / "policy" / part / file) for folder in folders)
            assert one.keys() == other.keys()
            for key, value in one.items():
                torch.testing.assert_close(other[key], value, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("name", ["sft", "tabom"])
def test_fine_tuned_adapters_are_those_of_ddp(finished: Path, name: str) -> None:
    one, other = (
        load_file(finished / kind / name / "adapter" / "adapter_model.safetensors")
        for kind in ("ddp", "fsdp")
    )
    assert one.keys() == other.keys()
    assert any(value.any() for key, value in one.items() if "lora_B" in key)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=0.02, atol=1e-4)


def test_benchmarks_decode_alike_under_every_strategy(finished: Path) -> None:
    """Nothing is trained, so nothing is sharded: processes take other numbers of steps."""
    found, others = (results(finished / kind / "benchmark") for kind in ("ddp", "fsdp"))
    assert {method for _, method in found} == set(CACHED)
    assert all(len(rows) == 6 for rows in found.values())
    assert found == others
