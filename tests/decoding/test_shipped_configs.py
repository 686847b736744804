"""Every shipped decode file builds the decoder that it names, through the command line's parser."""

from __future__ import annotations

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
    base = str(ROOT / "configs" / "exp" / "benchmark_tiny.yaml")
    flag = f"--model.init_args.decoders={{{decoders}}}"
    with pytest.raises(SystemExit) as done:
        cli.main(["predict", "--config", base, flag, "--print_config"])
    output = capsys.readouterr()
    assert done.value.code == 0, output.err
    parsed = yaml.safe_load(output.out)["model"]["init_args"]["decoders"]
    assert set(parsed) == {path.stem for path in FILES}
    settings = {name: entry.get("init_args", entry) for name, entry in parsed.items()}
    caches = {
        name: entry["cache"]["class_path"].rsplit(".", 1)[1]
        for name, entry in settings.items()
        if entry["cache"]
    }
    assert caches == {
        "block_dynamic": "BlockCache",
        "block_static": "BlockCache",
        "confidence_dual": "DualCache",
        "confidence_horizon_128": "PrefixCache",
        "confidence_prefix": "PrefixCache",
        "dllm_rl_block_dynamic": "BlockCache",
        "dllm_rl_block_static": "BlockCache",
        "dllm_rl_dream": "PrefixCache",
        "dllm_rl_llada": "PrefixCache",
        "threshold_09_dual": "DualCache",
        "threshold_09_prefix": "PrefixCache",
    }
    assert settings["threshold_09_dual"]["policy"]["init_args"]["threshold"] == 0.9
    assert settings["confidence_horizon_128"]["cache"]["init_args"]["horizon"] == 128
