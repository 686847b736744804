import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.samples import load_samples
from tests.reports.sample_sets import record, write_run, write_set


def decodes(num_examples: int, *, tasks: tuple[str, ...] = ("t",), methods: str = "ab") -> list:
    return [
        record([10, 11], [0, 1], uid=f"{task}/test/{number}@{method}", meta={"correct": True})
        for method in methods
        for task in tasks
        for number in range(num_examples)
    ]


def uids(path: Path, **options) -> list[str]:
    return [sample.record.uid for sample in load_samples(path, **options).samples]


def test_shards_give_prompts_with_all_their_decodes(tmp_path: Path):
    folder = write_set(tmp_path / "set", decodes(2), methods={"a": {"policy": {"name": "P"}}})
    found = load_samples(folder)
    assert uids(folder) == ["t/test/0@a", "t/test/0@b", "t/test/1@a", "t/test/1@b"]
    assert found.methods == {"a": {"policy": {"name": "P"}}}
    one = found.samples[1]
    assert (one.example, one.method, one.correct) == ("t/test/0", "b", True)
    assert uids(next(folder.glob("*.tar"))) == uids(folder)
    write_set(folder, decodes(2, methods="c"), methods={"c": {"policy": {"name": "Q"}}})
    assert list(load_samples(folder).methods) == ["a", "c"]  # of a later run into the folder


def test_a_limit_takes_tasks_in_turn_and_whole_prompts_first(tmp_path: Path):
    """Two tasks of three prompts with two decodes each; five fit: t/0, u/0 and the half of t/1."""
    folder = write_set(tmp_path / "set", decodes(3, tasks=("t", "u")))
    assert uids(folder, limit=5) == [
        "t/test/0@a", "t/test/0@b", "t/test/1@a", "u/test/0@a", "u/test/0@b",
    ]  # fmt: skip
    assert load_samples(folder, limit=5).num_available == 12


def test_filters_by_sample_and_method(tmp_path: Path):
    folder = write_set(tmp_path / "set", decodes(3))
    assert uids(folder, names=["t/test/1"]) == ["t/test/1@a", "t/test/1@b"]
    named = uids(folder, names=["t/test/2@b", "t/test/0"], methods=["b"])
    assert named == ["t/test/0@b", "t/test/2@b"]
    assert uids(folder, examples={"t/test/2"}) == ["t/test/2@a", "t/test/2@b"]
    with pytest.raises(ValueError, match="t/test/9"):
        load_samples(folder, examples={"t/test/9"})


def test_responses_to_a_prompt_belong_together(tmp_path: Path):
    """Two prompts with two responses each; of a run and of its shards alone."""
    names = ["t/test/0@a", "t/test/0#1@a", "t/test/1@a", "t/test/1#1@a"]
    run = write_run(tmp_path / "run", [record([10, 11], [0, 1], uid=name) for name in names])
    for path in (run, run / "trajectories"):
        found = load_samples(path, names=["t/test/1"]).samples
        assert [one.record.uid for one in found] == names[2:]
        assert [one.example for one in found] == ["t/test/1", "t/test/1"]


def test_a_run_gives_the_graders_facts(tmp_path: Path):
    run = write_run(tmp_path / "run", decodes(2, methods="a"))
    for path in (run, run / "results"):
        right, wrong = load_samples(path).samples
        assert (right.correct, right.verdict, right.answer) == (True, "right", "a0")
        assert (wrong.correct, wrong.verdict, wrong.detail) == (False, "wrong", "expected 4")


def test_rollouts_have_their_method_before_the_step(tmp_path: Path):
    rollout = record([10, 11], [0, 1], uid="t/train/7@plain/000001.0002.003")
    folder = write_set(tmp_path / "set", [rollout])
    found = load_samples(folder, methods=["plain"]).samples[0]
    assert (found.example, found.method) == ("t/train/7", "plain")


def test_what_is_missing_is_named(tmp_path: Path):
    folder = write_set(tmp_path / "set", decodes(1))
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, options, told in (
        (folder, {"names": ["test/0"]}, r"no sample 'test/0'; did you mean 't/test/0'"),
        (folder, {"methods": ["c"]}, "no method 'c'; known: a, b"),
        (tmp_path / "nowhere", {}, "there is no such shard or folder"),
        (tmp_path, {}, r"found neither; did you mean .*/set\?"),
        (tmp_path / "notes.txt", {}, r"notes\.txt: expected a shard \(\.tar\)"),
        (tmp_path / "empty", {}, r"found neither$"),
    ):
        with pytest.raises(ValueError, match=told):
            load_samples(path, **options)


def test_results_without_trajectories_and_of_other_decodes_are_refused(tmp_path: Path):
    run = write_run(tmp_path / "run", decodes(1, methods="a"))
    shutil.rmtree(run / "trajectories")
    write_set(run / "trajectories", [record([10, 12], [0, 1], uid="t/test/0@a")])
    with pytest.raises(ValueError, match="t/test/0@a: the results name another decode"):
        load_samples(run)
    (named,) = ResultFolder(run / "results").rows("t", "a")
    next(run.glob("results/*/*/part-*.jsonl")).unlink()
    ResultFolder(run / "results").append([replace(named, trajectory=None)])
    with pytest.raises(ValueError, match="1 results, but none names a trajectory"):
        load_samples(run)
