"""Files that name others, and what the command line makes of them."""

import json
import re
from pathlib import Path

import pytest

from lit_dlm.commands import recipes
from lit_dlm.config_files import FOLDER, find, load, merge, packaged, with_files

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


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 1}, "d": 1}, {"a": None, "d": None}, {"d": None}),
        ({"class_path": "A", "init_args": {"x": 1}}, {"init_args": {"y": 2}},
         {"class_path": "A", "init_args": {"x": 1, "y": 2}}),
        ({"class_path": "A", "init_args": {"x": 1}}, {"class_path": "B", "init_args": {"y": 2}},
         {"class_path": "B", "init_args": {"y": 2}}),
        ({"class_path": "CodeTask", "init_args": {"x": 1}},
         {"class_path": "DatasetTask"}, {"class_path": "DatasetTask"}),
        ({"class_path": "lit_dlm.tasks.base.DatasetTask", "init_args": {"x": 1}},
         {"class_path": "HumanEval"}, {"class_path": "HumanEval", "init_args": {"x": 1}}),
        ({"init_args": {"x": 1}}, {"class_path": "A"}, {"init_args": {"x": 1}, "class_path": "A"}),
        ("A", {"init_args": {"x": 1}}, {"class_path": "A", "init_args": {"x": 1}}),
    ],
)  # fmt: skip
def test_mappings_are_merged_and_another_class_starts_anew(old, new, merged):
    assert merge(old, new) == merged


def test_packaged_files_are_found_from_any_folder_behind_own_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed = FOLDER / "exp" / "benchmark_tiny.yaml"
    assert find("exp/benchmark_tiny") == find("exp/benchmark_tiny.yaml") == packed
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "benchmark_tiny.yaml").write_text("run_dir: own\n")
    assert find("exp/benchmark_tiny") == tmp_path / "exp" / "benchmark_tiny.yaml"


def arguments(*given: str) -> tuple[dict, list[str]]:
    """The merged document of a command line, and its other arguments."""
    made = with_files(["predict", *given])
    assert made[0] == "predict"
    assert made[1].startswith("--config=")
    return json.loads(made[1].removeprefix("--config=")), made[2:]


def test_a_second_file_adds_a_decoder_and_flags_reach_both_and_named_regions(folder: Path):
    more = folder / "more.yaml"
    more.write_text("model: {init_args: {decoders: {z: {policy: EntropyPolicy}}}}\n")
    document, rest = arguments(
        *("--config", str(folder / "exp" / "one.yaml"), "--seed", "3", f"--config={more}"),
        "--model.init_args.decoders.x.init_args.policy.init_args.threshold=5e-1",
        *("--model.decoders.z.policy", "MarginPolicy"),
    )
    decoders = {"x": {"policy": HALF, "quota": "NoQuota"}, "z": {"policy": "MarginPolicy"}}
    assert document["model"]["init_args"]["decoders"] == decoders
    assert rest == ["--seed", "3"]
    # A flag between files wins over both, whatever it sets: a list, null, a part of a decoder.
    flags = ("layers", "[5]"), ("decoders.z", "null"), ("decoders.x.quota", "LinearQuota")
    words = [f"--model.init_args.{key}={value}" for key, value in flags]
    more.write_text("model: {init_args: {layers: [6], decoders: {x: {quota: NoQuota}, z: {}}}}\n")
    document, rest = arguments(
        *("--config", str(folder / "exp" / "one.yaml"), *words, "--seed=3"), f"--config={more}"
    )
    x = {"policy": "ThresholdPolicy", "quota": "LinearQuota"}
    assert document["model"]["init_args"] == {"lr": 1, "layers": [5], "decoders": {"x": x}}
    assert rest == ["--seed=3"]
    # As in files null takes a decoder away; a flag without a value is left to the parser.
    flags = ["--model.init_args.decoders.x", "null", "--model.init_args.decoders.y.quota"]
    document, rest = arguments("--config", str(folder / "exp" / "two.yaml"), *flags, "--seed=3")
    assert document["model"]["init_args"]["decoders"] == {"y": {"policy": HALF, "quota": "NoQuota"}}
    assert rest == [flags[-1], "--seed=3"]
    region = "--model.init_args.decoders.jacobi-border-8.init_args.layout.init_args.regions.R"
    document, rest = arguments("--config", "exp/lockstep_tiny", f"{region}.tau=0.25")
    layout = document["model"]["init_args"]["decoders"]["jacobi-border-8"]["layout"]
    assert layout["init_args"]["regions"]["R"] == {"length": 8, "tau": 0.25, "max_fill_frac": 1.0}
    assert rest == []


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000 + "]" * 100_000, "- " * 50_000 + "a"])
def test_nesting_that_would_end_the_process_is_one_line(text: str, tmp_path: Path):
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"deep\.yaml: expected at most 50 levels"):
        load(str(path))
    with pytest.raises(ValueError, match="--config: expected at most 50 levels"):
        with_files(["--config", f"{{a: {'[' * 1000}"])


def test_values_of_flags_may_name_packaged_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flag, value = with_files(["--model.backbone", "backbone/tiny.yaml"])
    assert flag == "--model.backbone"
    assert json.loads(value) == {"class_path": "HFBackbone", "init_args": {"path": "tiny"}}
    others = ["--file", "other.yaml", "--flag", "-1"]
    assert with_files(others) == others


def test_recipes_list_every_experiment_and_show_one(capsys: pytest.CaptureFixture[str]):
    assert recipes.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [f"exp/{line.split()[0]}" for line in lines] == packaged("exp")
    assert all("Needs: " in line for line in lines)
    # No GPU's memory was measured at real size.
    assert all("(estimated)" in line for line in lines if " GPU" in line.partition("Needs: ")[2])
    on_cpu = [line for line in lines if "CPU core" in line]
    assert not [line for line in on_cpu if not re.search("second|minute|hour", line)]
    assert recipes.main(["tracerl_tiny_value"]) == 0
    text = capsys.readouterr().out
    assert "run_dir: runs/tracerl_tiny_value" in text
    assert "defaults:" not in text
