"""Loops that are not ours, recorded: what they wrote, and whether it can be executed again."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.commands.traj import main as traj
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.tools.recorder import (
    TraceRecorder,
    dream_decoder,
    foreign_run,
    llada_decoder,
    record_generate,
)
from lit_dlm.trajectories.tools.verify import Execution, verify
from tests.traces import MASK, PAD, VOCAB, small_backbone
from tests.trajectories.decoded_sets import write_set
from tests.trajectories.samples import from_history

P, G = 4, 8
PROMPTS = torch.tensor([[PAD, 5, 6, 7], [12, 13, 14, 15]])
REAL = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
START = torch.cat([PROMPTS, torch.full((2, G), MASK)], dim=1)
SHOWN = {"prompt_ids": PROMPTS, "uids": ["a@loop", "b@loop"]}


class ReleasedModel(nn.Module):
    """The forward of a release around a backbone; Dream's rows predict the next column."""

    def __init__(self, backbone: HFBackbone, *, shift: int) -> None:
        super().__init__()
        self.backbone, self.shift = backbone, shift
        self.config = SimpleNamespace(vocab_size=VOCAB, mask_token_id=MASK)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        real = None if attention_mask is None else attention_mask.bool()
        logits = self.backbone.denoise(input_ids, pad_mask=real).logits
        if self.shift:
            logits = torch.cat([logits[:, 1:], logits[:, -1:]], dim=1)
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def backbone():
    return small_backbone()


def llada_loop(model: nn.Module, *, steps: int, block: int, cfg: bool = False) -> Tensor:
    """Equal counts in every block by probability, written in place, as LLaDA's repository does."""
    x, real = START.clone(), torch.cat([REAL, torch.ones(2, G, dtype=torch.long)], dim=1)
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


def dream_loop(model: nn.Module, *, steps: int, eps: float) -> Any:
    """Dream's truncated schedule by entropy; early steps commit nothing."""
    x, real = START.clone(), torch.cat([REAL, torch.ones(2, G, dtype=torch.long)], dim=1)
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


@pytest.mark.parametrize(
    ("loop", "steps", "block", "scale"),
    [
        (llada_loop, 8, 8, 1),
        (llada_loop, 8, 8, 20),  # so sure that probabilities tie at 1 in float32
        (llada_loop, 4, 4, 1),
        (llada_loop, 6, 8, 1),
        (dream_loop, 10, None, 1),
    ],
)
def test_a_plain_loop_is_recorded_and_executed_again(backbone, tmp_path, loop, steps, block, scale):
    """Dream's ten steps for eight cells: some commit nothing, and each is a step of the record."""
    backbone = deepcopy(backbone)
    with torch.no_grad():
        backbone.model.lm_head.weight *= scale
    model = ReleasedModel(backbone, shift=int(loop is dream_loop))
    if loop is dream_loop:
        run = partial(loop, model, steps=steps, eps=1e-3)
        decoder = dream_decoder(steps=steps, alg="entropy")
    else:
        run = partial(loop, model, steps=steps, block=block)
        decoder = llada_decoder(steps=steps, gen_length=G, block_length=block)
    history: list[Tensor] = []  # the input of every forward and the result, kept by hand
    handle = model.register_forward_pre_hook(lambda _, args: history.append(args[0].clone()))
    final = run()
    handle.remove()
    history.append(getattr(final, "sequences", final))
    result, records = record_generate(
        model, run, attention_mask=REAL, metas=[{"method": "loop"}] * 2, **SHOWN
    )
    assert torch.equal(getattr(result, "sequences", result), history[-1])
    for row, record in enumerate(records):
        canvases = torch.stack([canvas[row, P:] for canvas in history])
        expected = from_history(
            canvases[: record.num_steps + 1].numpy(),
            prompt_ids=PROMPTS[row][REAL[row].bool()],
            mask_id=MASK,
            vocab_size=VOCAB,
        )
        assert record.digest() == expected.digest()
        assert (canvases[record.num_steps :] == canvases[-1]).all()
        assert (record.num_steps, record.status, record.signals) == (steps, "complete", {})
    empty = [step for step in range(steps) if len(records[0].committed_at(step)) == 0]
    assert bool(empty) == (loop is dream_loop)
    folder = write_set(tmp_path / "set", records, foreign_run("loop", decoder))
    for level in (3, 4):
        found = verify(shards_in(folder), level=level, execution=Execution(backbone=backbone))
        assert (found.problems, found.differences) == ([], [])
        assert found.counts == {"exact": 2, "explained": 0, "failed": 0}


def test_guided_loops_show_their_canvas_in_the_first_half_of_the_rows(backbone):
    model = ReleasedModel(backbone, shift=0)
    plain = llada_loop(model, steps=8, block=8)
    result, records = record_generate(
        model, lambda: (llada_loop(model, steps=8, block=8, cfg=True), "more"), **SHOWN
    )
    assert result[1] == "more"
    assert [record.tokens.tolist() for record in records] == plain[:, P:].tolist()
    assert [record.num_steps for record in records] == [8, 8]


LLADA = {"steps": 8, "gen_length": 8, "block_length": 8}


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (llada_decoder(**LLADA, temperature=0.5), "draws from torch"),
        (llada_decoder(**LLADA, cfg_scale=1.0), "two forwards"),
        (llada_decoder(**LLADA, remasking="x"), "'x' is unknown"),
        (llada_decoder(**{**LLADA, "steps": 16}), "commit nothing in a full block"),
        (dream_decoder(steps=8), "draws from torch"),
        (dream_decoder(steps=8, alg="entropy", alg_temp=0.1), "draws from torch"),
        (dream_decoder(steps=8, alg="beam"), "'beam' is unknown"),
    ],
)
def test_a_loop_that_no_decoder_follows_has_a_reason(decoder, reason):
    """The example of the documentation shows that verification reports it."""
    assert reason in decoder


def test_a_loop_that_hides_its_canvas_is_refused_with_the_way_out(backbone):
    model = ReleasedModel(backbone, shift=0)
    whole = r"forward 1 .* expected the whole canvas \(2, 12\).*let it call TraceRecorder"
    for shown, message in (
        ([START, START[:, P:]], whole),
        ([START + 1], r"forward 0 .* begin with the 4 columns of prompt_ids"),
        ([], "it never called the forward of ReleasedModel"),
    ):
        with pytest.raises(ValueError, match=message):
            record_generate(model, lambda shown=shown: [model(ids) for ids in shown], **SHOWN)
        assert not model._forward_pre_hooks


def test_any_loop_can_show_its_canvases():
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
    assert open_row.given.tolist() == [False, True, False]
    assert (full_row.num_steps, full_row.status, full_row.seed) == (1, "complete", 2**62)
    assert full_row.commit_step.tolist() == [0, -1, -1]
    for record in (open_row, full_row):
        record.validate()


def test_a_loop_without_a_canvas_tells_what_it_writes():
    """Two rows of three cells: one writes, takes back and writes; the other fills two at once."""
    recorder = TraceRecorder(mask_id=MASK, vocab_size=VOCAB)
    prompts = torch.tensor([[5, 6], [PAD, 7]])
    recorder.begin(prompts, length=3, pad_mask=prompts != PAD)
    recorder.write([[2, 3], [4, 2]], [[8, 9], [10, 11]])
    recorder.write([[2], [-1]], [[MASK], [0]])
    recorder.write([[2, 4], [3, -1]], [[12, 13], [14, 0]])
    one, two = recorder.end(["a", "b"])
    assert one.all_states().tolist() == [[MASK] * 3, [8, 9, MASK], [MASK, 9, MASK], [12, 9, 13]]
    assert two.all_states().tolist() == [[MASK] * 3, [11, MASK, 10], [11, MASK, 10], [11, 14, 10]]
    assert (one.prompt_ids.tolist(), two.prompt_ids.tolist()) == ([5, 6], [7])
    # A single row needs no second dimension.
    recorder.begin(prompts[:1], length=3)
    recorder.write(np.array([4, 2]), np.array([10, 11]))
    recorder.write(torch.tensor([3]), torch.tensor([14]))
    states = recorder.end(["c"])[0].all_states()
    assert states.tolist() == [[MASK] * 3, [11, MASK, 10], [11, 14, 10]]


def test_misuse_of_a_recorder_is_named():
    ids = torch.tensor([[7, MASK, MASK]])
    recorder = TraceRecorder(mask_id=MASK, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="expected the whole canvas a call of begin"):
        recorder.step(ids)
    for start, message in (
        (3, r"expected ids of shape \(B, L\)"),
        (2, "no mask id .* before start"),
    ):
        with pytest.raises(ValueError, match=message):
            recorder.begin(ids, start=start)
    with pytest.raises(ValueError, match="expected a call of begin before write"):
        recorder.write([1], [5])
    recorder.begin(ids, start=1)
    for columns, tokens in (([3], [5]), ([-2], [5]), ([1], [5, 6]), ([[1], [1]], [[5], [5]])):
        with pytest.raises(ValueError, match=r"expected columns below 3 .* 1 rows of each"):
            recorder.write(columns, tokens)
    with pytest.raises(ValueError, match=r"expected the whole canvas \(1, 3\)"):
        recorder.step(ids[:, 1:])
    recorder.step(ids + 1)
    with pytest.raises(ValueError, match="the loop changed a prompt"):
        recorder.end(["a"])


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[3] / "docs" / "reference" / "trajectory_format.md").read_text()
    code = text.partition("## 9.")[2].partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/reference/trajectory_format.md", "exec"), {})
    assert traj(["inspect", "runs/mine"]) == 0
    text = capsys.readouterr().out
    assert "it writes from left to right in plain Python" in text
    assert traj(["verify", "runs/mine"]) == 0
    assert traj(["verify", "runs/mine", "--level", "3", "--backbone", "tiny"]) == 2
    assert ": it writes from left to right" in capsys.readouterr().err
