"""DDP and FSDP2 through the command line: two CPU processes, stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.runs import ROOT, run, write_config
from tests.processes import in_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

CONFIG = """
run_dir: {run_dir}
trainer:
  max_steps: 6
  logger: false
  enable_progress_bar: false
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args:
      dirpath: ${{run_dir}}/checkpoints
      filename: "{{step}}"
      every_n_train_steps: 3
      save_top_k: -1
model:
  class_path: PretrainModule
  init_args:
    backbone:
      class_path: HFBackbone
      init_args:
        trainable: true
        architecture:
          vocab_size: 462
          hidden_size: 16
          intermediate_size: 24
          num_layers: 2
          num_heads: 2
          tie_embeddings: true
          pad_id: 0
          eos_ids: [1]
          mask_id: 2
    tokenizer: tiny
    warmup_steps: 2
    export_dir: ${{run_dir}}/model
    export_dtype: float32
data:
  class_path: PretrainDataModule
  init_args:
    tokenizer: tiny
    sources:
    - class_path: lit_dlm.tasks.word_problems.WordProblems
      init_args: {{split: train}}
    batch_size: 4
"""
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
    for name, flags in STRATEGIES.items():
        for part in ("whole", "resumed"):
            at = folder / name / part
            config = write_config(folder / f"{name}-{part}-{rank}.yaml", CONFIG.format(run_dir=at))
            resume = [f"--ckpt_path={folder / name / 'whole' / 'checkpoints' / 'step=3.ckpt'}"]
            run("fit", f"--config={config}", *flags, *(resume if part == "resumed" else []))


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
