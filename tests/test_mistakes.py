"""The usual mistakes of the command line: one line each that says where and what was meant."""

import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from lightning_utilities.core.imports import RequirementCache

import cli

pytestmark = pytest.mark.slow  # starts the command line

ROOT = Path(__file__).resolve().parents[1]
PREDICT = "predict --config exp/generate_tiny"
LOCK = "fit --config exp/tracelock_tiny --data.shards=shards"
SFT = "fit --config sft"
OWN_DATA = "fit --config exp/own_data --model.backbone.path tiny --data.path"
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

class Breaks:
    name = "breaks"

    def __init__(self, text=None):
        if text is None:
            raise ValueError("no text")
        {}[text]

    def examples(self): ...
    def extract(self, example, completion): ...
    def grade(self, example, completion): ...
    def reference_completion(self, example): ...
"""
FILES = {
    "open.yaml": "trainer: [1\n",
    "loop.yaml": "defaults: ring\n",
    "ring.yaml": "defaults: loop\n",
    "list.yaml": "- a\n",
    "empty.yaml": "# nothing\n",
    "decoder.yaml": "polcy: {init_args: {threshold: 0.9}}\n",
    "top.yaml": "modle: {seed: 1}\n",
    "trainer.yaml": "trainer: {max_stepz: 3}\n",
    "five.yaml": "trainer: 5\n",
    "beside.yaml": "data: {class_path: PromptDataModule, batch_size: 3}\n",
    "optimiser.yaml": "model: {init_args: {optimiser: {init_args: {lr: 1}}}}\n",
    "sft.yaml": SFT_YAML,
    "own.py": OWN,
    "torn.py": "class Mine(:",
    "answers.jsonl": '{"prompt": "2+3", "answer": "5"}\n',
    "key.jsonl": '{"prmpt": "2+3"}\n',
    "shards/train.jsonl": '{"prompt": "2+3"}\n',
    "torn.ckpt": "PK",
    "torn/fit.yaml": "[",
    "foreign/fit.yaml": "model: {seed: 3}\n",
}


def _tasks(name: str, path: str) -> str:
    return f"{PREDICT} '--data.tasks=[{{class_path: {name}, init_args: {{path: {path}}}}}]'"


MISTAKES = [
    # the command
    ("genrate", "unknown command 'genrate'; known: fit, validate, predict, generate, "),
    ("test --config exp/generate_tiny", "test: nothing to run; 'validate' scores a model, 'pre"),
    ("fit", "model and data: expected a class, got none; give --config FILE ('lit-dlm recipes' li"),
    # files of the configuration
    (
        "predict --config exp/tracelok_tiny",
        "configuration 'exp/tracelok_tiny': expected a file, got none in {here} and {configs}; "
        "did you mean 'exp/tracelock_tiny'?",
    ),
    (f"{PREDICT} --config open", "{here}/open.yaml: while parsing a flow sequence in"),
    ("fit --config loop", "{here}/loop.yaml: names itself, by way of {here}/ring.yaml"),
    ("fit --config list", "{here}/list.yaml: expected a mapping, got list"),
    ("fit --config empty", "{here}/empty.yaml: expected a mapping, got none"),
    (f"{PREDICT} --run_dir '${{oops'", "run_dir: expected references like ${run_dir}, got no viab"),
    (f"{PREDICT} --model.seed '${{oc.env:NOT_SET}}'",
     "model.seed: expected the environment variable NOT_SET, which is not set"),
    (f"{PREDICT} --run_dir ''", "run_dir: expected a folder, got none"),
    (f"{PREDICT} --run_dir own.py", "run_dir: own.py cannot be written to (File exists)"),
    # keys
    (f"{PREDICT} --config top", "unknown option 'modle.seed'; did you mean 'model'?"),
    ("generate 2+3 --config decoder", "unknown option 'polcy'; did you mean 'policy'?"),
    ("generate 2+3 --config exp/benchmark_tiny", "--config: expected a decode file"),
    (f"{PREDICT} --config trainer", "unknown option 'trainer.max_stepz'; did you mean 'train"),
    (f"{PREDICT} --config five", "trainer: expected a mapping of the trainer's options, got 5"),
    (f"{PREDICT} --config beside", "data: expected class_path and init_args alone; put batch"),
    ("generate x --response_length 0", "response_length: expected a whole number, 1 or more, got"),
    ("serve tiny --port abc", "port: expected a whole number, 0 or more, got 'abc'"),
    ("generate x --window.size 4", "window: expected a class's name before its options, got size"),
    (f"{PREDICT} --model.decoders.entropi.policy.order 1",
     "model.decoders.policy: expected a class's name before its options, got entropi.policy.order"),
    (f"{PREDICT} --model.decoders.threshold_09.policy.treshold 1",
     "model.decoders.policy: ThresholdPolicy has no option 'treshold'; did you mean 'threshold'?"),
    (f"{PREDICT} --model.decoders.threshold_09.polcy.threshold 1",
     "model.decoders: Decoder has no option 'polcy.threshold'; did you mean 'policy'?"),
    (f"{PREDICT} --trainer.max_stepz 3",
     "unknown option 'trainer.max_stepz'; did you mean 'trainer.max_steps'?"),
    (f"{MINE}.settings.max_stepz 4", "model.decoders.settings: DecodeSettings has no option 'max_"),
    (f"{LOCK} --model.optimizer.lrr 1", "model.optimizer: AdamW has no option 'lrr'; did you mean"),
    (f"{LOCK} --model.init_args.lr 1",
     "model: TraceLockModule has no option 'lr'; did you mean 'model.optimizer.lr'?"),
    (f"{SFT} --config optimiser", "model: TABOMModule has no option 'optimiser'; did you mean '"),
    (f"{SFT} --model.optimiser.lr 1", "model: TABOMModule has no option 'optimiser.lr'; did you"),
    (f"{LOCK} --optimizer SGD",
     "unknown option 'optimizer'; did you mean 'model.optimizer' or 'model.optimizer.lr' or"),
    (f"{PREDICT} --tasks gsm8k", "unknown option 'tasks'; did you mean 'data.tasks'?"),
    (f"{PREDICT} --data.tasks.0.init_args.split train",
     "--data.tasks.0.split: lists are given as a whole, by --data.tasks"),
    (f"{SFT} --model.backbone.lora.rnk 4",
     "model.backbone.lora: LoRASettings has no option 'rnk'; did you mean 'rank'?"),
    # classes
    (f"{PREDICT} --model.backbone HFBakbone", "model.backbone: unknown class 'HFBakbone'; did you"),
    (f"{MINE}.policy EvenQuota", "model.decoders.policy: expected a class of another kind, got Ev"),
    (f"{MINE}.policy own.Chooses",
     "model.decoders.policy: Chooses has no method 'select', which CommitPolicy asks for"),
    (f"{MINE}.policy own.Leftmst", "model.decoders.policy: module 'own' has no attribute 'Leftms"),
    (f"{MINE}.policy nowhere.Mine", "model.decoders.policy: no module 'nowhere' is installed or"),
    (f"{MINE}.policy torn.Mine", "model.decoders: invalid syntax (torn.py, line 1)"),
    ("generate x --policy torn.Mine", "invalid syntax (torn.py, line 1)"),
    (f"{MINE} nope.yaml", "model.decoders: there is no file 'nope.yaml'"),
    (f"{MINE} decode/nope.yaml", "model.decoders: there is no file 'decode/nope.yaml'"),
    (f"{PREDICT} --trainer.callbacks+=DecodeWriterr",
     "trainer.callbacks: unknown class 'DecodeWriterr'; did you mean 'DecodeWriter'?"),
    (f"{PREDICT} '--data.tasks=[{{class_path: own.Chooses}}]'",
     "data.tasks: Chooses has no methods 'examples', 'extr"),
    (f"{PREDICT} '--data.tasks=[{{class_path: own.Breaks}}]'",
     "no text (ValueError in {here}/own.py, line 13)"),
    (f"{PREDICT} '--data.tasks=[{{class_path: own.Breaks, init_args: {{text: a}}}}]'",
     "'a' (KeyError in {here}/own.py, line 14)"),
    (f"{PREDICT} --data.tasks gsm8k", "data.tasks: expected a list, such as [gsm8k], got gsm8k"),
    ("eval --tasks gsm8k", "tasks: expected a list, such as [gsm8k], got gsm8k"),
    (f"{PREDICT} --data.methods [threshold_9]",
     "methods: expected 'entropy', 'threshold_099', 'threshold_09', 'threshold_07' or 'blocks_09', "
     "got 'threshold_9'; did you mean 'threshold_09'?"),
    # values
    (f"{LOCK} --model.optimizer.lr abc", "model.optimizer.lr: expected float, got abc"),
    (f"{PREDICT} --data.batch_size 0", "batch_size: expected at least 1, got 0"),
    (f"{PREDICT} --model.level tokns", "model.level: expected one of 'tokens', 'signals', 'feat"),
    (f"{PREDICT} --seed_everything x", "seed_everything: expected bool or int, got x"),
    (f"{PREDICT} --trainer.precision 17", "trainer.precision: expected one of 64, 32, 16 or one"),
    (f"{PREDICT} --trainer.strategy dpp", "You selected an invalid strategy name: `strategy='dpp'"),
    # a command with the configuration of another
    ("fit --config exp/generate_tiny",
     "model: expected a class with training_step, as fit asks for, got TraceModule"),
    ("predict --config exp/tracelock_tiny",
     "data: expected a class with predict_dataloader, as predict asks for, got TrajectoryData"),
    # files of data and models
    (f"{PREDICT} --model.backbone.path ./nowhere", "path: './nowhere' is neither an existing fol"),
    (f"{PREDICT} --ckpt_path torn.ckpt", "torn.ckpt: the checkpoint is damaged (File is not a zi"),
    (f"{PREDICT} --ckpt_path no.ckpt", "no.ckpt: no such checkpoint"),
    ("fit --config exp/tabom_tiny",
     "runs/tabom_tiny/traces: there is no such folder of shards, or no trajectory shards are in "
     "it; 'lit-dlm predict --config exp/distill_tiny' makes it"),
    ("fit --config exp/tabom_tiny --run_dir mine",
     "mine/traces: there is no such folder of shards, or no trajectory shards are in it; 'lit-dlm "
     "recipes' tells what makes it"),
    ("fit --config exp/tracelock_tiny",
     "projector folder runs/tiny/projector: there is no such folder; 'lit-dlm predict --config "
     "exp/generate_tiny' makes it"),
    (f"{PREDICT} --ckpt_path last", "ckpt_path: expected last*.ckpt in any folder of checkpo"),
    ("validate --config sft --run_dir new --ckpt_path last",
     "ckpt_path: expected last*.ckpt in {here}/new/checkpoints; run 'lit-dlm fit' with the same"),
    (f"{SFT} --trainer.callbacks+=ModelCheckpoint",
     "trainer.callbacks: a checkpoint cannot tell two of ModelCheckpoint apart; two of ModelCheck"),
    (f"{OWN_DATA} answers.jsonl --data.val_fraction 0 --trainer.max_steps 1 "
     "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/lss",
     "trainer.callbacks: Early stopping conditioned on metric `val/lss` which is not available"),
    (f"{SFT} --run_dir foreign", "run_dir: foreign holds a fit of other settings (data: None, "),
    (f"{SFT} --run_dir torn", "torn/fit.yaml: while parsing a flow node"),
    (f"{LOCK} --model.projector runs/no/p", "projector folder runs/no/p: there is no such folder"),
    (_tasks("PromptsFile", "no.jsonl"), "path: there is no file or folder 'no.jsonl'"),
    (f"{SFT} --data.sources answers.jsonl",
     "--data.sources: expected classes, such as [{class_path: ResponsesFile, init_args: {path: a"),
    (f"{PREDICT} --data.tasks=[answers.jsonl]",
     "--data.tasks: expected classes, such as [{class_path: PromptsFile, init_args: {path: ans"),
    (f"{OWN_DATA} no.jsonl", "path: there is no file or folder 'no.jsonl'"),
    (f"{OWN_DATA} key.jsonl", "key.jsonl, line 1: expected 'messages', 'conversations', or one of"),
    (_tasks("PromptsFile", "key.jsonl"), "key.jsonl, line 1: expected 'messages', 'conversations'"),
    (_tasks("GSM8K", "answers.jsonl"),
     "answers.jsonl, line 1: expected a field 'question', got ['prompt', 'answer']"),
    (f"{SFT} --data.sources.init_args.path=key.jsonl", "key.jsonl, line 1: expected 'messages', "),
    # generate
    ("generate x --config decode/threshold_09 --policy.init_args.treshold 0.5",
     "policy: ThresholdPolicy has no option 'treshold'; did you mean 'threshold'?"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user, in which every command is given."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop("own", None)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]):
    """Gives the one line that a command ends with."""

    def line(command: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(shlex.split(command))
        assert end.value.code in (1, 2)
        (told,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
        return told.removeprefix("lit-dlm: error: ")

    return line


@pytest.mark.parametrize(("command", "told"), MISTAKES)
def test_a_mistake_is_one_line(command: str, told: str, folder: Path, refusal):
    told = told.replace("{here}", str(folder)).replace("{configs}", str(ROOT / "configs"))
    assert refusal(command).startswith(told)


@pytest.mark.parametrize(
    ("command", "module", "wanted"),
    [
        (f"{PREDICT} --config trainer/wandb", "wandb", "wandb>=0.22"),
        (f"{PREDICT} --config trainer/tensorboard", "tensorboard", "tensorboard>=2.20"),
        (f"{SFT} --model.backbone.load_in_4bit true", "bitsandbytes", "bitsandbytes>=0.45"),
        (f"{SFT} --config method/adamw_8bit", "bitsandbytes", "bitsandbytes>=0.45"),
        ("eval --tasks [gsm8k]", "lm_eval", "lm-eval[ifeval]>=0.4.13"),
        ("serve tiny", "uvicorn", "uvicorn>=0.30"),
    ],
)
def test_a_missing_package_is_named(command: str, module: str, wanted: str, monkeypatch, refusal):
    ours = "lit_dlm.serve.api"  # imports some where a command could not
    for name in [one for one in sys.modules if one.split(".")[0] == module or one == ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    # Lightning looks once what is installed.
    for name in ("pytorch.loggers.wandb._WANDB", "fabric.loggers.tensorboard._TENSORBOARD"):
        absent = RequirementCache(f"{module}>=9999")
        monkeypatch.setattr(f"lightning.{name}_AVAILABLE", absent)
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
    assert f"pip install '{wanted}'" in refusal(command)


def test_a_task_of_slurm_that_sees_one_gpu_of_several_is_told_the_flag(monkeypatch, refusal):
    """As with ``--gpus-per-task=1``."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    told = refusal(f"{PREDICT} --config trainer/slurm")
    assert told.startswith("trainer.devices: expected 8 GPUs in sight of each task of SLURM, got 1")
    assert "--gpus-per-node" in told


def test_a_port_that_another_program_has_is_refused(monkeypatch, refusal):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        told = refusal(f"{PREDICT} --trainer.devices 2 --trainer.strategy ddp")
    assert f"MASTER_PORT: expected a free port, got {port} (Address already in use)" in told


def test_a_logger_that_cannot_log_in_is_named(monkeypatch, refusal):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr("wandb.init", Mock(side_effect=wandb.errors.UsageError("No API key\nis")))
    told = refusal(f"{PREDICT} --config trainer/wandb")
    assert told.startswith("trainer.logger: No API key is; WANDB_MODE=offline")
