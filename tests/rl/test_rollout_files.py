"""Rollouts from files: the answers of every engine, what is refused, and offline training."""

from pathlib import Path
from typing import Any

import pytest

from lit_dlm.rl.rollout import SAMPLED
from lit_dlm.rl.rollout_files import RolloutFiles, counted_on
from lit_dlm.trajectories.record import Trajectory
from tests.e2e.runs import write_jsonl
from tests.finetuning.runs import trained
from tests.rollouts import EOS, G, fit, last_records, learner, rollout_data

TEXT = "12\n"
IDS = [20, 21, 22, 23, 24, EOS]
STEPS = [4, 4, 6, 5, 7, 7]
GLOBAL = {"commit_step": [0, 0, 2, 1, 3, 3, -1, -1], "tokens": [*IDS, 2, 2]}


def problems(rl: Any) -> list[Any]:
    data = rollout_data()
    return [(one, rl.prompt_ids(one)) for task in data.tasks for one in task.examples()]


def read(path: Path, rl: Any, *, size: int = 1) -> tuple[list[Any], list[Trajectory]]:
    engine = RolloutFiles([str(path)])
    known = engine.answerable(problems(rl), rl, size=size, length=G)
    return known, [one for (example, _) in known for one in engine._found[example.uid]]


def written(folder: Path, *rows: Any) -> Path:
    write_jsonl(folder / "rows.jsonl", list(rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize(
    "answer",
    [
        {"response_ids": IDS, "step_map": STEPS, "reward": 1.0},
        {"text": "", "token_ids": IDS, "first_unmask_times": STEPS},
        {"text": "", "token_ids": IDS, "step_map": STEPS, "input_token_len": 9},
        {
            "index": 0,
            "steps": 4,
            "trajectory": {
                "tokens": [*IDS, 2, 2],
                "steps": [*STEPS, None, None],
                "log_probs": [-1.0, None, -2.0, -0.5, 0.0, -1.0, None, None],
            },
        },
    ],
    ids=["dLLM-RL", "JetEngine", "LMDeploy", "lit-dlm serve"],
)
def test_the_answers_of_engines_become_records(tmp_path: Path, answer: Any) -> None:
    """The prompt is named in any of three ways; steps begin at 0 in a record."""
    rl = learner()
    example, ids = problems(rl)[3]
    text = rl.tokenizer.decode(ids)
    for named in ({"uid": example.uid}, {"prompt_ids": ids}, {"prompt": text}):
        known, (record,) = read(written(tmp_path, {**named, **answer}), rl)
        assert [one.uid for one, _ in known] == [example.uid]
        assert record.prompt_ids.tolist() == ids
        assert {name: getattr(record, name).tolist() for name in GLOBAL} == GLOBAL
        assert (record.signals[SAMPLED][0] == -1.0) == ("trajectory" in answer)


def test_sglang_counts_steps_anew_in_each_block(tmp_path: Path) -> None:
    """Blocks of 3 from the beginning of the prompt, which has two cells of the first; where SGLang
    gives the cells that it cut off after the end of text, they are cells of the record."""
    assert counted_on([1, 2, 1, 1, 2, 1, 2, 3], 3, 1) == [1, 2, 3, 3, 4, 5, 6, 7]
    rl = learner(family={"attention": "block", "block_size": 3})
    uid = next(example.uid for example, ids in problems(rl) if len(ids) % 3 == 2)
    meta: dict[str, Any] = {"step_maps": [1, 2, 1, 1, 2, 1], "finish_reason": {"type": "stop"}}
    row = {"uid": uid, "output_ids": IDS, "meta_info": meta}
    (cut,) = read(written(tmp_path, row), rl)[1]
    assert cut.commit_step.tolist() == [0, 2, 1, 1, 4, 3, -1, -1]
    meta |= {"dllm_replay_token_ids": [*IDS, 9]}
    meta |= {"dllm_replay_step_maps": [1, 2, 1, 1, 2, 1, 2]}
    (whole,) = read(written(tmp_path, row), rl)[1]
    assert whole.commit_step.tolist() == [0, 2, 1, 1, 4, 3, 4, -1]
    assert whole.tokens.tolist() == [*IDS, 9, 2]


def test_texts_are_read_if_they_have_as_many_tokens_as_steps(tmp_path: Path) -> None:
    rl = learner()
    ids = problems(rl)[0][1]
    end = rl.tokenizer.decode([EOS])
    count = len(rl.tokenizer(TEXT + end, add_special_tokens=False)["input_ids"])
    row = {"prompt": rl.tokenizer.decode(ids), "response": TEXT + end}
    fits = {**row, "step_map": list(range(count)), "reward": 1}
    (record,) = read(written(tmp_path, fits), rl)[1]
    assert record.commit_step.tolist()[:count] == list(range(count))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .* {count} steps, one a token"):
        read(written(tmp_path, {**row, "step_map": [0]}), rl)


GOOD: dict[str, Any] = {"response_ids": IDS, "step_map": STEPS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_map": STEPS[1:]}, "expected 6 steps, one a token, got 5"),
        ({"step_map": ...}, "the row has no step_map"),
        ({"response_ids": ...}, "expected one of the texts response"),
        ({"response_ids": IDS * 2, "step_map": STEPS * 2}, "expected 8 tokens, or .* got 12"),
        ({"response_ids": [20] * 6}, "or fewer with an end of text among them, got 6"),
        ({"response_ids": [999, *IDS[1:]]}, r"tokens must be in 0\.\.461 .* got 999"),
        ({"response_ids": [2**40, *IDS[1:]]}, "response_ids"),
        ({"step_map": "abc"}, "step_map"),
        ({"uid": "task/9"}, "expected that of a prompt of data.tasks .* got task/9"),
        ({"uid": ..., "prompt_ids": [5, 5]}, r"expected that of a prompt .* got \(5, 5\)"),
        ({"uid": ...}, "expected one of the texts prompt"),
        ({"log_probs": ["a"] * 6}, "float"),
        ({"meta_info": [1]}, "meta_info: expected a JSON object, got list"),
        ({"trajectory": [1]}, "trajectory: expected a JSON object, got list"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, changes: Any, message: str
) -> None:
    rl = learner()
    good = {"uid": problems(rl)[0][0].uid, **GOOD}
    bad = {key: value for key, value in {**good, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        read(written(tmp_path, good, bad), rl)


def test_files_must_have_as_many_responses_as_are_asked_for(tmp_path: Path) -> None:
    rl = learner()
    (first, _), (second, _), *_ = problems(rl)
    rows = [{"uid": uid, **GOOD} for uid in (first.uid, first.uid, second.uid)]
    wanted = r"^data\.responses_per_prompt: expected at most 1, as .*rows\.jsonl have .*, got 2"
    with pytest.raises(ValueError, match=wanted):
        read(written(tmp_path, *rows), rl, size=2)
    with pytest.raises(ValueError, match=r"expected at most 0, as .*rows\.jsonl have"):
        read(written(tmp_path), rl)
    for name in ("no.jsonl", "."):
        with pytest.raises(ValueError, match=rf"{tmp_path / name}: there is no such file$"):
            read(tmp_path / name, rl)


@pytest.mark.slow
def test_a_policy_is_trained_from_a_file(tmp_path: Path) -> None:
    """What it decoded itself: graded here, and drawn with the log-probabilities that are computed
    here before the first update."""
    source = learner()
    fit(source, rollout_data(), tmp_path, steps=1)
    own = last_records(source)
    rows = [
        {
            "uid": record.uid.partition("@")[0],
            "response_ids": record.tokens.tolist(),
            "step_map": (record.commit_step + 1).tolist(),
            "log_probs": [None if x != x else float(x) for x in record.signals[SAMPLED]],
        }
        for record in own
    ]
    rl = learner()
    before, engine = trained(rl), RolloutFiles([str(written(tmp_path, *rows))])
    fit(rl, rollout_data(engine=engine), tmp_path, steps=2)
    records = last_records(rl)
    assert {record.uid.partition("@")[0] for record in records} == {row["uid"] for row in rows}
    assert {record.meta["engine"] for record in records} == {"RolloutFiles"}
    rewards = {record.tokens.tobytes(): record.meta["reward"] for record in own}
    assert all(rewards[record.tokens.tobytes()] == record.meta["reward"] for record in records)
    assert any(not weight.equal(before[name]) for name, weight in trained(rl).items())
    once = learner()
    fit(once, rollout_data(engine=engine), tmp_path, steps=1)
    assert once.loop.current.metrics["rollout/mismatch"] < 1e-6
