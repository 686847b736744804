"""Checkpoint files are whole or refused, the one before stays, and nothing in them runs."""

import os
import pickle
import random
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lit_dlm.training.checkpoint import (
    CheckpointFiles,
    last_checkpoint,
    put_in_place,
    sound,
    write_digests,
)

FILES = CheckpointFiles()


def checkpoint(step: int, size: int = 3000) -> dict[str, Any]:
    weight = torch.arange(size, dtype=torch.float32) + step
    return {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"weight": weight},
        "global_step": step,
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "optimizer_states": [{"step": step}],
    }


def with_best(name: str) -> dict[str, Any]:
    return {**checkpoint(1), "callbacks": {"Saver{}": {"best_k_models": {name: 1.0}}}}


def load(path: Path) -> int:
    """The step of a checkpoint, whose content is what was saved of that step."""
    found = FILES.load_checkpoint(path)
    wanted = checkpoint(found["global_step"])
    assert found.pop("state_dict")["weight"].equal(wanted.pop("state_dict")["weight"])
    assert found == wanted
    return found["global_step"]


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_save_that_finds_no_room_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on file sizes ends the write in the middle; no other folder is written to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    path = tmp_path / "run" / "last.ckpt"
    FILES.save_checkpoint(checkpoint(1), path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"last\.ckpt: the checkpoint cannot be written \(.*File"):
            FILES.save_checkpoint(checkpoint(2, size=100_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    assert load(path) == 1


def test_weights_that_are_no_numbers_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    path, broken = tmp_path / "last.ckpt", checkpoint(2)
    FILES.save_checkpoint(checkpoint(1), path)
    broken["state_dict"]["weight"][7] = torch.nan
    with pytest.raises(ValueError, match=r"last\.ckpt: not written, since weight is not finite"):
        FILES.save_checkpoint(broken, path)
    assert load(path) == 1
    torch.save(broken, path)
    with pytest.raises(ValueError, match=r"last\.ckpt: weight has numbers that are not finite"):
        FILES.load_checkpoint(path)


def test_a_flipped_bit_is_refused_or_makes_no_difference(tmp_path: Path) -> None:
    path, refused = tmp_path / "best.ckpt", 0
    FILES.save_checkpoint(checkpoint(1), path)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(400):
        flip(path, rng.randrange(len(whole)), rng.randrange(8))
        try:
            assert load(path) == 1
        except ValueError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 300
    for length in (0, 1, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="the checkpoint is damaged"):
            FILES.load_checkpoint(path)


@pytest.mark.parametrize(
    ("entry", "place", "bit"),
    [(0, 10, 3), (4, 38, 4), (0, 9, 5), (4, 43, 1)],
    ids=["compressed", "folder", "encrypted", "elsewhere"],
)
def test_a_last_whose_directory_is_damaged_gives_way_too(
    tmp_path: Path, entry: int, place: int, bit: int
) -> None:
    """Entry 0 is the pickle, 4 the weight; their places are those of the zip format."""
    path = tmp_path / "last.ckpt"
    for step in (1, 2):
        FILES.save_checkpoint(checkpoint(step), path)
    entries = [found.start() for found in re.finditer(rb"PK\x01\x02", path.read_bytes())]
    flip(path, entries[entry] + place, bit)
    assert load(path) == 1


def test_a_damaged_last_gives_way_to_the_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, former = tmp_path / "last.ckpt", tmp_path / "last-former.ckpt"
    for step in (1, 2, 3):
        FILES.save_checkpoint(checkpoint(step), path)
    assert load(path) == 3
    assert not caplog.messages
    flip(path, 2000)
    assert load(path) == 2
    (message,) = caplog.messages
    assert message.startswith(f"{path} is damaged (checksum of ")
    assert message.endswith(f"going on from {former}, which was saved before it")
    flip(former, 2000)
    with pytest.raises(ValueError, match=r"last\.ckpt: the checkpoint is damaged"):
        FILES.load_checkpoint(path)


def test_last_is_the_newest_that_was_not_replaced_whatever_the_clock_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only it is kept twice, also while a save is between its two renames."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert last_checkpoint([one, two]) is None
    for step in (1, 2):
        FILES.save_checkpoint(checkpoint(step), one / "last.ckpt")
        FILES.save_checkpoint(checkpoint(step), one / "best.ckpt")
    names = {file.name for file in one.iterdir()}
    assert names == {"last.ckpt", "last-former.ckpt", "best.ckpt"}
    os.utime(one / "last.ckpt", (1000, 1000))
    assert last_checkpoint([one, two]) == one / "last.ckpt"
    FILES.save_checkpoint(checkpoint(3), two / "last-v1.ckpt")
    assert last_checkpoint([one, two]) == two / "last-v1.ckpt"
    (two / "last-v1.ckpt").unlink()

    def killed(at: Path, to: Path) -> None:
        assert "partial" not in at.name, "killed"
        at.rename(to)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(AssertionError, match="killed"):
        FILES.save_checkpoint(checkpoint(4), one / "last.ckpt")
    assert last_checkpoint([one, two]) == one / "last-former.ckpt"
    assert load(one / "last-former.ckpt") == 2


class Runs:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1], "expected a checkpoint of Lightning"),
        ({"weight": torch.zeros(2)}, "expected a checkpoint of Lightning"),
        (with_best("/a/../b"), "best_k_models leads out of its folder, to /a/../b"),
        (with_best("a/.."), "best_k_models leads out of its folder, to a/.."),
        ({"hook": Runs()}, "expected a checkpoint of tensors and plain values"),
    ],
)
def test_other_content_is_named_and_nothing_in_a_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "foreign.pt")
    for weights_only in (None, False):
        with pytest.raises(ValueError, match=rf"foreign\.pt: {named}"):
            FILES.load_checkpoint("foreign.pt", weights_only=weights_only)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.pt"]


def test_a_run_in_a_relative_folder_above_reads_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    FILES.save_checkpoint(with_best("../runs/step=1.ckpt"), "../runs/last.ckpt")
    assert FILES.load_checkpoint("../runs/last.ckpt")["global_step"] == 1


def test_folders_and_addresses_are_no_checkpoint_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder, as ShardedStrategy writes"):
        FILES.load_checkpoint(folder(tmp_path / "sharded.ckpt"))
    for path in ("http://127.0.0.1:1/last.ckpt", "s3://bucket/last.ckpt", "registry:name"):
        with pytest.raises(ValueError, match="ckpt_path: expected a local file, got"):
            FILES.load_checkpoint(path)


def folder(path: Path, step: int = 1) -> Path:
    """A sharded checkpoint of one process."""
    dcp.save({"state_dict": checkpoint(step)["state_dict"]}, checkpoint_id=path, no_dist=True)
    write_digests(path)
    return path


def test_a_damaged_folder_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for step in (1, 2):
        put_in_place(folder(tmp_path / "draft", step), path)
    assert sound(path) == path
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        flip(file, len(whole) // 2)
        assert sound(path) == tmp_path / "last-former.ckpt", file.name
        file.write_bytes(whole)
    next(path.glob("*.distcp")).unlink()
    assert sound(path) == tmp_path / "last-former.ckpt"


def test_nothing_in_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = folder(Path("foreign.ckpt"))
    (path / "digests.json").unlink()
    assert sound(path) == path  # from before there were digests
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match=r"damaged \(\.metadata names posix\.mkdir\)"):
        sound(path)
    assert not Path("ran").exists()
