"""Every shipped decode file builds the decoder that it names, through the command line's parser."""

from pathlib import Path

import pytest
import yaml

import cli

pytestmark = pytest.mark.slow  # builds the whole command line

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "decode").glob("*.yaml"))


def test_every_decode_file_parses_and_brings_its_cache(capsys: pytest.CaptureFixture[str]):
    """One start for all files: ``threshold_09_dual`` is Fast-dLLM's threshold with its cache."""
    decoders = ", ".join(f"{path.stem}: {path}" for path in FILES)
    base = "exp/benchmark_tiny"
    flag = f"--model.init_args.decoders={{{decoders}}}"
    with pytest.raises(SystemExit) as done:
        cli.main(["predict", "--config", base, flag, "--print_config"])
    output = capsys.readouterr()
    assert done.value.code == 0, output.err
    parsed = yaml.safe_load(output.out)["model"]["init_args"]["decoders"]
    assert set(parsed) == {path.stem for path in FILES}
    settings = {name: entry.get("init_args", entry) for name, entry in parsed.items()}
    caches: dict[str, list[str]] = {}
    for name, entry in sorted(settings.items()):
        if entry["cache"]:
            caches.setdefault(entry["cache"]["class_path"].rsplit(".", 1)[1], []).append(name)
    assert {cache: " ".join(names) for cache, names in caches.items()} == {
        "BlockCache": "block_dynamic block_static d2f dllm_rl_block_dynamic dllm_rl_block_static "
        "nemotron",
        "DualCache": "confidence_dual threshold_09_dual",
        "PrefixCache": "confidence_horizon_128 confidence_prefix dllm_rl_dream dllm_rl_llada "
        "threshold_09_prefix",
        "SubBlockCache": "sub_blocks",
    }
    assert settings["threshold_09_dual"]["policy"]["init_args"]["threshold"] == 0.9
    assert settings["confidence_horizon_128"]["cache"]["init_args"]["horizon"] == 128
