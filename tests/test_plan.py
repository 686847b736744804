"""Plans: counts by hand, what layers and processes change, and runs that cannot fit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli import main
from lit_dlm.plan import Plan, check_fits, plan_of
from lit_dlm.trajectories.container import stored_sizes
from tests.e2e.runs import ROOT, run

V, D, INNER, LAYERS = 1000, 64, 128, 6
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": INNER, "num_layers": LAYERS,
    "num_heads": 4, "num_kv_heads": 2, "mask_id": 3, "pad_id": 0, "eos_ids": [1],
}  # fmt: skip
LAYER = 2 * D * D + 2 * D * D // 2 + (D + 2 * D // 2) + 3 * D * INNER + 2 * D
PARAMETERS = 2 * V * D + LAYERS * LAYER + D
"""Embedding and head; q, o, k, v, their biases, feed-forward and norms of a layer; last norm."""


def config(
    *, data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **backbone: Any
) -> dict[str, Any]:
    sizes = {**SIZES, **backbone.pop("sizes", {})}
    options = {"architecture": sizes, "dtype": "float32", **backbone}
    given = {"batch_size": 4, "max_prompt_length": 20, "response_length": 30}
    return {
        "model": {
            "class_path": "SFTModule",
            "init_args": {
                "backbone": {"class_path": "HFBackbone", "init_args": options},
                "optimizer": {"class_path": "torch.optim.AdamW"},
                "decoders": {"one": {"init_args": {"cache": {"class_path": "PrefixCache"}}}},
            },
        },
        "data": {"class_path": "SupervisedDataModule", "init_args": {**given, **(data or {})}},
        "trainer": {"accelerator": "cpu", "devices": 1, **(trainer or {})},
    }


def planned(**options: Any) -> Plan:
    plan = plan_of(config(**options))
    assert plan is not None
    return plan


def test_weights_gradients_and_states_are_counted_by_shapes() -> None:
    plan = planned(trainable=True)
    assert plan.num_parameters == plan.num_trained == PARAMETERS
    size = 4 * PARAMETERS
    assert plan.split == {"weights": size, "gradients": size, "optimiser states": 2 * size}
    assert plan.disk["a checkpoint"] == 3 * size
    assert plan.held(8) == 4 * size  # every process has all of it


def test_an_adapter_trains_its_own_weights_in_float32() -> None:
    """Rank 2 on q (D to D) and v (D to D / 2) of every layer, on a base in bfloat16."""
    plan = planned(dtype="bfloat16", lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    trained = LAYERS * 2 * (2 * D + D + D // 2)
    assert plan.num_trained == trained
    assert plan.split["weights"] == 2 * PARAMETERS + 4 * trained
    assert plan.split["optimiser states"] == 8 * trained


def test_sharding_divides_what_is_trained() -> None:
    strategy = {"strategy": {"class_path": "lit_dlm.modules.sharding.ShardedStrategy"}}
    plan = planned(trainable=True, trainer=strategy)
    assert plan.held(1) == 16 * PARAMETERS
    assert plan.held(8) == 2 * PARAMETERS
    assert "gathered weights" in plan.training
    assert plan.most(1) - plan.most(8) == 14 * PARAMETERS


@pytest.mark.parametrize("every", [1, 2])
def test_a_recomputed_layer_keeps_its_input_alone(every: int) -> None:
    """4 rows of 50 tokens of width D in float32, of each further layer."""
    few, many = (
        planned(trainable=True, gradient_checkpointing=choice, sizes={"num_layers": layers})
        for choice, layers in ((True, 6), (True, 16))
    )
    added = many.training["activations"] - few.training["activations"]
    assert added == 10 * 4 * 50 * D * 4
    kept = {
        choice: planned(trainable=True, gradient_checkpointing=choice).training["activations"]
        for choice in (False, "selective", every + 1, True)
    }
    assert kept[True] < kept["selective"] < kept[False]
    assert kept[True] < kept[every + 1] < kept[False]


def test_more_tokens_take_more_and_a_limit_bounds_them() -> None:
    four, eight = (
        planned(trainable=True, data={"batch_size": size}).training["activations"]
        for size in (4, 8)
    )
    assert eight == pytest.approx(2 * four, rel=0.01)
    limited = planned(trainable=True, data={"max_tokens_per_batch": 210, "batch_size": 99})
    assert limited.training["activations"] == four  # 210 tokens hold four rows of 50


def test_decoding_counts_caches_and_logits() -> None:
    """4 rows of 50 columns, keys and values of 2 heads of 16; logits of 30 cells, twice."""
    options = config()
    options["data"]["class_path"] = "PromptDataModule"
    plan = plan_of(options)
    assert plan is not None
    assert (plan.num_trained, plan.training) == (0, {})
    assert plan.decoding["cache"] == 2 * 4 * 50 * LAYERS * 32 * 4
    assert plan.decoding["logits"] == 4 * 30 * V * 8
    assert plan.disk["1,000 records before compression"] == 1000 * (3 * 50 + 30 + 200)


def test_what_cannot_fit_is_refused_with_its_parts() -> None:
    huge = Plan(model="m", num_parameters=10**12, num_trained=0, split={"weights": 10**16})
    with pytest.raises(ValueError, match=r"m: 9313225.7 GiB are needed .* weights 9313225.7"):
        check_fits(huge, {"accelerator": "cpu", "devices": 1})
    sharded = Plan(
        model="m", num_parameters=1, num_trained=1, split={"weights": 64}, is_sharded=True
    )
    check_fits(sharded, {"accelerator": "cpu", "devices": 4})


def test_a_run_that_cannot_fit_ends_before_anything_is_built(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trillion parameters: building them would take hours."""
    sizes = {"hidden_size": 33024, "intermediate_size": 131072, "num_layers": 64}
    options = [f"--model.backbone.architecture.{name}={value}" for name, value in sizes.items()]
    with pytest.raises(SystemExit):
        main(["fit", "--config", "exp/pretrain_tiny", f"--run_dir={tmp_path}", *options])
    told = capsys.readouterr().err
    assert "GiB are needed on each of 1 device(s)" in told
    assert not list(tmp_path.iterdir())


def test_the_command_prints_a_release_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8.19 B parameters in float32: 30.51 GiB, a sixty-fourth of which is 0.48."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", "exp/tracerl_sdar", "--config", "trainer/fsdp"])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert "8,190,735,360 parameters, 8,190,735,360 trained" in told
    (weights,) = [line for line in told.splitlines() if line.startswith("weights")]
    assert weights.split()[1:] == ["30.51", "15.26", "7.63", "3.81", "1.91", "0.95", "0.48"]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["tokens", "signals", "features"])
def test_records_on_disk_take_what_was_planned(tmp_path: Path, level: str) -> None:
    """Eight decodes of one token a step; prompts are a few tokens shorter than they may be."""
    task = "[{class_path: WordProblems, init_args: {split: train, num_examples: 8}}]"
    projector = tmp_path / "projector" if level == "features" else "null"
    run(
        "predict",
        f"--config={ROOT / 'configs' / 'exp' / 'generate_tiny.yaml'}",
        f"--run_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.enable_progress_bar=false",
        f"--data.tasks={task}",
        "--data.methods=[entropy]",
        "--data.max_prompt_length=30",
        f"--model.level={level}",
        f"--model.projector_dir={projector}",
        "--model.projector_prompts=8",
        "--model.hidden_rank=16",
    )
    plan = plan_of(yaml.safe_load((tmp_path / "predict.yaml").read_text()))
    assert plan is not None
    written = 0
    for shard in (tmp_path / "traces").glob("*.tar"):
        with tarfile.open(shard) as blocks:
            for block in blocks:
                file = blocks.extractfile(block)
                assert file is not None
                if block.name.endswith("b"):  # .trajb, .featb
                    written += sum(raw for raw, _ in stored_sizes(file.read()).values())
    share = 1000 * written / 8 / plan.disk["1,000 records before compression"]
    assert 0.7 < share < 1.05
