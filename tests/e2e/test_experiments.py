"""Every experiment, and each with its overlays, runs on a twin of its release, at its precision.

In one working folder a twin lies at the hub id that a file names, and small data files lie where
files look for data: an existing folder wins over the hub. What a run leaves in its ``run_dir`` is
there for the next one, as for a user.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import cli
from lit_dlm.config.files import compose, experiments, load
from tests.cuda_rules import cuda_rules
from tests.e2e.runs import ON_ONE_CPU, ROOT, write_jsonl
from tests.e2e.witness import SEEN
from tests.rewards.classifiers import save_classifier
from tests.rewards.judge_server import JudgeServer
from tests.twins import RELEASES, write_magvit_twin, write_twin

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]
STAGES = ("pretrain", "generate", "distill", "projector", "tracelock")
"""What comes before the rest of a ``run_dir``, in this order; a second round comes after."""

DECODING = ("TraceModule", "DecodeModule")
"""Modules to predict with."""
MOST = {
    "response_length": 16, "val_response_length": 16, "batch_size": 8, "val_batch_size": 8,
    "prompts_per_step": 2, "responses_per_prompt": 4, "rollout_batch_size": 16,
    "val_responses": 1, "dense_drill_steps": 1, "limit": 4,
}  # fmt: skip
"""Largest values of options of data modules."""
PROJECTOR = {"hidden_rank": 8, "delta_rank": 4}
"""Widths of a projector that fits a twin."""


Case = tuple[str, ...]
"""Words of a command line: an experiment, perhaps with what may follow it."""


def _order(case: Case) -> tuple[bool, int]:
    kind = case[1].removeprefix("exp/").partition("_")[0]
    stage = STAGES.index(kind) if kind in STAGES else len(STAGES)
    return "round2" in str(case) or "_outcome_" in case[1], stage


CASES = sorted(map(tuple, experiments()), key=lambda case: (_order(case), case))


def called(case: Case) -> str:
    """Such as ``tracelock_tiny+planning``."""
    files = [word for flag, word in pairwise(case) if flag == "--config"]
    return "+".join(file.rpartition("/")[2] for file in files)


@cache
def config_of(case: Case) -> dict[str, Any]:
    return compose(case).document


SPOKEN = {"<t5000>": "\\boxed{3}", "<t5001>": "\\boxed{4}", "<t5002>": "```pythonĊprint(3)Ċ```"}
"""Entries of a twin's vocabulary to what they read as instead: right and wrong answers."""
LETTERS = {"<t5000>": "\\boxed{A}", "<t5001>": "\\boxed{B}"}
"""What twins say that are asked about pictures."""
HEADS = ("lm_head.weight", "model.transformer.ff_out.weight", "diffusion_head.weight")
SEEING = ("GSAI-ML/LLaDA-V", "Gen-Verse/MMaDA-8B-MixCoT")
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


def talkative(folder: Path, spoken_by: dict[str, str]) -> None:
    """Lets a twin say whole answers, right and wrong ones, and end, where others say noise.

    Coordinate 0 of every embedding is large and alike, so that it passes the layers and makes the
    head's column 0 a bias of each token: log-probability plus a constant at any place.
    """
    files = (folder / "vocab.json", folder / "tokenizer.json")
    vocabulary = next(path for path in files if path.is_file())
    text = vocabulary.read_text(encoding="utf-8")
    for entry, spoken in spoken_by.items():
        text = text.replace(json.dumps(entry), json.dumps(spoken, ensure_ascii=False))
    vocabulary.write_text(text, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    ends = config.get("eos_token_id")
    letters = LETTERS.items() <= spoken_by.items()
    bias = {5000: 13.5, 5001: 13.5 if letters else 12.5, 5002: 12.5, ends: 12.0}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for key, tensor in tensors.items():
            if key.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")):
                tensor[:, 0] = 30.0
            if key in HEADS:
                tensor[:, 0] = 0.0
                for token, value in bias.items():
                    if letters:  # both equally sure, so that groups have right and wrong ones
                        tensor[token, 1:] = 0.0
                    tensor[token, 0] = value / tensor.shape[1] ** 0.5
        save_file(tensors, path, metadata={"format": "pt"})


def write_data(folder: Path) -> None:
    """Small files with the names and fields of what the experiments read. All answers are 3."""
    texts = [f"Anna has {n} apples and eats all but 3. How many are left?" for n in range(4, 12)]
    math = [{"problem": text, "answer": "3"} for text in texts]
    sums = [{"question": text, "answer": "It is 3.\n#### 3"} for text in texts]
    prompts = [{"id": n, "prompt": text} for n, text in enumerate(texts, start=4)]
    answered = [{"prompt": text, "response": "It is 3."} for text in texts]
    choices = {"question": texts[0], "options": ["2", "3"], "answer": "B"}
    check = "def check(candidate):\n    assert candidate() == 3\n"
    three = {"entry_point": "three", "test": check}
    human = {"task_id": "HumanEval/0", "prompt": 'def three():\n    """Give 3."""\n'}
    human |= {**three, "canonical_solution": "    return 3\n"}
    sentence = {"task_id": 11, "text": "Write a function that gives 3."}
    tests = json.dumps([{"input": "", "output": "3"}])
    contest = {"question_content": "Print 3.", "contest_date": "2024-09-01"}
    contest |= {"public_test_cases": tests, "private_test_cases": tests}
    told = [f"Give 3, not {n}." for n in range(4, 12)]
    program = {"test_method": "stdio", "test_input": ["", ""], "test_output": ["3", "3"]}
    call = {"test_method": "function", "test_list": ["assert three() == 3"]}
    solved = {"canonical_solution": "def three():\n    return 3\n", "atol": 0}
    sentence |= {"code": solved["canonical_solution"], "test_list": call["test_list"] * 3}
    plus = {"prompt": "Give 3.", "entry_point": "three", "base_input": [[]], "plus_input": [[]]}
    programs = [{"question": one, **program, "test_time_limit": 5} for one in told]
    seen = {"question": "Which?", "ground_truth_answer": "A"}
    files: dict[str, list[dict[str, Any]]] = {
        "math_train12k.jsonl": math,
        "MATH_train.json": [{"question": text, "ground_truth_answer": "3"} for text in texts],
        "HuggingFaceH4/MATH-500/test.jsonl": math[:2],
        "HuggingFaceH4/aime_2024/train.jsonl": math[:1],
        "math-ai/aime25/test.jsonl": math[:1],
        "openai/gsm8k/train.jsonl": sums,
        "openai/gsm8k/test.jsonl": sums[:2],
        "openai/openai_humaneval/test.jsonl": [human],
        "google-research-datasets/mbpp/test.jsonl": [sentence],
        "TIGER-Lab/MMLU-Pro/test.jsonl": [choices],
        "Idavidrein/gpqa/train.jsonl": [choices],
        "livecodebench.jsonl": [contest],
        "ling_coder_prompts.jsonl": prompts,
        "prompts.jsonl": prompts[:2],
        "yahma/alpaca-cleaned/train.jsonl": [
            {"instruction": text, "input": "", "output": "It is 3."} for text in texts
        ],
        "BOB12311/kodcode-humaneval-like/train.jsonl": [{"question": t, **three} for t in told],
        "PrimeIntellect.json": programs,
        "acecode_hard.json": [{"question": one, **call} for one in told],
        "MbppPlus.jsonl": [{"task_id": f"Mbpp/{n}", **plus, **solved} for n in range(4, 12)],
        "HumanEvalPlus.jsonl": [{"task_id": "HumanEval/0", **plus, **solved}],
        "LiveCodeBench.json": programs[:2],
        "SEEDBench_IMG_32.json": [{**seen, "image": f"pictures/{n}.png"} for n in (4, 5)],
        "sft.jsonl": answered,
        "chat.jsonl": answered,
        "sft_pictures.jsonl": [{**row, "image": "pictures/4.png"} for row in answered],
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            write_jsonl(path, rows)
    (folder / "pictures").mkdir()
    for n in (4, 5):
        Image.new("RGB", (40 * n, 60), (10 * n, 20, 200)).save(folder / f"pictures/{n}.png")


def small(options: dict[str, Any], *, num_examples: int) -> list[str]:
    """Flags that shrink what a data module's options say."""
    flags = []
    for name, value in options.items():
        if name == "response_length" and not isinstance(value, list) and value <= 64:
            continue  # sizes of the embedded models
        if name == "mix":
            flags.append("--data.mix.total=4")
        if name in MOST and value is not None:
            most = MOST[name] if isinstance(value, list) else min(value, MOST[name])
            flags.append(f"--data.{name}={most}")
        if isinstance(value, list) and "num_examples" in json.dumps(value):
            few = f'"num_examples": {num_examples}'
            tasks = re.sub(r'"num_examples": \d+', few, json.dumps(value))
            flags.append(f"--data.{name}={tasks}")
    return flags


class Workplace:
    """Runs each file at most once, after those whose results it may need."""

    def __init__(self, folder: Path, judge: JudgeServer) -> None:
        self.folder = folder
        self.judge = judge
        self.outcomes: dict[Case, BaseException | None] = {}

    def run(self, case: Case) -> None:
        if case not in self.outcomes:
            run_dir = config_of(case)["run_dir"]
            for other in CASES:
                same_folder = config_of(other)["run_dir"] == run_dir
                converted = called(other) == "sft_smollm2" and "+smollm2" in called(case)
                if (same_folder and _order(other) < _order(case)) or (converted and other != case):
                    self.run(other)
            if re.search("own_answers_tiny|method/tabom_tiny", str(case)):
                self.run(("--config", "exp/distill_tiny"))
                Path(run_dir).mkdir(parents=True)
                Path(run_dir, "traces").symlink_to(self.folder / "runs/tabom_tiny/traces")
            try:
                self._start(case)
                self.outcomes[case] = None
            except (Exception, SystemExit) as error:
                self.outcomes[case] = error
        if (error := self.outcomes[case]) is not None:
            raise AssertionError(f"{called(case)} failed: {error}") from error

    def _start(self, case: Case, *more: str) -> None:
        config, name = config_of(case), called(case)
        text = json.dumps([config, more])
        for release in RELEASES:
            if release in text and not (self.folder / release).exists():
                few = None if "GSAI" in release or "MMaDA" in release else 6000
                twin = write_twin(self.folder / release, release, hidden_size=32, num_ordinary=few)
                talkative(twin, SPOKEN | (LETTERS if release in SEEING else {}))
        if name == "sft_smollm2":  # experiments/smollm2.py makes its files
            write_twin("runs/smollm2/model", QWEN, hidden_size=32, num_ordinary=6000)
            shutil.copy("sft.jsonl", "runs/smollm2/train.jsonl")
        if "showlab/magvitv2" in text:
            write_magvit_twin(self.folder / "showlab/magvitv2")
        kind = config["model"]["class_path"].rpartition(".")[2]
        command = "predict" if kind in DECODING else "fit"
        command = "validate" if name == "tabom_scores_tiny" else command
        trainer = config["trainer"]
        flags = [*ON_ONE_CPU, "--trainer.callbacks+=tests.e2e.witness.Witness"]
        options = config["data"]["init_args"]
        flags += small(options, num_examples=2 if kind == "DecodeModule" else 8)
        if command == "fit":
            flags += ["--trainer.limit_val_batches=1"]
            flags += [f"--trainer.max_{'steps' if 'max_steps' in trainer else 'epochs'}=1"]
            if "val_check_interval" in trainer:
                flags += ["--trainer.val_check_interval=1"]
        if kind == "PretrainModule":
            flags += ["--model.compile=false"]  # a minute for a step
        is_traced = kind in ("TraceModule", "AutoencoderModule")
        if is_traced and re.search("dream|sdar|smollm2", name):
            flags += [f"--model.{name}={size}" for name, size in PROJECTOR.items()]
        model = config["model"]["init_args"]
        if "SteppedBlockWindow" in text:  # its blocks and steps divide the response
            sizes = {'block_length": 128': 'block_length": 16', 'steps": 256': 'steps": 32'}
            decoders = json.dumps(model["decoders"])
            for old, new in {**sizes, "${run_dir}": config["run_dir"]}.items():
                decoders = decoders.replace(old, new)
            flags += [f"--model.decoders={decoders}"]
        if kind in ("SFTModule", "TABOMModule") and options.get("rows_per_update", 0) > 16:
            flags += ["--data.rows_per_update=16"]  # a step of 128 batches takes 10 s
        if kind == "TABOMModule":  # windows within a response
            windows = ("window", "rank_window")
            flags += [f"--model.{name}={min(model[name], 8)}" for name in windows if name in model]
        if kind == "TraceModule":
            flags += ["--model.projector_prompts=4"]
        if "shards" in options or "val_fraction" in options:
            flags += ["--data.val_fraction=0.5"]
        if "projector_traces" in str(options.get("shards")):
            flags += [f"--data.shards={config['run_dir']}/traces"]  # any traces will do
        if "showlab/magvitv2" in text:  # its twin has a token for two pixels
            flags += ["--model.backbone.vision.resolution=8"]
        if "PictureLayout" in text:  # a square and the mark of its end
            flags += ["--data.response_length=17"]
        SEEN.clear()
        self.judge.requests.clear()
        is_for_gpu = "bfloat16" in text or "bf16-mixed" in text
        with cuda_rules() if is_for_gpu else nullcontext():
            cli.main([command, *case, *flags, *more])
        assert SEEN[{"fit": "steps", "validate": "validation", "predict": "predict"}[command]]
        if "val_check_interval" in trainer or "val_tasks" in options:
            assert SEEN["validation"]
        turns = [request["messages"][1]["content"] for request in self.judge.requests]
        assert bool(turns) == ("ProcessReward" in text)
        assert all(("image_url" in str(turn)) == ("SEEDBench" in text) for turn in turns)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("experiments")
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch, closing(JudgeServer()) as judge:
        patch.chdir(folder)
        variables = {"LIT_DLM_TRACEBACK": "1", "JUDGE_URL": judge.url}
        variables |= {"MATH_TRAIN_PATH": "math_train12k.jsonl", "MBPP_PLUS": "MbppPlus.jsonl"}
        variables |= {"HUMANEVAL_PLUS": "HumanEvalPlus.jsonl"}
        variables |= {"LIVECODEBENCH_PATH": "livecodebench.jsonl"}
        for name, value in variables.items():
            patch.setenv(name, value)
        yield Workplace(folder, judge)
    shutil.rmtree(folder)


@pytest.mark.parametrize("case", CASES, ids=called)
def test_experiment_runs(case: Case, workplace: Workplace):
    if called(case) == "pretrain_pictures":
        pytest.importorskip("sklearn")
    workplace.run(case)


SHARDS = "--data.sources.init_args.shards=runs/tabom_dream_prm12k/traces"
LLADA = "--model.backbone=backbone/llada.yaml --model.tokenizer=GSAI-ML/LLaDA-8B-Instruct"


@pytest.mark.parametrize(
    ("name", "method", "more"),
    [
        ("tracerl_dream", "as_released", "--run_dir=runs/released"),
        ("tracerl_trado", "as_released_block", "--run_dir=runs/released_block"),
        ("tabom_dream_prm12k", "as_released_tabom", f"--run_dir=runs/tabom_released {SHARDS}"),
        ("sft_dream", "as_released_sft", f"--run_dir=runs/sft_released {LLADA}"),
    ],
)
def test_experiment_runs_with_other_settings(
    name: str, method: str, more: str, workplace: Workplace
):
    """A release's values, and a backbone of another family, whose answers end in another token."""
    case = ("--config", f"exp/{name}")
    workplace.run(case)
    workplace._start(case, f"--config=method/{method}", *more.split())


def test_rewards_that_grade_nothing_are_trained_on_and_monitored(workplace: Workplace):
    """The command of the page, with a classifier where its path points to; and a price alone."""
    page = (ROOT / "docs" / "how-to" / "reinforce.md").read_text()
    commands = re.findall(r"^lit-dlm fit --config (exp/.*?)\n```", page, re.M | re.S)
    (shown,) = (one for one in commands if "REWARD_MODEL" in one)
    save_classifier(workplace.folder / "OWNER" / "REWARD_MODEL")
    price = "[{class_path: lit_dlm.rewards.speed.ForwardPrice, init_args: {price: 0.01}}]"
    for name, *flags in (
        shlex.split(shown.replace("\\\n", "")),
        ["exp/tracerl_trado", "--data.rewards", price],
    ):
        case = ("--config", name)
        workplace.run(case)
        run_dir = f"runs/ungraded/{name}"
        each = "--trainer.check_val_every_n_epoch=1"
        workplace._start(case, f"--run_dir={run_dir}", each, *flags)
        scores = json.loads((workplace.folder / run_dir / "policy" / "scores.json").read_text())
        assert scores["monitor"] == "val/reward"
        assert scores["scores"].keys() == {"epoch-00"}
        assert (workplace.folder / run_dir / "policy" / "best").is_dir()


@pytest.mark.parametrize(
    "data",
    [
        *("tabom_math", "tabom_humaneval", "tabom_mbpp"),
        *("tabom_math_llada", "tabom_humaneval_llada", "tabom_mbpp_llada"),
        *("aime", "multiple_choice", "livecodebench"),
    ],
)
def test_other_tasks_run_behind_an_experiment(data: str, workplace: Workplace):
    """One batch of every task, on the experiment's twin; all are graded."""
    family = "llada" if data.endswith("llada") else "dream"
    name = f"exp/benchmark_tabom_{family}"
    workplace.run(("--config", name))
    flags = f"--config=data/{data} --run_dir=runs/{data} --data.response_length=16"
    flags += " --data.batch_size=4 --data.methods=[threshold_08]"
    cli.main(["predict", f"--config={name}", *flags.split(), *ON_ONE_CPU])
    summaries = json.loads((workplace.folder / "runs" / data / "summary.json").read_text())
    num_tasks = len(load(f"data/{data}")["data"]["init_args"]["tasks"])
    assert len(summaries) == num_tasks
    assert all(summary["accuracy"] is not None for summary in summaries)
