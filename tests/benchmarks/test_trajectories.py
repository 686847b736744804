import json
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.format import decode_block
from tests.benchmarks.conftest import run_script
from tests.processes import ROOT

GOLDEN = ROOT / "tests" / "golden" / "trajectories"
NAMES = (
    *("bytes_256_256", "bytes_128_64", "size_ratio", "replay_ratio"),
    *("capture_overhead_percent", "capture_us_per_step", "read_records_per_second"),
    *("logits_bytes_fp16", "logits_on_off_int8"),
)


def test_the_per_step_store_replays_what_it_stored(tmp_path: Path) -> None:
    """The baseline is no straw man: it holds the same decode, and its states are ours."""
    import per_step_store

    record = decode_block((GOLDEN / "gsm8k_128_64.records.arrow.zst").read_bytes())[0]
    path = tmp_path / "one.steps"
    path.write_bytes(per_step_store.encode(record))
    prompt, final, steps = per_step_store.load(path)
    np.testing.assert_array_equal(prompt, record.prompt_ids)
    np.testing.assert_array_equal(final, record.tokens)
    np.testing.assert_array_equal(per_step_store.final_state(final, steps), record.tokens)
    states = record.all_states()
    np.testing.assert_array_equal(
        per_step_store.all_states(final, steps), np.where(states == record.mask_id, -1, states)
    )


@pytest.mark.slow
def test_the_script_prints_one_object_with_all_figures(tmp_path: Path) -> None:
    (folder := tmp_path / "figures").mkdir()
    flags = ["--repeats", "1", "--records", "256", "--length", "8", "--batch", "2", "--folder"]
    told = run_script(tmp_path / "log", "trajectories.py", "--json", *flags, str(folder))
    figures = json.loads(told)
    assert all(isinstance(figures[name], float) for name in NAMES)
    assert figures["bytes_256_256"] <= 570
    assert figures["bytes_128_64"] <= 342
    assert figures["size_ratio"] >= 25
    assert figures["logits_bytes_int8"] < 1.0
    assert figures["read_records_per_second"] > 0
    assert not list(folder.iterdir())
