"""Reading rows: every good form, and one clear error for every bad one."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from lit_dlm.tasks.sources import Row, read_rows
from tests.vision.models import png

ROWS = [{"id": i, "text": f"row {i}"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def _read(path, **kwargs):
    return read_rows(str(path), split="test", required=("id",), **kwargs)


def _write(folder, name):
    path = folder / name
    contents = {
        "a.jsonl": f"{LINES}\n  \n",
        "a.json": json.dumps(ROWS),
        "a.csv": "id,text\n" + "".join(f"0{r['id']},{r['text']}\n" for r in ROWS),
    }
    if name in contents:
        path.write_text(contents[name])
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES.encode()))
    else:
        table = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    rows = _read(_write(tmp_path, name))
    assert [row.fields for row in rows] == ROWS
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert all(str(tmp_path / name) in row.origin for row in rows)


def _once(text, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count), [text])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pa.nulls(1_000_000), r": expected rows of at most 64 MiB"),
        (pa.array([[None] * 1_000_000]), r": expected rows of at most 64 MiB"),
        (_once("a" * 100_000, 2000), r": expected rows of at most 64 MiB"),
        (
            pa.ListArray.from_arrays([0, 1000], _once("a" * 100_000, 1000)),
            r": expected rows of at most 64 MiB",
        ),
        (b'{"id": "%s"}\n' % (b"a" * 1_000_000) * 90, r": expected rows of at most \d\d MiB"),
        (b'{"id": 0}\n' * 300_000, r": expected rows of at most 64 MiB"),
        (b'{"id": [' + b"{}," * 1_000_000, r": expected rows of at most 64 MiB"),
        (b'{"id": "' + b" " * (33 << 20), r", line 1: expected at most 32 MiB, got more"),
    ],
    ids=["nulls", "list", "texts", "row", "lines", "short lines", "values", "line"],
)
def test_a_small_file_does_not_fill_the_memory(tmp_path, content, told):
    """Each has less than 100 kB. A row of an ``id`` takes 500 bytes, and the last is never parsed:
    its list has no end."""
    path = tmp_path / ("a.jsonl.gz" if isinstance(content, bytes) else "a.parquet")
    if isinstance(content, bytes):
        path.write_bytes(gzip.compress(content))
    else:
        pq.write_table(pa.table({"id": content}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=rf"{path.name}{told}"):
        _read(path)


def test_short_rows_count_with_all_that_python_keeps_of_them(tmp_path):
    """A file may take 64 MiB and 100 bytes a byte; 3 bytes a row become 400 and more."""
    path = tmp_path / "a.csv"
    path.write_text("id\n" + "1\n" * 400_000)
    with pytest.raises(ValueError, match=r"a\.csv: expected rows of at most 140 MiB"):
        _read(path)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("in.png", None),
        ("../set/in.png", None),
        ("near.png", None),
        ("far.png", "inside .*, got 'far.png'"),
        ("loop.png", "no such file"),
        ("pipe.png", "no such file"),
    ],
)
def test_links_to_pictures_do_not_leave_the_folder(tmp_path, picture, message):
    """A row that the user wrote may name any file."""
    folder, target = tmp_path / "set", tmp_path / "private.png"
    folder.mkdir()
    for path in (target, folder / "in.png"):
        path.write_bytes(png(Image.new("RGB", (9, 8))))
    (folder / "near.png").symlink_to("in.png")
    (folder / "far.png").symlink_to(target)
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "a.jsonl").write_text(json.dumps({"id": 0, "image": picture}))
    (row,) = _read(folder / "a.jsonl")
    if message is None:
        assert row.pictures()[0].size == (9, 8)
    else:
        with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: .*{message}"):
            row.pictures()
    assert Row(index=0, origin="rows[0]", fields={"image": str(target)}).pictures()


def test_a_snapshot_in_the_cache_of_the_hub_has_its_pictures(tmp_path):
    """There every file is a link into one folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "0").write_text('{"id": 0, "image": "0.png"}')
    (blobs / "1").write_bytes(png(Image.new("RGB", (9, 8))))
    (snapshot / "a.jsonl").symlink_to("../../blobs/0")
    (snapshot / "0.png").symlink_to("../../blobs/1")
    (row,) = _read(snapshot / "a.jsonl")
    assert row.pictures()[0].size == (9, 8)


def test_csv_values_stay_text_and_a_folder_is_searched_for_the_split(tmp_path, monkeypatch):
    """Sudoku puzzles may begin with 0."""
    assert _read(_write(tmp_path, "a.csv"))[3].fields == {"id": "03", "text": "row 3"}
    _write(tmp_path, "test.jsonl.gz")
    monkeypatch.chdir(tmp_path)
    assert len(_read(tmp_path)) == len(_read(Path())) == 5
    with pytest.raises(ValueError, match=r"path: expected .* named train"):
        read_rows(str(tmp_path), split="train", required=())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINES + "{broken\n", r"a\.jsonl, line 6: not valid JSON .* column 2"),
        ("a.jsonl", LINES + "[1]\n", r"a\.jsonl, line 6: expected a JSON object, got list"),
        ("a.jsonl", LINES + '{"x": 1}\n', r"a\.jsonl, line 6: expected a field 'id', got \['x'\]"),
        ("a.jsonl", b'{"id": "\xff"}\n', r"a\.jsonl, line 1: not valid JSON \(.utf-8"),
        ("a.jsonl", '{"id": "\\ud83d"}\n', r"a\.jsonl, line 1: not valid JSON \(.utf-8"),
        ("a.jsonl", "", r"path: expected at least one row"),
        ("a.json", "[{},", r"a\.json: not valid JSON \(.*line 1"),
        ("a.json", "{}", r"a\.json: expected a JSON list of objects, got dict"),
        ("a.json", "[1]", r"a\.json, item 1: expected a JSON object, got int"),
        ("a.csv", "id,text\n1,2,3\n", r"a\.csv, line 2: expected 2 values"),
        ("a.csv", "id,text\n1\n", r"a\.csv, line 2: expected 2 values"),
        ("a.csv", b"id\n\xff\n", r"a\.csv, after line \d: .*utf-8"),
        ("a.csv", "id,text\n", r"path: expected at least one row"),
        ("a.parquet", "nonsense", r"a\.parquet: not a readable parquet file"),
        (
            "a.jsonl.gz",
            gzip.compress(LINES.encode(), mtime=0)[:-12],
            "damaged or cut off after line",
        ),
        ("a.jsonl.gz", "plain", r"a\.jsonl\.gz: damaged or cut off after line 0"),
        ("a.txt", "x", r"path: expected a file ending in .*a\.txt"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        _read(path)


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "/no/where", "a/b/c", "~/none"])
def test_missing_local_files_never_reach_the_hub(source):
    with pytest.raises(ValueError, match="data_file: there is no file or folder"):
        _read(source, option="data_file")


def test_hub_rows_have_an_origin(monkeypatch, tmp_path):
    import datasets

    file = png(Image.new("RGB", (9, 8)))
    names = {"id": datasets.Value("int64"), "text": datasets.Value("string")}
    names |= {"image": datasets.Image(), "images": datasets.List(datasets.Image())}
    held = [row | {"image": file, "images": [file] * row["id"]} for row in ROWS]

    def load(name, config, *, split):
        if name == "no/set":
            raise ConnectionError("Couldn't reach the Hub\nmore")
        return datasets.Dataset.from_list(held, features=datasets.Features(names))

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("lit_dlm.tasks.sources.HfApi", Mock())
    rows = _read("some/set")
    assert (rows[1].fields["text"], rows[1].origin) == ("row 1", "some/set/test, row 2")
    seen = [[picture.size for picture in row.pictures()] for row in rows[:3]]
    assert seen == [[(9, 8)], [(9, 8)], [(9, 8), (9, 8)]]
    outside = Path(tmp_path, "a.png")
    outside.write_bytes(file)
    cached = Path(HF_HUB_CACHE, "datasets--some--set", "a.png")
    row = replace(rows[0], fields={"image": {"bytes": None, "path": str(outside)}})
    with pytest.raises(ValueError, match=rf"row 1: expected a picture inside {cached.parent}"):
        row.pictures()
    with pytest.raises(ValueError, match=rf"row 1: {cached}: .*no such file"):
        replace(row, fields={"image": str(cached)}).pictures()
    with pytest.raises(ValueError, match=r"path: 'no/set' .*reach the Hub\). Give a local file"):
        _read("no/set")


def test_a_hub_out_of_reach_is_asked_once(monkeypatch, caplog):
    """Its client would retry for a minute, with a line for each time."""
    for place in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", False)
    (unreachable, _) = HfHubHTTPError.__bases__
    hub = Mock(**{"return_value.dataset_info.side_effect": unreachable("no route")})
    monkeypatch.setattr("lit_dlm.tasks.sources.HfApi", hub)
    with pytest.raises(ValueError, match=r"path: 'no/set' is no local file.*Give a local file"):
        _read("no/set")
    hub.return_value.dataset_info.assert_called_once()
    assert not [record for record in caplog.records if "etry" in record.getMessage()]
