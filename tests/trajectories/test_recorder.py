"""Loops that are not ours, recorded: what they wrote, and whether it can be executed again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.commands import main as traj
from lit_dlm.trajectories.recorder import (
    TraceRecorder,
    dream_decoder,
    foreign_run,
    llada_decoder,
    record_generate,
)
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.verify import Execution, verify
from tests.traces import MASK, PAD, VOCAB, small_backbone
from tests.trajectories.decoded_sets import write_set
from tests.trajectories.samples import from_history

P, G = 4, 8
PROMPTS = torch.tensor([[PAD, 5, 6, 7], [12, 13, 14, 15]])
REAL = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
UIDS = ["a@loop", "b@loop"]
METAS = [{"method": "loop"}] * 2


class ReleasedModel(nn.Module):
    """The forward of a release around a backbone; Dream's rows predict the next column."""

    def __init__(self, backbone: HFBackbone, *, shift: int) -> None:
        super().__init__()
        self.backbone, self.shift = backbone, shift
        model_type = "Dream" if shift else "llada"
        self.config = SimpleNamespace(model_type=model_type, vocab_size=VOCAB, mask_token_id=MASK)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        real = None if attention_mask is None else attention_mask.bool()
        logits = self.backbone.denoise(input_ids, pad_mask=real).logits
        if self.shift:
            logits = torch.cat([logits[:, 1:], logits[:, -1:]], dim=1)
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def backbone() -> HFBackbone:
    return small_backbone()


def llada_loop(
    model: nn.Module, prompt: Tensor, real: Tensor, *, steps: int, block: int, cfg: bool = False
) -> Tensor:
    """Equal counts in every block by probability, written in place, as LLaDA's repository does."""
    x = torch.full((len(prompt), P + G), MASK)
    x[:, :P] = prompt
    real = torch.cat([real, torch.ones(len(prompt), G, dtype=torch.long)], dim=1)
    per_block = steps * block // G
    for first in range(P, P + G, block):
        for i in range(per_block):
            if cfg:
                model(torch.cat([x, x.masked_fill(x != MASK, MASK)]), torch.cat([real, real]))
            logits = (model if not cfg else model.forward)(x, real).logits  # type: ignore[operator]
            prob, ids = logits.double().softmax(-1).max(-1)
            prob[:, first + block :] = -torch.inf
            prob[x != MASK] = -torch.inf
            count = block // per_block + (i < block % per_block)
            chosen = prob.topk(count, dim=1).indices
            x.scatter_(1, chosen, ids.gather(1, chosen))
    return x


def dream_loop(model: nn.Module, prompt: Tensor, real: Tensor, *, steps: int, eps: float) -> Any:
    """Dream's truncated schedule by entropy; early steps commit nothing."""
    x = torch.cat([prompt, torch.full((len(prompt), G), MASK)], dim=1)
    real = torch.cat([real, torch.ones(len(prompt), G, dtype=torch.long)], dim=1)
    times = torch.linspace(1, eps, steps + 1)
    for i in range(steps):
        logits = model(x, real).logits
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        log_probs = logits.log_softmax(-1)
        score = (log_probs.exp() * log_probs.clamp_min(-1e9)).sum(-1)
        score[x != MASK] = -torch.inf
        num_masks = int((x == MASK).sum() // len(x))
        count = int(num_masks * (1 - times[i + 1] / times[i])) if i < steps - 1 else num_masks
        if count:
            chosen = score.topk(count, dim=1).indices
            x = x.clone()
            x[torch.arange(len(x))[:, None], chosen] = logits.argmax(-1).gather(1, chosen)
    return SimpleNamespace(sequences=x)


def history_of(model: nn.Module, run: Any) -> list[Tensor]:
    """The input of every forward and the result, kept by hand."""
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    result = run()
    handle.remove()
    return [*seen, getattr(result, "sequences", result)]


def check_against_history(records: list[Trajectory], history: list[Tensor]) -> None:
    for row, record in enumerate(records):
        canvases = torch.stack([canvas[row, P:] for canvas in history])
        expected = from_history(
            canvases[: record.num_steps + 1].numpy(),
            uid=record.uid,
            prompt_ids=PROMPTS[row][REAL[row].bool()],
            mask_id=MASK,
            vocab_size=VOCAB,
        )
        assert record.digest() == expected.digest()
        assert (canvases[record.num_steps :] == canvases[-1]).all()


@pytest.mark.parametrize(("steps", "block"), [(8, 8), (4, 4), (6, 8)])
def test_a_plain_llada_loop_is_recorded_and_executed_again(
    backbone: HFBackbone, tmp_path: Path, steps: int, block: int
) -> None:
    model = ReleasedModel(backbone, shift=0)

    def run() -> Tensor:
        return llada_loop(model, PROMPTS, REAL, steps=steps, block=block)

    history = history_of(model, run)
    result, records = record_generate(
        model, run, prompt_ids=PROMPTS, attention_mask=REAL, uids=UIDS, metas=METAS
    )
    assert torch.equal(result, history[-1])
    check_against_history(records, history)
    assert [record.num_steps for record in records] == [steps, steps]
    assert [record.status for record in records] == ["complete"] * 2
    assert records[0].signals == {}
    decoder = llada_decoder(steps=steps, gen_length=G, block_length=block)
    folder = write_set(tmp_path / "set", records, foreign_run("loop", decoder, batch_size=2))
    for level in (3, 4):
        found = verify(shards_in(folder), level=level, execution=Execution(backbone=backbone))
        assert (found.problems, found.differences) == ([], [])
        assert found.counts == {"exact": 2, "explained": 0, "failed": 0}


def test_a_plain_dream_loop_is_recorded_and_executed_again(
    backbone: HFBackbone, tmp_path: Path
) -> None:
    """Ten steps for eight cells: some commit nothing, and each is a step of the record."""
    model = ReleasedModel(backbone, shift=1)

    def run() -> Any:
        return dream_loop(model, PROMPTS, REAL, steps=10, eps=1e-3)

    history = history_of(model, run)
    result, records = record_generate(
        model, run, prompt_ids=PROMPTS, attention_mask=REAL, uids=UIDS, metas=METAS
    )
    assert torch.equal(result.sequences, history[-1])
    check_against_history(records, history)
    assert any(len(records[0].committed_at(step)) == 0 for step in range(records[0].num_steps))
    decoder = dream_decoder(steps=10, alg="entropy")
    folder = write_set(tmp_path / "set", records, foreign_run("loop", decoder, batch_size=2))
    found = verify(shards_in(folder), level=3, execution=Execution(backbone=backbone))
    assert found.counts == {"exact": 2, "explained": 0, "failed": 0}


def test_guided_loops_show_their_canvas_in_the_first_half_of_the_rows(
    backbone: HFBackbone,
) -> None:
    model = ReleasedModel(backbone, shift=0)
    plain = llada_loop(model, PROMPTS, REAL, steps=8, block=8)
    result, records = record_generate(
        model,
        lambda: (llada_loop(model, PROMPTS, REAL, steps=8, block=8, cfg=True), "more"),
        prompt_ids=PROMPTS,
        attention_mask=REAL,
        uids=UIDS,
    )
    assert result[1] == "more"
    assert [record.tokens.tolist() for record in records] == plain[:, P:].tolist()
    assert [record.num_steps for record in records] == [8, 8]


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (llada_decoder(steps=8, gen_length=8, block_length=8, temperature=0.5), "draws from torch"),
        (llada_decoder(steps=8, gen_length=8, block_length=8, cfg_scale=1.0), "two forwards"),
        (llada_decoder(steps=8, gen_length=8, block_length=8, remasking="x"), "'x' is unknown"),
        (llada_decoder(steps=16, gen_length=8, block_length=8), "commit nothing in a full block"),
        (dream_decoder(steps=8), "draws from torch"),
        (dream_decoder(steps=8, alg="entropy", alg_temp=0.1), "draws from torch"),
        (dream_decoder(steps=8, alg="beam"), "'beam' is unknown"),
    ],
)
def test_a_loop_without_a_description_is_verified_up_to_level_2(
    backbone: HFBackbone, tmp_path: Path, decoder: Any, reason: str
) -> None:
    record = from_history(
        [[MASK, MASK], [5, 6]],
        uid="a@loop",
        prompt_ids=[7],
        mask_id=MASK,
        vocab_size=VOCAB,
        meta={"method": "loop"},
    )
    folder = write_set(tmp_path / "set", [record], foreign_run("loop", decoder))
    assert not verify(shards_in(folder), level=2).failed
    with pytest.raises(ValueError, match=f"'loop': cannot be executed again.*: .*{reason}"):
        verify(shards_in(folder), level=3, execution=Execution(backbone=backbone))


def test_a_loop_that_hides_its_canvas_is_refused_with_the_way_out(backbone: HFBackbone) -> None:
    model = ReleasedModel(backbone, shift=0)
    canvas = torch.cat([PROMPTS, torch.full((2, G), MASK)], dim=1)

    def cached() -> Tensor:
        model(canvas)
        model(canvas[:, P:])
        return canvas

    def other() -> Tensor:
        model(canvas + 1)
        return canvas

    def nothing() -> Tensor:
        return canvas

    for run, message in (
        (cached, r"forward 1 .* expected the whole canvas \(2, 12\).*let it call TraceRecorder"),
        (other, r"forward 0 .* begin with the 4 columns of prompt_ids"),
        (nothing, "it never called the forward of ReleasedModel"),
    ):
        with pytest.raises(ValueError, match=message):
            record_generate(model, run, prompt_ids=PROMPTS, uids=UIDS)
    assert not model._forward_pre_hooks


def test_any_loop_can_show_its_canvases() -> None:
    """One row: cell 1 is given, cell 0 is written, masked again and written, and cell 2 stays.

    The canvas is written in place, and the two steps after the last change count for the row, since
    cell 2 is open; those of a second, full row do not.
    """
    recorder = TraceRecorder(mask_id=MASK, vocab_size=VOCAB)
    canvas = torch.tensor([[PAD, 7, MASK, 6, MASK], [8, 9, MASK, 6, 5]])
    recorder.begin(canvas, start=2, pad_mask=canvas[:, :2] != PAD, seeds=[3, 2**62])
    for first in (5, MASK, 8, 8, 8):
        canvas[0, 2] = first
        canvas[1, 2] = 10
        recorder.step(canvas)
    open_row, full_row = recorder.end(["a", "b"], [{"method": "m"}, {}])
    assert open_row.all_states()[:, 0].tolist() == [MASK, 5, MASK, 8, 8, 8]
    assert open_row.prompt_ids.tolist() == [7]
    assert (open_row.num_steps, open_row.status, open_row.seed) == (5, "step_limit", 3)
    assert open_row.given is not None
    assert open_row.given.tolist() == [False, True, False]
    assert (full_row.num_steps, full_row.status, full_row.seed) == (1, "complete", 2**62)
    assert full_row.commit_step.tolist() == [0, -1, -1]
    for record in (open_row, full_row):
        record.validate()


def test_misuse_of_a_recorder_is_named() -> None:
    canvas = torch.tensor([[7, MASK, MASK]])
    for message, misuse in {
        "expected the whole canvas a call of begin": lambda r: r.step(canvas),
        r"expected ids of shape \(B, L\)": lambda r: r.begin(canvas, start=3),
        "no mask id .* before start": lambda r: r.begin(canvas, start=2),
        r"expected the whole canvas \(1, 3\)": lambda r: (
            r.begin(canvas, start=1),
            r.step(canvas[:, 1:]),
        ),
        "the loop changed a prompt": lambda r: (
            r.begin(canvas, start=1),
            r.step(canvas + 1),
            r.end(["a"]),
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            misuse(TraceRecorder(mask_id=MASK, vocab_size=VOCAB))


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trajectory_format.md").read_text()
    code = text.partition("## 9.")[2].partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/trajectory_format.md", "exec"), {})
    assert traj(["inspect", "runs/mine"]) == 0
    text = capsys.readouterr().out
    assert "it writes from left to right in plain Python" in text
    assert traj(["verify", "runs/mine"]) == 0
    assert traj(["verify", "runs/mine", "--level", "3", "--backbone", "tiny"]) == 2
    assert ": it writes from left to right" in capsys.readouterr().err
