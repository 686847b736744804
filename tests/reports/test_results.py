import json
import os
import random
import shutil
from pathlib import Path

import pytest

from lit_dlm.reports.results import ResultFolder
from tests.reports.rows import row


@pytest.fixture
def folder(tmp_path: Path) -> ResultFolder:
    return ResultFolder(tmp_path)


@pytest.fixture
def path(tmp_path: Path, folder: ResultFolder) -> Path:
    """The file of two results of ``folder``."""
    folder.append([row("a"), row("b")])
    return tmp_path / "t" / "m" / "part-r00000.jsonl"


def test_rows_come_back_sorted_by_uid_from_all_ranks(folder: ResultFolder):
    folder.append([row("t/test/2"), row("t/test/0")], rank=1)
    folder.append([row("t/test/1", completion="größer\n")], rank=0)
    assert [r.uid for r in folder.rows("t", "m")] == ["t/test/0", "t/test/1", "t/test/2"]
    assert folder.rows("t", "m")[1].completion == "größer\n"
    assert folder.completed("t", "m") == {"t/test/0", "t/test/1", "t/test/2"}


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_counts_as_missing_and_is_replaced(
    folder: ResultFolder, path: Path, cut: int
):
    os.truncate(path, path.stat().st_size - cut)
    assert folder.completed("t", "m") == {"a"}
    folder.append([row("b"), row("c")])
    assert [r.uid for r in folder.rows("t", "m")] == ["a", "b", "c"]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(folder: ResultFolder, path: Path):
    whole = path.read_text()
    for line, told in (("{broken", "not valid JSON"), ('{"uid": "c"}', "another digest")):
        path.write_text(f"{line}\n{whole}")
        with pytest.raises(ValueError, match=rf"part-r00000\.jsonl, line 1: .*{told}"):
            folder.completed("t", "m")


def test_a_flipped_bit_is_an_error_or_makes_no_difference(folder: ResultFolder, tmp_path: Path):
    wanted = [row("a"), row("b", completion="größer\n")]
    settings = {"decoder": {"policy": {"threshold": 0.9}}, "seed": 0}
    folder.claim("t", "m", settings)
    folder.append(wanted)
    rng = random.Random(0)
    for name in ("part-r00000.jsonl", "settings.json"):
        refused, path = 0, tmp_path / "t" / "m" / name
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


@pytest.mark.usefixtures("path")
def test_the_same_sample_twice_is_an_error_and_taken_out(folder: ResultFolder):
    folder.append([row("b"), row("c")], rank=1)
    with pytest.raises(ValueError, match="sample b was written twice"):
        folder.rows("t", "m")
    folder.append([row("a", method="n")], rank=1)
    assert folder.repair(None) == 1
    assert [found.uid for found in folder.rows("t", "m")] == ["a", "b", "c"]
    assert len(folder.rows("t", "n")) == 1
    assert folder.repair(None) == 0


def test_a_file_that_is_deleted_during_the_run_is_noticed(folder: ResultFolder, path: Path):
    shutil.rmtree(path.parents[1])
    with pytest.raises(FileNotFoundError, match="was deleted during the run"):
        folder.append([row("b")])


def test_other_settings_are_refused_and_the_difference_is_named(
    folder: ResultFolder, tmp_path: Path
):
    first, other = ({"decoder": {"policy": {"threshold": t}}, "seed": 0} for t in (0.9, 0.8))
    for _ in range(2):
        folder.claim("t", "m", first)
    with pytest.raises(ValueError, match=r"decoder\.policy\.threshold: 0\.9, now 0\.8"):
        folder.claim("t", "m", other)
    assert json.loads((tmp_path / "t" / "m" / "settings.json").read_text()).items() >= first.items()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_names_that_are_no_folder_names_are_refused(folder: ResultFolder, name: str):
    with pytest.raises(ValueError, match="method"):
        folder.method_folder("t", name)


def test_rows_whose_trajectory_is_missing_are_removed(folder: ResultFolder):
    named = {uid: {"set": "trajectories", "uid": f"{uid}@m", "digest": "00"} for uid in "abc"}
    folder.append([row("a", trajectory=named["a"]), row("old")], rank=0)
    folder.append([row("b", trajectory=named["b"]), row("c", trajectory=named["c"])], rank=1)
    assert folder.repair({"a@m", "c@m"}) == 2
    assert [row.trajectory for row in folder.rows("t", "m")] == [named["a"], named["c"]]
    assert folder.repair({"a@m", "c@m"}) == 0
