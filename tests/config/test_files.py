"""Files that name others, and what the command line makes of them."""

import re
from pathlib import Path

import pytest

from lit_dlm.config.files import FOLDER, compose, find, load, maker, merge, packaged, resolved
from lit_dlm.tasks.base import DatasetTask

PARTS = {
    "part/base.yaml": "run_dir: a\nmodel: {init_args: {lr: 1, layers: [1, 2]}}\n",
    "part/decoder.yaml": "policy: ThresholdPolicy\nquota: NoQuota\n",
    "exp/one.yaml": (
        "defaults: ../part/base.yaml\n"
        "model: {init_args: {layers: [3], decoders: {x: ../part/decoder.yaml}}}\n"
    ),
    "exp/two.yaml": (
        "defaults: [one.yaml]\nrun_dir: b\nmodel:\n  init_args:\n    layers+: [4]\n"
        "    decoders:\n      y:\n        defaults: ../part/decoder.yaml\n"
        "        policy: {init_args: {threshold: 0.5}}\n"
    ),
}


class Mine(DatasetTask): ...


HALF = {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.5}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PARTS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_file_starts_from_those_it_names_and_values_may_be_files(folder: Path):
    plain = {"policy": "ThresholdPolicy", "quota": "NoQuota"}
    decoders = {"x": plain, "y": {"policy": HALF, "quota": "NoQuota"}}
    assert load(str(folder / "exp" / "two")) == {
        "run_dir": "b",
        "model": {"init_args": {"lr": 1, "layers": [3, 4], "decoders": decoders}},
    }


def of(kind: str, **options: int) -> dict[str, object]:
    return {"class_path": kind, "init_args": options} if options else {"class_path": kind}


BASE = "lit_dlm.tasks.base.DatasetTask"
OWN = f"{__name__}.Mine"


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 1}, "d": 1}, {"a": None, "d": None}, {"d": None}),
        (of("A", x=1), {"init_args": {"y": 2}}, of("A", x=1, y=2)),
        ({"init_args": {"x": 1}}, of("A"), of("A", x=1)),
        ("A", {"init_args": {"x": 1}}, of("A", x=1)),
        ({"a": [1]}, {"a+": [2]}, {"a": [1, 2]}),
        ({"a+": [1]}, {"a": [2]}, {"a": [2]}),
        (
            {"a": {"gsm8k": 1}},
            {"a": {"mbpp+": 2}},
            {"a": {"gsm8k": 1, "mbpp+": 2}},
        ),  # a task's name
        # Another class starts anew, also a subclass of ours, and one of the same name elsewhere.
        (of("A", x=1), of("B", y=2), of("B", y=2)),
        (of("CodeTask", x=1), of("DatasetTask"), of("DatasetTask")),
        (of(BASE, x=1), of("HumanEval"), of("HumanEval")),
        (of("own.HumanEval", x=1), of("HumanEval"), of("HumanEval")),
        (of("DatasetTask", x=1), of(OWN), of(OWN)),
        # A short name and an import path may mean one class; a user's subclass keeps settings.
        (of("lit_dlm.tasks.HumanEval", x=1), of("HumanEval"), of("HumanEval", x=1)),
        (of(BASE, x=1), of(OWN), of(OWN, x=1)),
    ],
)
def test_mappings_are_merged_and_another_class_starts_anew(old, new, merged):
    assert merge(old, new) == merged


def test_only_lists_are_appended_to() -> None:
    with pytest.raises(ValueError, match=r"^configuration: a\+ appends \[1\] to 5: no list"):
        merge({"a": 5}, {"a+": [1]})


def test_what_is_appended_waits_for_the_list_that_it_belongs_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = "{class_path: RewardCurve, init_args: {folder: x}}"
    Path("mine.yaml").write_text(
        f"defaults: trainer/tensorboard\ntrainer: {{max_steps: 5, callbacks+: [{own}]}}\n"
    )
    found = compose(["--config", "exp/sft_gt_tiny", "--config", "mine.yaml"], "base").document
    names = [one["class_path"].rpartition(".")[2] for one in found["trainer"]["callbacks"]]
    assert names == ["ModelCheckpoint", "DeviceStatsMonitor", "RewardCurve"]


def test_packaged_files_are_found_from_any_folder_behind_own_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed = FOLDER / "exp" / "benchmark" / "benchmark_tiny.yaml"
    names = ["exp/benchmark_tiny", "exp/benchmark_tiny.yaml", "exp/benchmark/benchmark_tiny"]
    assert {find(name) for name in names} == {packed}
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "benchmark_tiny.yaml").write_text("run_dir: own\n")
    assert find("exp/benchmark_tiny") == tmp_path / "exp" / "benchmark_tiny.yaml"
    (tmp_path / "exp" / "mine").mkdir()
    (tmp_path / "exp" / "mine" / "benchmark_dream.yaml").write_text("run_dir: own\n")
    assert find("exp/benchmark_dream").parent == tmp_path / "exp" / "mine"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        # A flag wins over files on both sides of it, whatever it sets, with or without init_args.
        (["--model.lr=2", "--model.init_args.layers", "[5]"], {"lr": "2", "layers": [5]}),
        (["--model.decoders.x.quota=LinearQuota"],
         {"decoders": {"x": {"policy": "ThresholdPolicy", "quota": "LinearQuota"}}}),
        # A class given by its name alone may get settings.
        (["--model.init_args.decoders.x.init_args.policy.init_args.threshold=5e-1"],
         {"decoders": {"x": {"policy": {**HALF, "init_args": {"threshold": "5e-1"}},
                             "quota": "NoQuota"}}}),
        # What a flag sets may lie deep in a file that another flag names.
        (["--model.layout=decode/layout/halves.yaml", "--model.layout.init_args.regions.R.tau=.2"],
         {"layout": {"class_path": "FixedLayout", "init_args": {"regions": {
             "R": {"length": 16, "tau": ".2", "max_fill_frac": 1.0},
             "A": {"tau": 0.9, "max_fill_frac": 1.0}}}}}),
        # Null takes an entry of a mapping away, and is a value of a class.
        (["--model.decoders.x", "null", "--model.lr=null"], {"lr": None, "decoders": {}}),
        # Files are replaced by their contents, also packaged ones and those in lists.
        (["--model.decoders.x", "part/decoder.yaml", "--model.layers=[part/decoder.yaml]"],
         {"layers": [{"policy": "ThresholdPolicy", "quota": "NoQuota"}]}),
        (["--model.lr", "backbone/tiny.yaml", "--model.file", "other.yaml", "--model.flag", "-1"],
         {"lr": {"class_path": "HFBackbone", "init_args": {"path": "tiny"}},
          "file": "other.yaml", "flag": "-1"}),
    ],
)  # fmt: skip
def test_flags_go_into_the_document_wherever_they_stand(
    folder: Path, monkeypatch, flags: list[str], options: dict
):
    monkeypatch.chdir(folder)
    (folder / "more.yaml").write_text("model: {init_args: {layers: [6], lr: 7}}\nrun_dir: c\n")
    composed = compose([*flags, "--config", "exp/one", "--run_dir", "3", "-c=more"])
    plain = {"x": {"policy": "ThresholdPolicy", "quota": "NoQuota"}}
    merged = {"lr": 7, "layers": [6], "decoders": plain, **options}
    assert composed.document == {"run_dir": "3", "model": {"init_args": merged}}
    assert composed.left == []


def test_what_only_the_parser_can_place_is_left_to_it():
    """Classes in place of others and what follows them, items to append, positional words."""
    given = ["--config", "exp/tracerl_tiny", "2+3", "--print_config", "--model.backbone=Mine"]
    given += ["--model.init_args.backbone.lora", "null", "--data.val_tasks+=[GSM8K]", "a=b"]
    given += ["--model.help=SFTModule", "--model.value.lr=1", "--trainer.logger", "false"]
    composed = compose(given, "base")
    assert composed.left == [
        *("2+3", "--model.backbone=Mine", "--model.init_args.backbone.lora=null"),
        *('--data.val_tasks+=["GSM8K"]', "a=b", "--model.help=SFTModule", "--model.value.lr=1"),
        *("--trainer.logger=false", "--print_config"),
    ]
    assert composed.document["trainer"]["default_root_dir"] == "${run_dir}"
    assert resolved(composed.document)["trainer"]["default_root_dir"] == "runs/tracerl_tiny"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--config method/as_released --config exp/tracerl_dream", "exp/tracerl_dream: names"),
        ("--config exp/tracerl_tiny --data.tasks.0.init_args.split x",
         "--data.tasks.0.split: lists are given as a whole, by --data.tasks"),
        ("--config exp/tracerl_tiny --model.value.path ${run_dir}/x",
         "--model.value.path: expected a value without references, got ${run_dir}/x"),
        ("--config exp/tracerl_tiny --run_dir ${x}",
         "run_dir: expected references like ${run_dir}, got Interpolation key 'x' not found"),
        ("--config {a", "--config: while parsing a flow mapping"),
        ("--config", "configuration '': expected a file"),
        ("--config exp/tracelock_planning",
         "'lit-dlm recipes' lists experiments and what may follow them"),
    ],
)  # fmt: skip
def test_a_command_line_that_makes_no_sense_is_one_line(arguments: str, told: str):
    with pytest.raises(ValueError, match=re.escape(told)):
        resolved(compose(arguments.split(), "base").document)


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000 + "]" * 100_000, "- " * 50_000 + "a"])
def test_nesting_that_would_end_the_process_is_one_line(text: str, tmp_path: Path):
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"deep\.yaml: expected at most 50 levels"):
        load(str(path))
    with pytest.raises(ValueError, match="--config: expected at most 50 levels"):
        compose(["--config", f"{{a: {'[' * 1000}"])


def test_experiments_have_names_of_their_own_in_folders_by_method():
    """They are found without the folder."""
    folders = {path.parent.name for path in (FOLDER / "exp").rglob("*.yaml")}
    rooms = {path.name for path in (FOLDER.parent / "lit_dlm").iterdir()}
    assert folders - {"benchmark", "embedded"} < rooms
    names = packaged("exp")
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("runs/tiny/projector", "exp/generate_tiny"),
        ("runs/tiny/traces_round2", "exp/generate_tiny --config method/round2_traces"),
        ("runs/dpo_tiny/traces", "exp/distill_tiny --config method/pairs --run_dir runs/dpo_tiny"),
        ("runs/elsewhere/traces", ""),
    ],
)
def test_what_makes_missing_traces_is_told(folder: str, words: str):
    told = f"'lit-dlm predict --config {words}' makes it" if words else "'lit-dlm recipes' tells"
    assert maker(Path(folder)).startswith(told)
