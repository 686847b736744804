import json
import os
import random
import shutil
from pathlib import Path

import pytest

from lit_dlm.reports.results import ResultFolder
from tests.reports.rows import row


def test_rows_come_back_sorted_by_uid_from_all_ranks(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row("t/test/2"), row("t/test/0")], rank=1)
    folder.append([row("t/test/1", completion="größer\n")], rank=0)
    assert [r.uid for r in folder.rows("t", "m")] == ["t/test/0", "t/test/1", "t/test/2"]
    assert folder.rows("t", "m")[1].completion == "größer\n"
    assert folder.completed("t", "m") == {"t/test/0", "t/test/1", "t/test/2"}


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_counts_as_missing_and_is_replaced(tmp_path: Path, cut: int):
    folder = ResultFolder(tmp_path)
    folder.append([row("a"), row("b")])
    path = tmp_path / "t" / "m" / "part-r00000.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    assert folder.completed("t", "m") == {"a"}
    folder.append([row("b"), row("c")])
    assert [r.uid for r in folder.rows("t", "m")] == ["a", "b", "c"]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row("a"), row("b")])
    path = tmp_path / "t" / "m" / "part-r00000.jsonl"
    whole = path.read_text()
    for line, told in (("{broken", "expected a JSON object"), ('{"uid": "c"}', "another digest")):
        path.write_text(f"{line}\n{whole}")
        with pytest.raises(ValueError, match=rf"part-r00000\.jsonl, line 1: .*{told}"):
            folder.completed("t", "m")


def test_a_flipped_bit_is_an_error_or_makes_no_difference(tmp_path: Path):
    folder, wanted = ResultFolder(tmp_path), [row("a"), row("b", completion="größer\n")]
    settings = {"decoder": {"policy": {"threshold": 0.9}}, "seed": 0}
    folder.claim("t", "m", settings)
    folder.append(wanted)
    rng = random.Random(0)
    for name, refused in (("part-r00000.jsonl", 0), ("settings.json", 0)):
        path = tmp_path / "t" / "m" / name
        whole = path.read_bytes()
        for place in rng.sample(range(len(whole) - 1), len(whole) // 4):
            data = bytearray(whole)
            data[place] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            try:
                found = folder.rows("t", "m"), folder.settings("t", "m")
            except ValueError as error:
                refused += str(error).startswith(str(tmp_path))
            else:
                assert found == (wanted, settings)
        path.write_bytes(whole)
        assert refused > len(whole) // 5
    assert folder.rows("t", "m") == wanted


def test_the_same_sample_twice_is_an_error(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row("a")], rank=0)
    folder.append([row("a")], rank=1)
    with pytest.raises(ValueError, match="sample a was written twice"):
        folder.rows("t", "m")


def test_doubled_rows_are_taken_out(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row("a"), row("b")], rank=0)
    folder.append([row("b"), row("c")], rank=1)
    folder.append([row("a", method="n")], rank=1)
    assert folder.repair(None) == 1
    assert [found.uid for found in folder.rows("t", "m")] == ["a", "b", "c"]
    assert len(folder.rows("t", "n")) == 1
    assert folder.repair(None) == 0


def test_a_file_that_is_deleted_during_the_run_is_noticed(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.append([row("a")])
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(FileNotFoundError, match="was deleted during the run"):
        folder.append([row("b")])


def test_other_settings_are_refused_and_the_difference_is_named(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    folder.claim("t", "m", {"decoder": {"policy": {"threshold": 0.9}}, "seed": 0})
    folder.claim("t", "m", {"decoder": {"policy": {"threshold": 0.9}}, "seed": 0})
    with pytest.raises(ValueError, match=r"decoder\.policy\.threshold: 0\.9, now 0\.8"):
        folder.claim("t", "m", {"decoder": {"policy": {"threshold": 0.8}}, "seed": 0})
    stored = json.loads((tmp_path / "t" / "m" / "settings.json").read_text())
    assert stored["decoder"]["policy"]["threshold"] == 0.9


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="method"):
        ResultFolder(tmp_path).method_folder("t", name)


def test_rows_whose_trajectory_is_missing_are_removed(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    named = {uid: {"set": "trajectories", "uid": f"{uid}@m", "digest": "00"} for uid in "abc"}
    folder.append([row("a", trajectory=named["a"]), row("old")], rank=0)
    folder.append([row("b", trajectory=named["b"]), row("c", trajectory=named["c"])], rank=1)
    assert folder.repair({"a@m", "c@m"}) == 2
    assert [(r.uid, r.trajectory) for r in folder.rows("t", "m")] == [
        ("a", named["a"]),
        ("c", named["c"]),
    ]
    assert folder.repair({"a@m", "c@m"}) == 0
