"""Trainer, backbone and decode files parse; tests/e2e/test_experiments.py runs the experiments."""

import pytest

import cli
from lit_dlm.config.files import FOLDER, compose, experiments, load, packaged, resolved
from tests.twins import RELEASES

pytestmark = pytest.mark.slow  # every case builds the whole command line
BENCHMARK = ("predict", "--config=exp/benchmark_tiny")


def _print_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as done:
        cli.main([*arguments, "--print_config"])
    output = capsys.readouterr()
    assert done.value.code == 0, output.err
    return output.out


def test_every_reference_has_a_value_and_every_fit_a_folder_of_its_own():
    """The first fit of a folder claims it; two may share a ``run_dir``."""
    owners: dict[str, list[str]] = {}
    for case in experiments():
        config = resolved(compose(case, "base").document)
        if config["model"]["class_path"].rpartition(".")[2] not in (
            "DecodeModule",
            "TraceModule",
        ):
            assert owners.setdefault(config["trainer"]["default_root_dir"], case) == case
    assert {"runs/tiny", "runs/tiny/outcome", "runs/dream/autoencoder"} < owners.keys()


@pytest.mark.parametrize("name", packaged("trainer"))
def test_trainer_parses_on_top_of_an_experiment(name: str, capsys):
    assert "accelerator:" in _print_config(capsys, *BENCHMARK, f"--config={name}")


def test_backbones_that_no_experiment_names_are_valid(capsys):
    """Of the others each is that of an experiment, and runs with it."""
    used = "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))
    names = {name for name in packaged("backbone") if f"{name}.yaml" not in used}
    for name in names - {"backbone/from_ar"}:
        entry = load(name)
        assert entry["class_path"] == "HFBackbone"
        assert entry["init_args"].keys() == {"path", "dtype"}
        assert entry["init_args"]["path"] in {*RELEASES, "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"}
    assert "Qwen/Qwen2.5-0.5B" in _print_config(
        capsys, *BENCHMARK, "--model.init_args.backbone=backbone/from_ar.yaml"
    )


BLOCK = "tracerl_trado --config=model/sdar"
RELEASED = {
    "as_released": ["tracerl_dream", "tracerl_dream --config=data/rl_code", "tracerl_llada",
                    "tracerl_llada --config=data/rl_code_llada", "tracerl_mmada"],
    "as_released_block": ["tracerl_trado", "tracerl_trado --config=data/rl_code",
                          "tracerl_trado --config=method/block8", "tracerl_sdar",
                          "tracerl_trado --config=method/thinking --config=data/rl_math",
                          "tracerl_sdar --config=method/value_full",
                          f"{BLOCK} --config=data/rl_code", f"{BLOCK} --config=method/random",
                          f"{BLOCK} --config=method/coupled"],
    "as_released_sft": ["sft_dream", "sft_llada", "sft_mmada", "sft_sdar", "sft_trado",
                        "sft_trado --config=method/thinking_sft"],
    "as_released_tabom": ["tabom_dream_prm12k", "tabom_dream_ling_coder", "tabom_llada_prm12k",
                          "tabom_llada_ling_coder", "tabom_llada_prm12k --config=model/llada_v"],
}  # fmt: skip
"""Overlays with a release's values to the experiments that they are for."""
CASES = [(overlay, name) for overlay, names in RELEASED.items() for name in names]


@pytest.mark.parametrize(("overlay", "name"), CASES)
def test_what_departs_from_a_release_takes_its_values(overlay: str, name: str):
    """As files say it; tests/e2e/test_experiments.py runs each overlay."""
    document = compose(f"--config=exp/{name} --config=method/{overlay}".split()).document
    options, data = (document[part]["init_args"] for part in ("model", "data"))
    if overlay == "as_released_tabom":
        assert options["ties"] == "position"
        return
    backbone = options["backbone"]["init_args"]
    assert (backbone["dtype"], backbone["trainable"], backbone.get("lora")) == (
        "float32",
        True,
        None,
    )
    is_tuned = overlay == "as_released_sft"
    assert options["optimizer"]["init_args"]["lr"] == (1e-5 if is_tuned else 1e-6)
    if not is_tuned:
        told = {"temperature": 1.0, "normalise": "reference", "max_fall": None}
        assert options["objective"].items() >= {**told, "kl_to": "old", "beta": 0.01}.items()
        is_block = overlay == "as_released_block"
        assert options.get("block_alignment") == ("response" if is_block else None)
        assert options["masking"]["init_args"].get("rows_per_sample") is None
        few = "value_full" in name  # on four GPUs
        assert data["rows_per_update"] == (128 if few else 256 if is_block else 2048)


def test_run_dir_reaches_everything_that_refers_to_it(capsys):
    text = _print_config(capsys, *BENCHMARK, "--run_dir", "elsewhere")
    assert "run_dir: elsewhere" in text
    assert "path: elsewhere/policy" in text
    assert "runs/" not in text
