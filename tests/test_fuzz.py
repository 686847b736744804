"""Whatever a file of others holds, it is read as what was written or refused by one clear error.

Inputs are made by damaging good ones: bytes anywhere, values anywhere in JSON, columns of blocks
under checksums that are right again. What was found once stays here as an example.
"""

import copy
import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import event, given, settings, strategies as st

from lit_dlm.backbones import HFBackbone, LoRASettings, load_tokenizer, tokenizer_of
from lit_dlm.backbones.export import save_adapter
from lit_dlm.backbones.location import ASSETS
from lit_dlm.callbacks.judge import parse_verdict
from lit_dlm.config.files import compose, load, resolved
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.summary import summarise_folder
from lit_dlm.tasks.sources import read_rows
from lit_dlm.tracelock.scorer import AcceptanceScorer
from lit_dlm.trajectories import Trajectory, TrajectoryFormatError
from lit_dlm.trajectories.format import (
    decode_block,
    pack,
    read_block,
    unpack,
)
from lit_dlm.trajectories.members import decode_members, encode_members
from lit_dlm.trajectories.rows import ImportSettings, read_step_map, read_tabom
from lit_dlm.trajectories.store import TrajectoryShardReader, recover
from lit_dlm.trajectories.store.files import shard_paths
from lit_dlm.trajectories.tools.exchange import (
    read_parquet,
    step_map_row,
    tabom_row,
    write_parquet,
)
from lit_dlm.trajectories.tools.verify import verify
from tests.reports.rows import row
from tests.trajectories.samples import assert_same, random_record, shard_writer

pytestmark = pytest.mark.slow

CPU_SECONDS = 5.0
few = settings(max_examples=settings.default.max_examples // 5)  # type: ignore[union-attr]
"""For inputs that take tens of milliseconds, a fifth of the profile's."""


@contextmanager
def _cleanly(*names: object, refused_with: Any = ValueError) -> Iterator[None]:
    """Within a processor time, with no error or one of a line that says one of the names."""
    started = time.process_time()
    told = None
    try:
        yield
    except refused_with as error:
        event(type(error).__name__)
        told = str(error)
    assert told is None or ("\n" not in told and any(str(name) in told for name in names))
    assert time.process_time() - started < CPU_SECONDS


_DEEP = "[" * 3000 + "]" * 3000
_LONG = b'{"a":' + b"7" * 5000 + b"}"
_NUMBERS = (0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63))
_WEIRD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from([None, True, False, "", "\0", "../x", "\ud800", "nan", [], {}, [[]], [None]]),
    st.lists(st.integers(-3, 60), max_size=20),
    st.builds(lambda n: [1] * n, st.sampled_from([1, 11, 12, 13, 70_000])),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=3),
).map(copy.deepcopy)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inner:
        yield from _places(item, (*path, key))


@st.composite
def _changed(draw: Any, value: Any) -> Any:
    """JSON with some of its values replaced, left out, or written twice."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(value))))
        if not path:
            value = draw(_WEIRD) if draw(st.integers(0, 9)) == 0 else value
            continue
        place = value
        for key in path[:-1]:
            place = place[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
        if how == "replace":
            place[path[-1]] = draw(_WEIRD)
        elif how == "drop":
            del place[path[-1]]
        elif isinstance(place, list):
            place.insert(path[-1], draw(_WEIRD))
        else:
            place[draw(st.text(max_size=3))] = draw(_WEIRD)
        if not isinstance(value, dict | list) or not value:
            break
    return value


@st.composite
def _damaged(draw: Any, data: bytes) -> bytes:
    """Bytes with some cut out, put in or overwritten."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        new = draw(st.binary(max_size=8))
        cut = draw(st.sampled_from([len(new), len(new), 0, 1, 64, len(data)]))
        data = data[:at] + new + data[at + cut :]
    return data


@st.composite
def _repacked(draw: Any, data: bytes) -> bytes:
    """A block with changed metadata, columns and bytes within, under a checksum that is right."""
    batch = unpack(data)
    facts = {key.decode(): value.decode() for key, value in batch.schema.metadata.items()}
    if draw(st.integers(0, 3)) == 0:
        facts[draw(st.sampled_from(sorted(facts)))] = draw(
            st.sampled_from(["", "0", "9", "-1", "2147483648", "1e9", "[]", "{}", "\0"])
        )
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(columns)))
        rows = columns[name].to_pylist()
        how = draw(st.sampled_from(["value", "value", "order", "drop", "swap"]))
        if how == "drop":
            del columns[name]
        elif how == "swap":
            columns[name] = columns[draw(st.sampled_from(sorted(columns)))]
        else:
            changed = draw(_changed(rows)) if how == "value" else rows[::-1]
            with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
                found = pa.array(changed, columns[name].type)
                columns[name] = found if len(found) == len(rows) else columns[name]
    data = pack(pa.record_batch(columns).replace_schema_metadata(facts), level=1)
    if draw(st.booleans()):
        raw = draw(_damaged(zstandard.decompress(data)))
        data = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw)
    return data


@cache
def _records(features: bool = True) -> tuple[Trajectory, ...]:
    rng = np.random.default_rng(5)
    kinds = [(f"task/split/{i}", {"num_steps": 4 + i, "features": i != 1}) for i in range(3)]
    records = [
        random_record(rng, uid, remask=0.1, given=0.2, fill=fill, signals=True, **kind)
        for (uid, kind), fill in zip(kinds, (0.7, 1.0, 1.0), strict=True)
    ]
    return tuple(r if features else replace(r, features=None) for r in records)


@cache
def _block() -> bytes:
    return encode_members(_records())[0]


@cache
def _features() -> bytes:
    return encode_members(_records())[1]


@given(st.data())
def test_a_block_is_read_as_written_or_refused(data: Any) -> None:
    """A record that passes keeps all rules and survives being written again."""
    fresh = data.draw(st.booleans())
    block = data.draw((_repacked if fresh else _damaged)(_block()))
    strict = data.draw(st.booleans())
    with _cleanly("block", "trajectory '"):
        records = decode_block(block, strict=strict)
        for one, two in zip(records, decode_block(encode_members(records)[0]), strict=True):
            assert_same(one, two)
        if not fresh:  # what zstd does not read may differ
            for one, two in zip(records, decode_block(_block()), strict=True):
                assert_same(one, two)


@given(st.data())
def test_features_are_read_as_written_or_refused(data: Any) -> None:
    fresh = data.draw(st.booleans())
    block = data.draw((_repacked if fresh else _damaged)(_features()))
    with _cleanly("block", "features", refused_with=TrajectoryFormatError):
        records = decode_members(_block(), block)[1]
        encode_members(records)
        kept = [[] if r.features is None else list(r.features.kept_steps) for r in records]
        assert kept == [list(steps) for steps in read_block(_block()).kept_steps]


@cache
def _set() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    rng = np.random.default_rng(6)
    with shard_writer(folder, records_per_block=2) as writer:
        for i in range(5):
            writer.put(random_record(rng, f"task/split/{i}", features=i < 3))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _no_folder_left() -> Iterator[None]:
    yield
    for made in (_set, _folders):
        if made.cache_info().currsize:
            shutil.rmtree(made())


@few
@given(st.data())
def test_a_set_is_read_as_written_or_refused(data: Any) -> None:
    """Damage to a shard, its side file or its manifest; records with right names are right."""
    whole = {record.uid: record for record in TrajectoryShardReader(_set())}
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(_set(), Path(name, "set"))
        path = data.draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.is_file())))
        if path.suffix == ".json" and data.draw(st.booleans()):
            content = data.draw(_changed(json.loads(path.read_bytes())))
            path.write_bytes(json.dumps(content).encode())
        else:
            path.write_bytes(data.draw(_damaged(path.read_bytes())))
        for on_error in ("skip", "raise"):
            with _cleanly(folder, refused_with=TrajectoryFormatError):
                reader = TrajectoryShardReader(folder, on_error=on_error)  # type: ignore[arg-type]
                for record in reader:
                    assert_same(record, whole[record.uid])
                for shard, index in reader.blocks:
                    assert {r.uid for r in reader.outline(shard, index)[1]} <= whole.keys()
                    reader.read_block(shard, index)
        with _cleanly(folder):
            verify(shard_paths([folder]), level=2)
        with _cleanly(folder):
            recover(folder)
            for record in TrajectoryShardReader(folder, on_error="skip"):
                assert_same(record, whole[record.uid])


@cache
def _settings() -> ImportSettings:
    return ImportSettings(tokenizer=load_tokenizer("tiny"))


@cache
def _rows(kind: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    make = tabom_row if kind == "tabom" else step_map_row
    rows = [
        make(random_record(rng, f"task/{i}", num_generated=6), _settings().tokenizer)
        for i in range(2)
    ]
    del rows[1]["id"], rows[1]["status"]
    return rows


def _read_import(path: Path, read: Callable[[], Iterator[Trajectory]]) -> None:
    with _cleanly(path, "trajectory '"):
        for record in read():
            encode_members([record])


@few
@given(st.data(), st.sampled_from(["tabom", "step_map"]))
def test_rows_of_others_become_records_or_an_error_that_names_them(data: Any, kind: str) -> None:
    rows = data.draw(_changed(_rows(kind)))
    texts = [json.dumps(row) for row in rows] if isinstance(rows, list) else [json.dumps(rows)]
    text = "\n".join(texts) if kind == "tabom" else json.dumps(rows)
    content = text.encode()
    if data.draw(st.integers(0, 3)) == 0:
        content = data.draw(_damaged(content))
    if data.draw(st.integers(0, 19)) == 0:
        content = content.replace(b"[", _DEEP.encode(), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        path.write_bytes(content)
        read = read_tabom if kind == "tabom" else read_step_map
        _read_import(path, lambda: read(path, _settings()))


@cache
def _parquet() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(_records(features=False), Path(folder, "x"), run_text="{}")
        return Path(folder, "x").read_bytes()


@few
@given(st.data())
def test_parquet_becomes_records_or_an_error_that_names_it(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        path.write_bytes(_parquet())
        if data.draw(st.booleans()):
            path.write_bytes(data.draw(_damaged(_parquet())))
        else:
            table = pq.read_table(path)
            rows = data.draw(_changed(table.to_pylist()))
            try:
                pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                return  # no such file can be
        _read_import(path, lambda: read_parquet(path)[0])


_SOURCE = [{"id": 1, "prompt": "2 + 2?", "answer": "4"}, {"id": "b", "prompt": "é", "answer": 5}]


@given(st.data(), st.sampled_from([".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet"]))
def test_a_data_file_is_rows_or_an_error_that_names_it(data: Any, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"rows{suffix}")
        rows = data.draw(_changed(_SOURCE)) if data.draw(st.booleans()) else _SOURCE
        lines = "\n".join(map(json.dumps, rows)) if isinstance(rows, list) else json.dumps(rows)
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}]), path)
            content = path.read_bytes()
        elif suffix == ".csv":
            content = b'id,prompt,answer\n1,"2, 3\n4?",5\nb,c,d\n'
        else:
            content = (json.dumps(rows) if suffix == ".json" else lines).encode()
            content = gzip.compress(content, mtime=0) if suffix == ".jsonl.gz" else content
        if data.draw(st.booleans()) or suffix in (".csv", ".parquet"):
            content = data.draw(_damaged(content))
        if data.draw(st.integers(0, 19)) == 0:
            content = data.draw(st.sampled_from([_DEEP.encode(), _LONG]))
        path.write_bytes(content)
        with _cleanly(path):
            for each in read_rows(str(path), split="test", required=("prompt",)):
                each.text("prompt")


@few
@given(st.data())
def test_results_are_read_as_written_or_refused(data: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = ResultFolder(folder)
        results.claim("sum", "greedy", {"seed": 1, "isolation": "landlock"})
        results.append([row(uid=f"sum/{i}", task="sum", method="greedy") for i in range(3)])
        method = results.method_folder("sum", "greedy")
        path = data.draw(st.sampled_from(sorted(method.iterdir())))
        whole = results.rows("sum", "greedy")
        path.write_bytes(data.draw(_damaged(path.read_bytes())))
        with _cleanly(method):
            found = results.rows("sum", "greedy")
            assert len(found) < 3 or found == whole
            results.completed("sum", "greedy")
            summarise_folder(folder)
            results.repair(None)
            results.append([row(uid="sum/9", task="sum", method="greedy")])


@cache
def _folders() -> Path:
    """A model with its tokenizer, an adapter for it and a policy."""
    place = Path(tempfile.mkdtemp(prefix="fuzz"))
    shutil.copytree(ASSETS / "tiny", place / "model", ignore=shutil.ignore_patterns("out*", "*.md"))
    shutil.copytree(ASSETS / "tiny" / "outcome_policy", place / "policy")
    save_adapter(HFBackbone("tiny", lora=LoRASettings(rank=2)), place / "adapter")
    extra = {"generation_config.json": {"eos_token_id": [1]}, "added_tokens.json": {"<|mask|>": 2}}
    for name, content in extra.items():
        (place / "model" / name).write_text(json.dumps(content))
    return place


def _load(kind: str, folder: Path) -> None:
    if kind == "model":
        tokenizer_of(HFBackbone(str(folder)), str(folder))
    elif kind == "adapter":
        HFBackbone("tiny", adapter=str(folder))
    else:
        AcceptanceScorer.load(folder)


@few
@given(st.data(), st.sampled_from(["model", "model", "adapter", "policy"]))
def test_a_models_folder_is_read_or_an_error_of_one_line_names_it(data: Any, kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(_folders() / kind, Path(name, kind))
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = path.read_bytes()
        if path.suffix == ".json" and data.draw(st.integers(0, 3)):
            content = json.dumps(data.draw(_changed(json.loads(content)))).encode()
        elif path.suffix == ".safetensors":  # rather in the header, which is JSON of 8 KB at most
            content = data.draw(_damaged(content[:8192])) + content[8192:]
        else:
            content = data.draw(_damaged(content))
        path.write_bytes(content)
        names = [file.name for file in folder.iterdir()]
        with _cleanly(folder, *names, refused_with=(ValueError, OSError)):
            _load(kind, folder)


_CONFIG = {
    "defaults": ["base.yaml"],
    "run_dir": "runs/x",
    "model": {
        "class_path": "TraceModule",
        "init_args": {"decoders": {"a": {"policy": "ThresholdPolicy"}}, "seed": "${run_dir}"},
    },
    "trainer": {"callbacks+": [{"class_path": "Timer"}], "max_steps": 3},
}
_PLACEHOLDERS = ["${", "${run_dir", "${oc.env:HOME}", "a: b", "- ", "&a [*a]", "!!python/object:os"]
_NAMES = ["base", "base.yaml", "again.yaml", ".yaml", "\0.yaml", "x" * 300 + ".yaml", "{", "? []"]


@few
@given(st.data())
def test_a_configuration_is_a_mapping_or_an_error_that_names_a_file(data: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base.yaml").write_text("model: {init_args: {decoders: {b: {}}}}\ntrainer: 5\n")
        (folder / "again.yaml").write_text("defaults: [again.yaml]\n")
        path = folder / "own.yaml"
        content = data.draw(_changed(_CONFIG))
        for _ in range(data.draw(st.integers(0, 2))):
            place = data.draw(st.sampled_from([p for p in _places(content) if p] or [()]))
            inner = content
            for key in place[:-1]:
                inner = inner[key]
            if place:
                inner[place[-1]] = data.draw(st.sampled_from(_PLACEHOLDERS + _NAMES))
        text = yaml.safe_dump(content) if data.draw(st.booleans()) else json.dumps(content)
        text = data.draw(_damaged(text.encode())) if data.draw(st.booleans()) else text.encode()
        path.write_bytes(text)
        arguments = ["--config", str(path), "--config", str(folder / "base.yaml")]
        arguments += ["--model.init_args.decoders.a.threshold", "0.9", "--trainer", "x.yaml"]
        names = (".yaml", "configuration", "unknown class", "references")
        with _cleanly(*names, refused_with=(ValueError, OSError)):
            assert isinstance(load(str(path)), dict)
            resolved(compose(arguments).document)


@pytest.mark.parametrize(
    ("name", "content"),
    [("rows.jsonl", _DEEP.encode()), ("rows.json", _DEEP.encode()), ("rows.jsonl", _LONG)],
)
def test_json_that_is_too_deep_or_long_is_an_error_that_names_its_file(
    name: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*not valid JSON"):
        read_rows(str(path), split="test", required=())
    with pytest.raises(ValueError, match=name):
        list((read_tabom if "jsonl" in name else read_step_map)(path, ImportSettings()))


def test_a_reply_of_a_judge_that_is_too_deep_is_no_verdict() -> None:
    assert parse_verdict(_DEEP) is None


@pytest.mark.parametrize("column", ["uid", "prompt_ids", "num_steps", "seed", "digest", "status"])
def test_a_null_in_parquet_is_an_error_that_names_its_row(column: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(_parquet())
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[1][column] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(ValueError, match=r"rows\.parquet: row group 0: "):
        list(read_parquet(path)[0])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"defaults: 5", "configuration '5': expected a file"),
        (b"defaults: [[x]]", "expected a file"),
        (b"a: \x80", r"own\.yaml: .*(utf|UTF)-8"),
    ],
)
def test_a_configuration_that_names_no_files_is_a_clear_error(
    text: bytes, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=told):
        load(str(path))


def test_results_without_a_forward_are_condensed(tmp_path: Path) -> None:
    results = ResultFolder(tmp_path)
    results.claim("t", "m", {})
    results.append([row(nfe=0)])
    assert summarise_folder(tmp_path)[0].tokens_per_step == 32
