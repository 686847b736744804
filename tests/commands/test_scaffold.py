"""``lit-dlm new``: what it writes fails until it is filled in, and then runs from its YAML."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import fails, run

PENS = "--response_length=32", "Tom has 34 pens, finds 7, loses 5. How many pens?"
FILLED = {
    "policy": "return Selection(candidates & (proposal.prob >= self.threshold), proposal.prob)",
    "task": """return [
            PromptExample(
                uid=f"mine/test/{n}", task=self.name, text="2+5?", reference={"answer": "7"}
            )
            for n in range(3)
        ]""",
    "reward": "return [RewardScore(total=self.weight * rollout.is_correct) for rollout in group]",
    "method": "return batch.maskable",
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the files of a kind as ``mine_KIND`` and gives its test functions, as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def tests(kind: str, *, filled: bool) -> list[Any]:
        name = f"mine_{kind}"
        if filled:
            path = tmp_path / f"{name}.py"
            head, _, rest = path.read_text().partition("raise NotImplementedError(")
            path.write_text(head + FILLED[kind] + rest[rest.index(")\n") + 1 :])
        else:
            run("new", kind, name)
        for module in (name, f"test_{name}"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        found = importlib.import_module(f"test_{name}")
        return [value for key, value in vars(found).items() if key.startswith("test_")]

    return tests


@pytest.mark.parametrize("kind", FILLED)
def test_the_test_that_comes_along_fails_until_the_class_is_filled_in(made: Any, kind: str):
    (empty,) = made(kind, filled=False)
    with pytest.raises(NotImplementedError, match=r"Mine[A-Z]"):
        empty()
    (test,) = made(kind, filled=True)
    test()


@pytest.mark.slow  # starts the command line
def test_the_configurations_name_the_class(made: Any, capsys: Any, tmp_path: Path):
    for kind in FILLED:
        made(kind, filled=False)
        made(kind, filled=True)
    run("generate", *PENS, "--config=mine_policy.yaml")
    theirs = capsys.readouterr().out
    run("generate", *PENS, "--config=decode/threshold_09")
    assert capsys.readouterr().out == theirs
    run("predict", "--config=mine_task.yaml", "--trainer.accelerator=cpu")
    (summary,) = json.loads((tmp_path / "runs" / "mine_task" / "summary.json").read_text())
    assert (summary["task"], summary["n"]) == ("mine_task", 3)
    for name, experiment in (("mine_reward", "tracerl_tiny"), ("mine_method", "sft_gt_tiny")):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            run("fit", f"--config=exp/{experiment}", f"--config={name}.yaml", "--print_config")
        assert f"class_path: {name}.Mine" in capsys.readouterr().out


def test_bad_names_and_files_that_exist_are_refused(capsys: Any, tmp_path: Path):
    with pytest.raises(SystemExit, match="2"):
        run("new", "policy", "Sure-Prefix")
    run("new", "policy", "sure", f"--folder={tmp_path / 'a'}")
    written = {path.name for path in (tmp_path / "a").iterdir()}
    assert written == {"sure.py", "sure.yaml", "test_sure.py"}
    told = fails(capsys, "new", "task", "sure", f"--folder={tmp_path / 'a'}")
    assert "exists already" in told
