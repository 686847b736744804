"""The files of examples/ work as their docstrings say, from the folder that they lie in."""

import ast
import csv
import json
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

import cli
from lit_dlm import generate
from lit_dlm.decoding import Decoder, NoQuota
from lit_dlm.tasks import Task
from lit_dlm.training.checkpoint import CheckpointFiles
from lit_dlm.vision.pictures import picture_to_text
from tests.e2e.runs import write_jsonl

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
PAGE = (ROOT / "docs" / "start" / "first_script.md").read_text()
QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")


@pytest.fixture(autouse=True)
def _in_their_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(FOLDER))])


def shown(name: str) -> str:
    """The YAML lines of an example's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert text is not None
    _, _, rest = text.partition("::\n\n")
    lines = [line for line in rest.splitlines() if not line or line.startswith("    ")]
    return textwrap.dedent("\n".join(lines))


def config(tmp_path: Path, name: str, **more: object) -> str:
    """A file of these lines and others."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**more, **yaml.safe_load(shown(name))}))
    return str(path)


def test_the_policy_decodes(tmp_path: Path, capsys):
    """Where nothing is ever sure, the loop commits the leftmost cell, one a step."""

    def decoded(*options: str, length: int = 8) -> str:
        prompt = "Tom has 34 pens, finds 7, loses 5. How many pens?"
        cli.main(["generate", prompt, f"--response_length={length}", *options])
        return capsys.readouterr().out

    file = config(tmp_path, "commit_policy")
    assert "#### " in decoded("--config", file, length=32)
    never_sure = decoded("--config", file, "--policy.init_args.threshold=2")
    assert never_sure == decoded("--policy=SequentialPolicy")


def test_the_policy_takes_back(tmp_path: Path, capsys):
    prompt = "Tom has 34 pens, finds 7, loses 5. How many pens?"
    file = config(tmp_path, "taking_back")
    cli.main(["generate", prompt, "--config", file, "--response_length=32"])
    assert "#### 36" in capsys.readouterr().out
    policy = runpy.run_path(str(FOLDER / "taking_back.py"))["SecondThoughts"]
    prompts = ["Sam has 14 toys, gives 2, eats 6. How many toys?", prompt]
    (plain, again) = (
        generate(
            "tiny",
            prompts,
            decode=Decoder(policy=policy(every), quota=NoQuota()),
            response_length=32,
        )
        for every in (100, 2)  # the first one never has a second thought
    )
    assert plain.num_steps == [32, 32]
    assert set(again.status) == {"complete"}
    assert max(again.num_steps) > 32


@pytest.mark.slow
def test_the_task_is_decoded_and_graded(tmp_path: Path):
    run_dir = tmp_path / "run"
    writer = {"class_path": "DecodeWriter", "init_args": {"run_dir": str(run_dir)}}
    backbone = {"class_path": "HFBackbone", "init_args": {"path": "tiny"}}
    options = {"backbone": backbone, "tokenizer": "tiny"}
    options["decoders"] = {"threshold": {"policy": "ThresholdPolicy", "quota": "NoQuota"}}
    file = config(
        tmp_path,
        "task",
        trainer={"logger": False, "callbacks": [writer]},
        model={"class_path": "DecodeModule", "init_args": options},
    )
    cli.main(["predict", "--config", file, f"--run_dir={run_dir}", *QUIET])
    (summary,) = json.loads((run_dir / "summary.json").read_text())
    assert (summary["task"], summary["n"]) == ("totals", 4)
    assert summary["accuracy"] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("training_method", "training_method.SuffixMasking"),
        ("finetuning_loss", "finetuning_loss.CertainModule"),
    ],
)
def test_states_and_a_loss_train(name: str, told: str, tmp_path: Path):
    files = ("--config=exp/sft_gt_tiny", f"--config={config(tmp_path, name)}")
    more = ("--trainer.max_steps=2", "--trainer.log_every_n_steps=1", *QUIET)
    cli.main(["fit", *files, f"--run_dir={tmp_path}", *more])
    assert told in (tmp_path / "fit.yaml").read_text()
    if name == "finetuning_loss":
        with next(tmp_path.rglob("metrics.csv")).open(newline="") as file:
            step = next(csv.DictReader(file))
        parts = float(step["train/loss_ce"]) + 0.5 * float(step["train/certainty"])
        assert float(step["train/loss"]) == pytest.approx(parts, rel=1e-5)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_reward_is_paid_and_the_policy_loss_trained_on_with_the_advantage(tmp_path: Path):
    """A right response earns something below 1, the others nothing."""
    cli.main(
        [
            *("fit", "--config=exp/tracerl_tiny", f"--config={config(tmp_path, 'reward')}"),
            *(f"--config={config(tmp_path, 'policy_loss')}", "--model.init_args.objective=null"),
            f"--config={config(tmp_path, 'advantage')}",
            *(f"--run_dir={tmp_path}", "--trainer.max_epochs=1", *QUIET),
            *("--trainer.num_sanity_val_steps=0", "--trainer.limit_val_batches=0"),
            *("--trainer.callbacks=[]", "--trainer.check_val_every_n_epoch=1"),
            *("--data.init_args.prompts_per_step=4", "--data.init_args.responses_per_prompt=4"),
            "--data.init_args.filters=[]",
        ]
    )
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        step = next(csv.DictReader(file))
    assert 0 < float(step["rollout/reward/few_steps"]) < float(step["rollout/correct"])
    assert step["train/policy_loss"]
    written = (tmp_path / "fit.yaml").read_text()
    assert "reward.FewSteps" in written
    assert "advantage.RankAdvantage" in written


@pytest.mark.slow
def test_the_engine_rolls_out_on_a_server(tmp_path: Path):
    """With the adapter of each of two RL steps: what the server says of its draws is what is
    computed here. The second step's adapter is another one than the first one's."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    cli.main(
        [
            *("fit", "--config=exp/tracerl_tiny", f"--config={config(tmp_path, 'rollout_engine')}"),
            *(f"--run_dir={tmp_path}", "--trainer.max_epochs=2", *QUIET),
            *("--trainer.num_sanity_val_steps=0", "--trainer.limit_val_batches=0"),
            *("--trainer.callbacks=[]", "--trainer.check_val_every_n_epoch=1"),
            *("--data.init_args.prompts_per_step=4", "--data.init_args.responses_per_prompt=4"),
            *("--data.init_args.filters=[]", "--model.init_args.optimizer.init_args.lr=0.01"),
        ]
    )
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == 2
    assert all(float(step["rollout/mismatch"]) < 1e-4 for step in steps)
    assert all(float(step["rollout/response_length"]) > 8 for step in steps)
    assert (tmp_path / "served" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_scorer_judges_drawn_pictures(tmp_path: Path):
    """Of a CLIP with random weights: the score is that of its own embeddings."""
    sys.path.insert(0, str(FOLDER))
    write_clip(tmp_path / "clip")
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a b"}])
    spec = yaml.safe_load(shown("picture_scorer"))["tasks"][0]
    spec["init_args"]["path"] = str(tmp_path / "prompts.jsonl")
    spec["init_args"]["scorer"]["init_args"]["path"] = str(tmp_path / "clip")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Task, "task")
    task = parser.instantiate(parser.parse_object({"task": spec})).task
    image = Image.new("RGB", (30, 20), "red")
    (example,) = task.examples()
    verdict = task.grade(example, picture_to_text(image))

    model = CLIPModel.from_pretrained(tmp_path / "clip")
    # The middle square of the picture is red: (x - mean) / std of each channel.
    colour = (torch.tensor([1.0, 0.0, 0.0]) - 0.5) / 0.5
    pixels = colour[None, :, None, None].expand(1, 3, 32, 32)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[0, 1, 2, 3]]), pixel_values=pixels)
    cosine = float(torch.cosine_similarity(found.image_embeds, found.text_embeds))
    assert verdict.score == pytest.approx(min(2.5 * max(cosine, 0.0), 1.0), abs=1e-4)
    assert verdict.score > 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        # The model itself adds from the left.
        ("train_from_python", "^34\\+7=41\n#### 41\n(?:.*\n)*7\\+34=41\n"),
        ("tracelock_from_python", "#### 36\n[12]?\\d forwards"),  # of 32
    ],
)
def test_a_script_trains(name: str, told: str, tmp_path: Path, monkeypatch: Any, capsys: Any):
    """The two that the page on Python shows, as they stand there."""
    assert f"```python\n{(FOLDER / name).with_suffix('.py').read_text()}```" in PAGE
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"))
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert CheckpointFiles().load_checkpoint(checkpoint)["state_dict"]


def write_clip(folder: Path) -> None:
    """A CLIP of random weights whose words are a and b."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 4, "bos_token_id": 0, "eos_token_id": 3},
        vision_config={**sizes, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    model = CLIPModel(config)
    with torch.no_grad():  # so that the cosine is above zero
        model.text_projection.weight.copy_(model.visual_projection.weight)
    model.save_pretrained(folder)
    half, crop = [0.5, 0.5, 0.5], {"height": 32, "width": 32}
    CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=crop, image_mean=half, image_std=half
    ).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
