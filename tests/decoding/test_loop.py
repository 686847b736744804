import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lit_dlm
import lit_dlm.decoding as d
from lit_dlm.decoding import Decoder
from tests.decoding.models import hashed, table_backbone
from tests.decoding.states import Recorder, decoded
from tests.fakes import EOS, MASK, TableBackbone

PROMPT = [[4, 4]]
SURE = {"policy": d.ConfidencePolicy()}
THRESHOLD = {"policy": d.ThresholdPolicy(0.9), "quota": d.NoQuota()}

RULES = {
    # Cell 1 reaches 0.9; then nothing does, and 0.6, 0.5, 0.4 go one by one.
    "the best one where none passes": (
        ([5, 6, 7, 5], [0.5, 0.95, 0.6, 0.4], THRESHOLD, {}),
        ([[1], [2], [0], [3]], [5, 6, 7, 5], 3, 0, "complete"),
    ),
    "a cap keeps the best scored": (
        ([5, 6, 7, 5], [0.92, 0.99, 0.95, 0.97], THRESHOLD, {"max_commits_per_step": 2}),
        ([[1, 3], [0, 2]], [5, 6, 7, 5], 0, 0, "complete"),
    ),
    "a gate holds the end back until nothing else is proposed": (
        ([5, EOS, EOS, 6], [0.3, 0.99, 0.98, 0.2], SURE, {"eos_gate": True}),
        ([[0], [3], [1], [2]], [5, EOS, EOS, 6], 0, 0, "complete"),
    ),
    # All are unsure: the best one is an end of text, but the gate keeps it out.
    "the stall rule does not open the gate": (
        ([5, EOS, 6], [0.3, 0.8, 0.2], THRESHOLD, {"eos_gate": True}),
        ([[0], [2], [1]], [5, EOS, 6], 3, 0, "complete"),
    ),
    # Order by confidence: cell 1 (end of text), cell 0, then the tail.
    "the end of text has no rule": (
        ([5, EOS, 6, 7], [0.8, 0.9, 0.7, 0.6], SURE, {"eos_rule": "none"}),
        ([[1], [0], [2], [3]], [5, EOS, 6, 7], 0, 0, "complete"),
    ),
    "the end of text stops": (
        ([5, EOS, 6, 7], [0.8, 0.9, 0.7, 0.6], SURE, {"eos_rule": "stop"}),
        ([[1], [0]], [5, EOS, MASK, MASK], 0, 0, "eos"),
    ),
    "the end of text fills": (
        ([5, EOS, 6, 7], [0.8, 0.9, 0.7, 0.6], SURE, {"eos_rule": "fill"}),
        ([[1], [0]], [5, EOS, EOS, EOS], 0, 0, "complete"),
    ),
    "an end of text behind a mask does not end the answer": (
        ([5, 6, EOS, 7], [0.5, 0.6, 0.9, 0.7], SURE, {"eos_rule": "stop"}),
        ([[2], [3], [1], [0]], [5, 6, EOS, 7], 0, 0, "complete"),
    ),
    "idle steps are counted and masks stay at the limit": (
        ([5, 6], [0.5, 0.6], THRESHOLD, {"stall_rule": "idle", "max_steps": 3}),
        ([[], [], []], [MASK, MASK], 0, 3, "step_limit"),
    ),
}
"""Tokens and probabilities of the cells, components, settings; what each step commits; the end."""


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_loop_by_hand(rule: str):
    (tokens, probs, components, settings), (commits, ids, stalled, idle, status) = RULES[rule]
    recorder = Recorder()
    decoder = Decoder(**components, settings=d.DecodeSettings(**settings))
    result = decoded(decoder, table_backbone(tokens, probs), PROMPT, len(tokens), recorder)
    assert recorder.commits() == [[2 + cell for cell in cells] for cells in commits]
    assert result.ids[0].tolist() == [4, 4, *ids]
    assert result.num_steps.tolist() == [len(commits)]
    assert (result.stalled_steps.tolist(), result.idle_steps.tolist()) == ([stalled], [idle])
    assert result.status == [status]


@pytest.mark.parametrize("eos_rule", ["fill", "stop"])
def test_only_an_end_of_text_behind_the_given_cells_ends_an_answer(eos_rule: str):
    """The second gap is decoded although the first one ends; in it, the rule holds."""
    ids = torch.tensor([[4, MASK, MASK, 7, MASK, MASK, MASK]])
    canvas = d.Canvas(
        ids=ids, editable=ids == MASK, seeds=torch.zeros(1, dtype=torch.long), start=1
    )
    backbone = table_backbone([5, EOS, 5, 6, EOS, 5], [0.8, 0.9, 0.5, 0.6, 0.7, 0.5], prompt=1)
    result = d.decode(
        backbone, Decoder(**SURE, settings=d.DecodeSettings(eos_rule=eos_rule)), canvas
    )
    assert result.ids[0].tolist() == [4, 5, EOS, 7, 6, EOS, EOS if eos_rule == "fill" else MASK]
    assert result.num_steps.tolist() == [4]


def test_number_of_steps_is_the_number_of_forwards_of_that_row():
    """Row 0 has one mask left, row 1 has three: the batch runs three forwards, row 0 needs one."""
    backbone = table_backbone([5, 6, 7], [0.5, 0.6, 0.7])
    canvas = d.prompt_canvas(PROMPT * 2, response_length=3, spec=backbone.spec, seeds=[0, 1])
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    ids[0, 2:4], editable[0, 2:4] = 5, False
    result = d.decode(backbone, Decoder(**SURE), replace(canvas, ids=ids, editable=editable))
    assert result.num_steps.tolist() == [1, 3]
    # The finished row has left the batch.
    assert [len(ids) for ids in backbone.canvases] == [2, 1, 1]


def test_records_chain_and_end_at_the_result():
    recorder = Recorder()
    decoder = Decoder(policy=d.EntropyPolicy(), quota=d.FixedQuota(2))
    result = decoded(decoder, TableBackbone(hashed, 12), PROMPT, 5, recorder)
    assert recorder.started is not None
    canvas = recorder.started.ids
    for record in recorder.records:
        assert torch.equal(record.state.ids, canvas)
        changed = record.new_ids != canvas
        assert torch.equal(changed, record.commit)
        assert not (record.commit & ~record.candidates).any()
        canvas = record.new_ids
    assert torch.equal(canvas, result.ids)
    assert recorder.result is result


def test_time_of_observers_is_not_part_of_a_decode(monkeypatch: pytest.MonkeyPatch):
    """Five forwards of one second for one row; looking on takes a hundred seconds a step."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def forward(ids: Tensor) -> Tensor:
        now[0] += 1.0
        return hashed(ids)

    class SlowRecorder(Recorder):
        def on_step(self, record: d.StepRecord) -> None:
            now[0] += 100.0

    decoder = Decoder(policy=d.EntropyPolicy())
    result = decoded(decoder, TableBackbone(forward, 12), PROMPT, 5, SlowRecorder())
    assert result.seconds.tolist() == [5.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_end_a_decode_and_its_row_is_named(bad: float):
    """From its second step on, in the row that has a 7 in its prompt."""

    def logits(ids: Tensor) -> Tensor:
        found = hashed(ids)
        begun = (ids[:, 2:] != MASK).any(1) & (ids[:, 0] == 7)
        return torch.where(begun[:, None, None], torch.full_like(found, bad), found)

    backbone = TableBackbone(logits, vocab_size=12)
    with pytest.raises(d.NotANumberError, match=r"not numbers at step 1 \(rows \[1\]") as error:
        decoded(Decoder(**SURE), backbone, [[4, 4], [7, 4]], 3)
    assert error.value.rows == [1]


def test_prompt_and_response_stay_within_the_positions_of_the_model():
    backbone = table_backbone([5, 6], [0.9, 0.8])
    backbone.max_positions = 4
    lit_dlm.generate(backbone, PROMPT, response_length=2)
    for prompts, length, told in ((PROMPT, 5_000, "0 has 2"), ([[4], [4, 4, 4]], 2, "1 has 3")):
        told = rf"^response_length: prompt {told} \+ {length} .* at most the 4 positions"
        with pytest.raises(ValueError, match=told):
            lit_dlm.generate(backbone, prompts, response_length=length)


def test_what_cannot_be_decoded_is_refused():
    backbone, decoder = table_backbone([5], [0.9]), Decoder(**SURE)
    with pytest.raises(ValueError, match="row 0, column 1 holds the mask id"):
        decoded(decoder, backbone, [[4, MASK]], 1)
    blocks = {"window": d.BlockWindow(2), "quota": d.ScheduleQuota(4)}
    with pytest.raises(ValueError, match=r"quota: ScheduleQuota .* steps_per_block, got steps"):
        decoded(Decoder(**SURE | blocks), backbone, PROMPT, 4)
    for quota, window in (
        (d.EvenQuota(4), d.SlidingWindow(2)),
        (d.BudgetQuota(4), d.SlidingWindow(2)),
        (d.CosineQuota(4), d.SlidingWindow(2)),
        (d.CosineQuota(4), d.BlockWindow(2)),
    ):
        unkept = Decoder(**SURE | {"window": window, "quota": quota})
        with pytest.raises(
            ValueError, match=f"window: .* steps of {type(quota).__name__}, such as"
        ):
            decoded(unkept, backbone, PROMPT, 4)
    far = Decoder(**SURE, sampler=d.Sampler(allowed_ids=(5, 99)))
    with pytest.raises(ValueError, match=r"sampler\.allowed_ids: .* got \(5, 99\)"):
        decoded(far, backbone, PROMPT, 1)
    one, two = Recorder("hidden"), Recorder("hidden", hidden_layers=(-2,))
    with pytest.raises(ValueError, match="hidden_layers"):
        decoded(decoder, backbone, PROMPT, 1, one, two)
    with pytest.raises(ValueError, match="max_steps"):
        d.DecodeSettings(stall_rule="idle")
