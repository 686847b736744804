"""Trainer, backbone and decode files parse; tests/e2e/test_experiments.py runs the experiments."""

import pytest
import yaml

import cli
from lit_dlm.config.files import FOLDER, load, packaged
from tests.twins import RELEASES

pytestmark = pytest.mark.slow  # every case builds the whole command line
BENCHMARK = ("predict", "--config=exp/benchmark_tiny")


def _print_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as done:
        cli.main([*arguments, "--print_config"])
    output = capsys.readouterr()
    assert done.value.code == 0, output.err
    return output.out


def test_fits_into_one_run_folder_have_folders_of_their_own():
    """Each is claimed by the first that is run there; two may share a ``run_dir``."""
    owners: dict[str, str] = {}
    for name in packaged("exp"):
        config = load(name)
        module = config["model"]["class_path"].rpartition(".")[2]
        if module in ("DecodeModule", "TraceModule"):
            continue
        root = config["trainer"].get("default_root_dir", "${run_dir}")
        folder = root.replace("${run_dir}", config["run_dir"])
        assert owners.setdefault(folder, name) == name
    assert {"runs/tiny", "runs/tiny/outcome", "runs/dream/autoencoder"} < owners.keys()


@pytest.mark.parametrize("name", packaged("trainer"))
def test_trainer_parses_on_top_of_an_experiment(name: str, capsys):
    assert "accelerator:" in _print_config(capsys, *BENCHMARK, f"--config={name}")


def test_backbones_that_no_experiment_names_are_valid(capsys):
    """Of the others each is that of an experiment, and runs with it."""
    used = "".join(path.read_text() for path in (FOLDER / "exp").rglob("*.yaml"))
    used += "".join(path.read_text() for path in (FOLDER / "method").glob("*.yaml"))
    names = {name for name in packaged("backbone") if f"{name}.yaml" not in used}
    for name in names - {"backbone/from_ar"}:
        entry = load(name)
        assert entry["class_path"] == "HFBackbone"
        assert entry["init_args"].keys() == {"path", "dtype"}
        assert entry["init_args"]["path"] in {*RELEASES, "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"}
    assert "Qwen/Qwen2.5-0.5B" in _print_config(
        capsys, *BENCHMARK, "--model.init_args.backbone=backbone/from_ar.yaml"
    )


RELEASED = {
    "as_released": "dream dream_code llada llada_code mmada",
    "as_released_block": "trado trado_code trado_block8 trado_thinking sdar sdar_code sdar_value "
    "sdar_random sdar_coupled",
    "as_released_sft": "dream llada mmada sdar trado trado_long_cot",
    "as_released_tabom": "dream_prm12k dream_ling_coder llada_prm12k llada_ling_coder llada_v",
}
"""Overlays with a release's values to the experiments that they are for, without their method."""
CASES = [(overlay, name) for overlay, names in RELEASED.items() for name in names.split()]


@pytest.mark.parametrize(("overlay", "name"), CASES)
def test_what_departs_from_a_release_takes_its_values(overlay: str, name: str, capsys):
    kind = {"as_released_sft": "sft", "as_released_tabom": "tabom"}.get(overlay, "tracerl")
    files = (f"--config=exp/{kind}_{name}", f"--config=method/{overlay}")
    parsed = yaml.safe_load(_print_config(capsys, "fit", *files))
    options, data = (parsed[part]["init_args"] for part in ("model", "data"))
    if kind == "tabom":
        assert options["ties"] == "position"
        return
    backbone = options["backbone"]["init_args"]
    assert (backbone["dtype"], backbone["trainable"], backbone["lora"]) == ("float32", True, None)
    lr = options["optimizer"]["init_args"]["lr"]
    assert lr == {"sft": 1e-5, "tracerl": 1e-6}[kind]
    if kind == "tracerl":
        objective = options["objective"]["init_args"]
        told = [objective[key] for key in ("temperature", "normalise", "max_fall", "kl_to", "beta")]
        assert told == [1.0, "reference", None, "old", 0.01]
        is_block = overlay == "as_released_block"
        assert options["block_alignment"] == ("response" if is_block else None)
        assert options["masking"]["init_args"].get("rows_per_sample") is None
        few = name == "sdar_value"  # on four GPUs
        assert data["rows_per_update"] == (128 if few else 256 if is_block else 2048)


def test_run_dir_reaches_everything_that_refers_to_it(capsys):
    text = _print_config(capsys, *BENCHMARK, "--run_dir", "elsewhere")
    assert "run_dir: elsewhere" in text
    assert "path: elsewhere/policy" in text
    assert "runs/" not in text
