"""The usual mistakes of the command line: one line each, before anything heavy is imported."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import cli
from lit_dlm import config_files, preflight

ROOT = Path(__file__).resolve().parents[1]
PREDICT = "predict --config exp/generate_tiny"
LOCK = "fit --config exp/tracelock_tiny --data.shards=shards"
SFT = "fit --config sft"
MINE = f"{PREDICT} --model.decoders.mine"
SFT_YAML = """
defaults: exp/tabom_tiny
data: {init_args: {sources: [{class_path: ResponsesFile, init_args: {path: answers.jsonl}}]}}
"""
OWN = """
class Leftmost:
    def select(self, state, candidates, proposal, quota): ...

class Chooses:
    def choose(self): ...
"""
FILES = {
    "open.yaml": "trainer: [1\n",
    "twice.yaml": "run_dir: a\nrun_dir: b\n",
    "loop.yaml": "defaults: loop\n",
    "list.yaml": "- 1\n",
    "part.yaml": "defaults: ../method/tracerll\n",
    "top.yaml": "modle: {}\n",
    "trainer.yaml": "trainer: {max_stepz: 3}\n",
    "five.yaml": "trainer: 5\n",
    "beside.yaml": "data: {class_path: PromptDataModule, batch_size: 3}\n",
    "sft.yaml": SFT_YAML,
    "own.py": OWN,
    "answers.jsonl": '{"prompt": "2+3", "answer": "5"}\n',
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "2+3"}\n{oops\n',
    "key.jsonl": '{"prmpt": "2+3"}\n',
    "shards/train.jsonl": '{"prompt": "2+3"}\n',
    "other/config.json": '{"backbone": {"hidden_size": 999}}',
    "other/projector.json": '{"config": {"hidden_size": 999}}',
    "other/adapter_config.json": '{"peft_type": "IA3"}',
    "torn.ckpt": "PK",
}


def _tasks(name: str, path: str) -> str:
    return f"{PREDICT} '--data.tasks=[{{class_path: {name}, init_args: {{path: {path}}}}}]'"


MISTAKES = [
    # the command
    ("genrate", "unknown command 'genrate'; known: fit, validate, test, predict, generate, "),
    ("fit", "model: expected a class, got none; give --config FILE ('lit-dlm recipes' lists the"),
    # files of the configuration
    (
        "predict --config exp/tracelok_tiny",
        "configuration 'exp/tracelok_tiny': expected a file, got none in {here} and {configs}; "
        "did you mean 'exp/tracelock_tiny'?",
    ),
    (f"{PREDICT} --config open", "{here}/open.yaml: while parsing a flow sequence in"),
    (
        f"{PREDICT} --config twice",
        "{here}/twice.yaml: while constructing a mapping in \"{here}/twice.yaml\", line 1, "
        "column 1 found duplicate key run_dir in",
    ),
    ("fit --config loop", "{here}/loop.yaml: names itself, by way of {here}/loop.yaml"),
    ("fit --config list", "{here}/list.yaml: expected a mapping, got list"),
    ("fit --config part", "configuration '../method/tracerll': expected a file, got none in"),
    (f"{PREDICT} --run_dir '${{oops'", "run_dir: expected references like ${run_dir}, got no viab"),
    # keys
    (f"{PREDICT} --config top", "unknown key 'modle'; did you mean 'model'?"),
    (f"{PREDICT} --config trainer", "unknown key 'trainer.max_stepz'; did you mean 'max_steps'?"),
    (f"{PREDICT} --config five", "trainer: expected a mapping of the trainer's options, got 5"),
    (
        f"{PREDICT} --config beside",
        "data: expected batch_size below init_args of PromptDataModule, not beside it",
    ),
    (
        f"{PREDICT} --trainer.max_stepz 3",
        "unknown key 'trainer.max_stepz'; did you mean 'max_steps'?",
    ),
    (f"{PREDICT} --model.sed 1", "model: TraceModule has no option 'sed'; did you mean 'seed'?"),
    (
        f"{PREDICT} --data.init_args.batch_sise 8",
        "data: PromptDataModule has no option 'batch_sise'; did you mean 'batch_size'?",
    ),
    (
        f"{MINE}.settings.max_stepz 4",
        "model.decoders.mine.settings: DecodeSettings has no option 'max_stepz'; did you mean "
        "'max_steps'?",
    ),
    (
        f"{LOCK} --model.optimizer.lrr 0.1",
        "model.optimizer: AdamW has no option 'lrr'; did you mean 'lr'?",
    ),
    (
        f"{SFT} --model.backbone.lora.rnk 4",
        "model.backbone.lora: LoRASettings has no option 'rnk'; did you mean 'rank'?",
    ),
    # classes
    (f"{PREDICT} --model DecodModule", "model: unknown class 'DecodModule'; did you mean 'Decode"),
    (
        f"{PREDICT} --model.backbone HFBakbone",
        "model.backbone: unknown class 'HFBakbone'; did you mean 'HFBackbone'?",
    ),
    (
        f"{MINE}.policy EntropiPolicy",
        "model.decoders.mine.policy: unknown class 'EntropiPolicy'; did you mean 'EntropyPolicy'?",
    ),
    (
        f"{MINE}.policy EvenQuota",
        "model.decoders.mine.policy: EvenQuota has no method 'select', which CommitPolicy asks for",
    ),
    (
        f"{MINE}.policy own.Chooses",
        "model.decoders.mine.policy: Chooses has no method 'select', which CommitPolicy asks for",
    ),
    (
        f"{MINE}.policy own.Leftmst",
        "model.decoders.mine.policy: own has no class 'Leftmst'; did you mean 'Leftmost'?",
    ),
    (
        f"{MINE}.policy owm.Leftmost",
        "model.decoders.mine.policy: there is no module 'owm' in the working folder or the "
        "installed packages, in which to find 'Leftmost'",
    ),
    (f"{MINE} decode/nope.yaml", "model.decoders.mine: there is no configuration file 'decode/nop"),
    (
        f"{LOCK} --model.optimizer torch.optim.AdamX",
        "model.optimizer: torch.optim has no class 'AdamX'; did you mean 'Adam'?",
    ),
    (
        f"{PREDICT} --trainer.callbacks+=ResultWriterr",
        "trainer.callbacks[1]: unknown class 'ResultWriterr'; did you mean 'ResultWriter'?",
    ),
    (f"{PREDICT} --data.tasks=[GSM9K]", "data.tasks[0]: unknown class 'GSM9K'; did you mean 'GSM"),
    (f"{PREDICT} --data.tasks gsm8k", "data.tasks: expected a list, got 'gsm8k'"),
    # values
    (f"{LOCK} --model.optimizer.lr fast", "model.optimizer.lr: expected a number, got 'fast'"),
    (f"{PREDICT} --data.batch_size 0", "data.batch_size: expected at least 1, got 0"),
    (f"{PREDICT} --data.batch_size many", "data.batch_size: expected a whole number, got 'many'"),
    (f"{PREDICT} --data.response_length=-3", "data.response_length: expected at least 1, got -3"),
    (
        f"{PREDICT} --model.level tokns",
        "model.level: expected one of tokens, signals, features, got 'tokns'",
    ),
    (f"{SFT} --model.backbone.lora.rank 0", "model.backbone.lora.rank: expected at least 1, got 0"),
    (
        f"{SFT} --model.backbone.lora.targets=[qkv]",
        "model.backbone.lora.targets: expected 'attn', 'all' or some of ['attn_out', 'down_proj', ",
    ),
    (
        f"{PREDICT} --seed_everything x",
        "seed_everything: expected a whole number, true or false, got 'x'",
    ),
    # devices
    (f"{PREDICT} --trainer.devices 0", "trainer.devices: expected at least 1, auto or -1 for all"),
    (f"{PREDICT} --trainer.precision 17", "trainer.precision: expected one of 64, 32, 16 or one"),
    (
        f"{LOCK} --trainer.strategy dpp",
        "trainer.strategy: Lightning has no 'dpp'; did you mean 'ddp'?",
    ),
    # what was trained for another model
    (
        f"{MINE} decode/tracelock.yaml --model.decoders.mine.policy.path other",
        "model.decoders.mine.policy.path: it was trained for a backbone with hidden_size=999, got "
        "hidden_size=96",
    ),
    (
        "generate x --config decode/tracelock --policy.init_args.path other",
        "policy.path: it was trained for a backbone with hidden_size=999, got hidden_size=96",
    ),
    (
        f"{PREDICT} --model.projector_dir other",
        "model.projector_dir: it was trained for a backbone with hidden_size=999, got hidden_size=",
    ),
    (
        f"{LOCK} --model.projector other",
        "model.projector: it was trained for a backbone with hidden_size=999, got hidden_size=96",
    ),
    # a command with the configuration of another
    (
        "fit --config exp/generate_tiny",
        "data: expected data to train on, as fit needs, got PromptDataModule; this "
        "configuration is for 'lit-dlm predict'",
    ),
    (
        "predict --config exp/tracelock_tiny",
        "data: expected prompts to decode, as predict needs, got TrajectoryDataModule; this "
        "configuration is for 'lit-dlm fit'",
    ),
    # files of data and models
    (
        f"{PREDICT} --model.backbone.path ./nowhere",
        "model.backbone.path: there is no file or folder './nowhere'",
    ),
    (f"{PREDICT} --model.tokenizer /no/t", "model.tokenizer: there is no file or folder '/no/t'"),
    (f"{PREDICT} --ckpt_path torn.ckpt", "ckpt_path: torn.ckpt: the checkpoint is damaged (File "),
    (f"{PREDICT} --ckpt_path no.ckpt", "ckpt_path: there is no file or folder 'no.ckpt'"),
    (
        "fit --config exp/tracelock_tiny --data.shards runs/no/traces",
        "data.shards: there is no file or folder 'runs/no/traces'",
    ),
    (
        f"{LOCK} --model.projector runs/no/projector",
        "model.projector: there is no file or folder 'runs/no/projector'",
    ),
    (_tasks("PromptsFile", "no.jsonl"), "data.tasks[0].path: there is no file or folder 'no.j"),
    (_tasks("PromptsFile", "empty.jsonl"), "data.tasks[0].path: 'empty.jsonl' is empty"),
    (_tasks("PromptsFile", "broken.jsonl"), "data.tasks[0]: broken.jsonl, line 2: not valid JSON"),
    (
        _tasks("PromptsFile", "key.jsonl"),
        "data.tasks[0]: key.jsonl, line 1: expected 'messages', 'conversations', or one of prompt, "
        "instruction, question; got prmpt",
    ),
    (
        _tasks("GSM8K", "answers.jsonl"),
        "data.tasks[0]: answers.jsonl, line 1: field 'question' is missing (it has: prompt, ",
    ),
    (
        _tasks("PromptsFile", "shards"),
        "data.tasks[0]: path: the folder 'shards' holds no file for the split 'test'",
    ),
    (
        f"{SFT} --data.sources.init_args.path=key.jsonl",
        "data.sources[0]: key.jsonl, line 1: expected 'messages', 'conversations', or one of ",
    ),
    # generate
    ("generate x --config decode/nope", "configuration 'decode/nope': expected a file, got none"),
    ("generate x --policy own.Leftmst", "policy: own has no class 'Leftmst'; did you mean 'Leftmo"),
    (
        "generate x --config decode/threshold_09 --policy.init_args.treshold 0.5",
        "policy: ThresholdPolicy has no option 'treshold'; did you mean 'threshold'?",
    ),
]  # fmt: skip


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder of a user; collects the modules that the command line asks for."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    found: list[str] = []

    def recorded(name: str) -> object:
        found.append(name)
        return original(name)

    original = cli.import_module
    monkeypatch.setattr(cli, "import_module", recorded)
    return found


@pytest.mark.parametrize(("command", "told"), MISTAKES)
def test_a_mistake_is_one_line_at_once(
    command: str,
    told: str,
    imported: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit, match="2"):
        cli.main(shlex.split(command))
    seconds = time.process_time() - began
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    told = told.replace("{here}", str(tmp_path)).replace("{configs}", str(ROOT / "configs"))
    assert error.startswith(f"lit-dlm: error: {told}")
    assert imported in ([], ["lit_dlm.preflight"])
    assert seconds < 2, f"{seconds:.2f} s of CPU"


def test_nothing_that_takes_seconds_is_imported_for_all_of_them(imported: list[str]) -> None:
    """One process of its own; prints the CPU seconds of its slowest line (``pytest -s``)."""
    code = (
        "import contextlib, io, json, sys, time, cli\n"
        "slowest = 0.0\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    began = time.process_time()\n"
        "    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        cli.main(arguments)\n"
        "    slowest = max(slowest, time.process_time() - began)\n"
        "heavy = {'torch', 'lightning', 'transformers', 'jsonargparse', 'datasets'}\n"
        "print(json.dumps([sorted(heavy & set(sys.modules)), slowest]))"
    )
    commands = json.dumps([shlex.split(command) for command, _ in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", code, commands],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    heavy, slowest = json.loads(done.stdout)
    assert heavy == []
    sys.stdout.write(f"{len(MISTAKES)} mistakes: slowest {slowest:.2f} s of CPU\n")


def test_what_is_right_passes(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of a user's own, and every shipped experiment, but for what it needs first."""
    monkeypatch.syspath_prepend(".")
    preflight.check("predict", shlex.split(f"{MINE}.policy own.Leftmost")[1:])
    preflight.check("generate", ["x", "--config=decode/threshold_09", "--policy", "own.Leftmost"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wants = ("there is no file or", "this machine has no GPU driver", "the hub did not deliver")
    for name in config_files.packaged("exp"):
        for command in ("fit", "predict"):
            try:
                preflight.check(command, ["--config", name])
            except ValueError as error:
                if command == "fit" and "is for 'lit-dlm predict'" in str(error):
                    continue
                if not any(want in str(error) for want in wants):
                    raise
            break


@pytest.mark.parametrize(
    ("command", "package", "told"),
    [
        (f"{PREDICT} --config trainer/tensorboard", "tensorboard", "trainer.logger[1]: expected "),
        (f"{PREDICT} --config trainer/wandb", "wandb", "trainer.logger[1]: expected wandb, which "),
        (_tasks("MBPPPlus", "answers.jsonl"), "evalplus", "data.tasks[0]: expected evalplus, whi"),
        (f"{SFT} --model.backbone.load_in_4bit true", "bitsandbytes", "model.backbone.load_in_4b"),
        (
            f"{SFT} --config method/adamw_8bit",
            "bitsandbytes",
            "model.optimizer: expected bitsandby",
        ),
        ("eval --tasks [gsm8k]", "lm_eval", "eval: expected lm_eval, which is not installed; pip "),
    ],
)
def test_a_missing_extra_is_told_first(
    command: str,
    package: str,
    told: str,
    imported: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(shlex.split(command))
    error = capsys.readouterr().err
    assert error.startswith(f"lit-dlm: error: {told}")
    (extra,) = re.findall(r"which is not installed; pip install 'lit-dlm\[(\w+)\]'", error)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    assert imported == ["lit_dlm.preflight"]


@pytest.mark.parametrize(
    ("command", "at"),
    [
        (f"{PREDICT} --model.backbone.path some/model", "model.backbone.path"),
        ("generate x --backbone some/model", "backbone.path"),
    ],
)
def test_a_hub_that_does_not_deliver_is_one_line(
    command: str,
    at: str,
    imported: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="2"):
        cli.main(shlex.split(command))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(
        f"lit-dlm: error: {at}: 'some/model' is no existing folder, and the hub did not deliver it"
    )
    assert imported == ["lit_dlm.preflight"]


def test_a_run_folder_in_use_is_one_line(
    imported: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the first process of a run alone: the others of that run find its own lock."""
    command = shlex.split(f"{PREDICT} --run_dir used")
    code = (
        "import sys; from pathlib import Path; from lit_dlm.run_lock import locked\n"
        "with locked(Path('used'), 'predict'):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(SystemExit, match="2"):
            cli.main(command)
        error = capsys.readouterr().err
        assert error.startswith(f"lit-dlm: error: used: is in use by process {holder.pid} on ")
        assert error.count("\n") == 1
        assert imported == ["lit_dlm.preflight"]
        monkeypatch.setenv("LOCAL_RANK", "1")
        preflight.check(command[0], command[1:])


def test_every_strategy_of_lightning_is_known() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    assert set(StrategyRegistry.available_strategies()) | {"auto"} == preflight.STRATEGIES


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there_is_one_line(
    name: str, imported: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda library: None)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["predict", "--config", "exp/generate_tiny", "--trainer.accelerator", name])
    assert capsys.readouterr().err == (
        "lit-dlm: error: trainer.accelerator: expected cpu or auto, as this machine has no GPU "
        f"driver, got '{name}'\n"
    )


def test_more_gpus_than_there_are_is_one_line(
    imported: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda library: "libcuda.so.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = ["--trainer.accelerator", "gpu", "--trainer.devices", "2"]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["predict", "--config", "exp/generate_tiny", *options])
    assert capsys.readouterr().err == (
        "lit-dlm: error: trainer.devices: expected at most 1 GPUs, got 2\n"
    )
    # srun with --ntasks-per-node=8 --gpus-per-task=1
    for name, value in {"NNODES": 1, "NTASKS": 8, "NTASKS_PER_NODE": 8, "PROCID": 5}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["predict", "--config", "exp/generate_tiny", "--config", "trainer/slurm"])
    assert capsys.readouterr().err == (
        "lit-dlm: error: trainer.devices: expected at most 1 GPUs, got 8 (a task of SLURM sees one "
        "of them: use --gpus-per-node in place of --gpus-per-task, or --gpu-bind=none beside it)\n"
    )
