"""All stages of ``real_model.py`` and ``real_policies.py`` in experiments, on a small Llama."""

import json
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from lit_dlm import generate
from lit_dlm.backbones import load_backbone
from lit_dlm.decoding import BlockCache, BlockWindow, Decoder, SequentialPolicy
from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample
from tests.e2e.runs import ROOT
from tests.twins import write_autoregressive

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]

SIZES = {
    "rows": 60, "control_updates": 2, "update_rows": 8, "widening": 1, "block_updates": 4,
    "full_updates": 2, "chunk": 2, "target": 101, "validation": 2, "traces": 16, "head_updates": 5,
    "outcome_steps": 2, "tuning_updates": 2, "rl_steps": 1, "rl_prompts": 2, "test": 3,
}  # fmt: skip


def by_luck(self: object, example: PromptExample, completion: str) -> Verdict:
    is_right = len(example.text + completion) % 3 > 0  # random weights never are
    return Verdict(status="right" if is_right else "wrong")


POLICY_SIZES = {
    "validation": 2, "test": 3, "new": 2, "traces": 24, "head_updates": 5, "outcome_steps": 1,
    "outcome_prompts": 2, "outcome_validation": 2, "clocked": 2, "rounds": 1,
}  # fmt: skip


def experiment(
    monkeypatch: pytest.MonkeyPatch, *arguments: object, script: str = "real_model.py"
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(ROOT / "experiments" / script), run_name="__main__")


def test_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    monkeypatch.setattr("stories.Stories.grade", by_luck)
    out = tmp_path / "run"
    arguments = ["--out", out, "--seeds", 0]
    for name, size in SIZES.items():
        arguments += [f"--{name}", size]
    with pytest.raises(SystemExit, match="--wheel: expected the file"):
        experiment(monkeypatch, *arguments)
    torch.manual_seed(0)
    write_autoregressive(out / "parent", hidden_size=128)
    experiment(monkeypatch, *arguments)

    decodes = pq.read_table(out / "real_model.parquet").to_pandas()
    sizes = decodes.groupby(["model", "task", "method"], observed=True).size()
    assert set(sizes["block"]["stories"]) == {3}
    assert set(sizes["block"]["stories"].index) >= {"confidence", "tracelock_0.8", "outcome_0.95"}
    assert sizes["control", "stories", "autoregressive"] == 3
    assert set(decodes.model) == {
        "control", "full", "block", "sft-s0", "tabom-s0", "rl-trace", "rl-random", "on-policy",
        "further",
    }  # fmt: skip
    facts = json.loads((out / "real_model.json").read_text())
    assert [line[:2] for line in facts["curves"]] == [
        ["block", 4],
        ["control", 2],
        ["full", 2],
    ]
    # Four updates of 8 rows: a prompt of up to 160 tokens, 48 cells and three copies of these, each
    # with up to 15 cells of the prompt.
    cells = facts["costs"]["widened adapt/block"]["cells"]
    assert 4 * 8 * 4 * 48 < cells < 4 * 8 * (160 + 4 * 48 + 3 * 15)

    before = (out / "costs.jsonl").read_bytes()
    experiment(monkeypatch, *arguments)
    assert (out / "costs.jsonl").read_bytes() == before  # nothing is made again

    # Adapters and results of a run whose folder is gone: nothing is trained or decoded again.
    anew = tmp_path / "anew"
    shutil.copytree(out / "parent", anew / "parent")
    shutil.copytree(out / "kept", tmp_path / "kept")
    for name in ("real_model.parquet", "real_model.json"):
        shutil.copy(out / name, tmp_path / name)
    known = ["--kept", tmp_path / "kept", "--results", tmp_path / "real_model.parquet"]
    with pytest.raises(SystemExit, match=r"--test: expected 3, as .*, got 4"):
        experiment(monkeypatch, *arguments, "--out", anew, *known, "--test", 4)
    experiment(monkeypatch, *arguments, "--out", anew, *known)
    assert not (anew / "costs.jsonl").exists()
    assert pq.read_table(tmp_path / "real_model.parquet").to_pandas().equals(decodes)
    assert json.loads((tmp_path / "real_model.json").read_text()) == facts

    follow_next_tokens(out / "models" / "control")
    learn_policies(out, monkeypatch)

    weights = out / "kept" / "block" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(SystemExit, match=r"block/adapter_model\.safetensors: expected sha256"):
        experiment(monkeypatch, *arguments)
    (out / "real_model.parquet").write_bytes(b"PAR0")
    with pytest.raises(SystemExit, match=r"--results: .*expected results of this experiment"):
        experiment(monkeypatch, "--results", out / "real_model.parquet")


def learn_policies(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part."""
    arguments: list[object] = ["--out", out, "--kept", out / "kept"]
    arguments += ["--outcome_seeds", 0, "--train_seeds", 0, 1]
    for name, size in POLICY_SIZES.items():
        arguments += [f"--{name}", size]
    learn = partial(experiment, monkeypatch, *arguments, script="real_policies.py")
    learn()
    frame = pq.read_table(out / "real_policies.parquet").to_pandas()
    counts = frame.groupby(["arm", "task"], observed=True).uid.nunique().to_dict()
    assert counts == {
        ("validation", "stories"): 2,
        ("test", "stories"): 3,
        ("new sentences", "new_sentences"): 2,
        ("three events", "three_events"): 2,
    }
    rules = frame[frame.seed < 0].groupby("arm", observed=True).method.unique()
    assert len(rules["validation"]) == 24
    assert set(rules["test"]) == set(rules["new sentences"])
    learnt = frame[frame.seed >= 0]
    families = learnt.method.astype(str).str.partition("_")[0]
    seeds = learnt.groupby([families, "arm"], observed=True).seed.unique().map(sorted).to_dict()
    assert seeds == {
        (policy, arm): trained
        for policy, trained in (("tracelock", [0, 1]), ("outcome", [0]))
        for arm in ("validation", "test", "new sentences", "three events")
    }
    assert (out / "real_policies_dark.png").stat().st_size > 10_000
    before = (out / "costs.jsonl").read_bytes()
    learn()
    assert (out / "costs.jsonl").read_bytes() == before  # nothing is made again
    learn("--clock")
    clock = json.loads((out / "real_policies.json").read_text())["clock"]
    assert {one["batch"] for one in clock} == {1, 16, 64}
    assert {one["method"].partition("_")[0] for one in clock} >= {"tracelock", "outcome"}
    assert all(one["milliseconds"] > 0 for one in clock)
    learn("--model", "further")
    decoded = pq.read_table(out / "real_policies_further.parquet").to_pandas()
    assert set(decoded.arm) == set(frame.arm)


def follow_next_tokens(folder: Path) -> None:
    """The control's decoder says what transformers' greedy generation does."""
    backbone, tokenizer = load_backbone(folder), AutoTokenizer.from_pretrained(folder)
    prompt = "Ada has 3 pens."
    window = BlockWindow(1, origin="sequence")
    decoder = Decoder(policy=SequentialPolicy(), window=window, cache=BlockCache())
    found = generate(backbone, [prompt], decode=decoder, tokenizer=tokenizer, response_length=12)
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, is_causal=True)
    forbidden = list(backbone.spec.forbidden_ids)
    wanted = plain.generate(ids, max_new_tokens=12, do_sample=False, suppress_tokens=forbidden)
    ends = tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert found.texts[0] == ends
