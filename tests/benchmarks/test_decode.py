"""The speed table of decoding: its peer decodes the same tokens."""

import json

import pytest

SMALL = ["--hidden", "32", "--heads", "2", "--layers", "2", "--intermediate", "48"]
SMALL += ["--vocab", "300", "--prompt", "9", "--gen", "16", "--block", "8", "--steps", "8"]


def test_fast_dllm_fills_the_same_tokens_under_every_scheme_that_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import decode

    decode.main(["--peer", "--json", "--repetitions", "1", "--batch", "2", *SMALL])
    told = json.loads(capsys.readouterr().out)
    for scheme in ("none", "prefix", "dual"):
        assert told[f"{scheme}_equal_percent"] == 100.0
        assert told[f"{scheme}_over_fast_dllm"] > 0.0
    forwards = {m["scheme"]: m["forwards"] for m in told["measurements"]}
    assert forwards == {"none": 8, "prefix": 8, "dual": 8}

    with pytest.raises(SystemExit, match="--peer: only full attention"):
        decode.main(["--peer", "--block_size", "4", *SMALL])
