import time

import pytest
import torch
from torch import Tensor

import lit_dlm
from lit_dlm.decoding import (
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    EntropyPolicy,
    FixedQuota,
    MarginPolicy,
    NoQuota,
    NotANumberError,
    RandomPolicy,
    Sampler,
    ScheduleQuota,
    SlidingWindow,
    StepRecord,
    ThresholdPolicy,
    prompt_canvas,
)
from tests.decoding.states import Recorder, as_rows_alone
from tests.fakes import EOS, MASK, TableBackbone, logits_for

THRESHOLD = {"policy": ThresholdPolicy(0.9), "quota": NoQuota()}


def _canvas(backbone: TableBackbone, length: int, *, rows: int = 1):
    return prompt_canvas(
        [[4, 4]] * rows, response_length=length, spec=backbone.spec, seeds=range(rows)
    )


def _table(tokens: list[int], probs: list[float]) -> TableBackbone:
    return TableBackbone(logits_for([4, 4, *tokens], [0.5, 0.5, *probs]))


def _hashed(ids: Tensor) -> Tensor:
    """Logits that depend on the visible tokens of the same row, so that order matters."""
    visible = (ids * (ids > 1) * torch.arange(1, ids.shape[1] + 1)).sum(1)
    positions = torch.arange(ids.shape[1])
    phase = visible[:, None, None] * 0.7 + positions[:, None] * 1.3 + torch.arange(12) * 2.1
    return 3.0 * torch.sin(phase)


def test_threshold_commits_top1_when_none_passes():
    """Step 0 commits cell 1 (0.95); then nothing passes and 0.6, 0.5, 0.4 go one by one."""
    backbone = _table([5, 6, 7, 5], [0.5, 0.95, 0.6, 0.4])
    recorder = Recorder()
    result = Decoder(**THRESHOLD)(backbone, _canvas(backbone, 4), [recorder])
    assert recorder.commits() == [[3], [4], [2], [5]]
    assert result.ids[0].tolist() == [4, 4, 5, 6, 7, 5]
    assert result.num_steps.tolist() == [4]
    assert result.stalled_steps.tolist() == [3]
    assert result.status == ["complete"]


def test_number_of_steps_is_the_number_of_forwards_of_that_row():
    """Row 0 has one mask left, row 1 has three: the batch runs three forwards, row 0 needs one."""
    backbone = _table([5, 6, 7], [0.5, 0.6, 0.7])
    canvas = _canvas(backbone, 3, rows=2)
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    ids[0, 2:4], editable[0, 2:4] = 5, False
    canvas = type(canvas)(ids=ids, editable=editable, seeds=canvas.seeds, start=2)
    result = Decoder(policy=ConfidencePolicy())(backbone, canvas)
    assert result.num_steps.tolist() == [1, 3]
    assert backbone.forwards == 3
    # The finished row has left the batch.
    assert [len(ids) for ids in backbone.canvases] == [2, 1, 1]


def test_cap_keeps_the_best_scored_commits():
    backbone = _table([5, 6, 7, 5], [0.92, 0.99, 0.95, 0.97])
    recorder = Recorder()
    result = Decoder(**THRESHOLD, settings=DecodeSettings(max_commits_per_step=2))(
        backbone, _canvas(backbone, 4), [recorder]
    )
    assert recorder.commits() == [[3, 5], [2, 4]]
    assert result.stalled_steps.tolist() == [0]


def test_end_of_text_gate_holds_back_end_of_text_until_nothing_else_is_proposed():
    backbone = _table([5, EOS, EOS, 6], [0.3, 0.99, 0.98, 0.2])
    gated, free = Recorder(), Recorder()
    for recorder, gate in ((gated, True), (free, False)):
        Decoder(policy=ConfidencePolicy(), settings=DecodeSettings(eos_gate=gate))(
            backbone, _canvas(backbone, 4), [recorder]
        )
    assert gated.commits() == [[2], [5], [3], [4]]
    assert free.commits() == [[3], [4], [2], [5]]


def test_the_stall_rule_does_not_open_the_gate():
    """All proposals are unsure: the best one is an end of text, but the gate keeps it out."""
    backbone = _table([5, EOS, 6], [0.3, 0.8, 0.2])
    recorder = Recorder()
    Decoder(**THRESHOLD, settings=DecodeSettings(eos_gate=True))(
        backbone, _canvas(backbone, 3), [recorder]
    )
    assert recorder.commits()[0] == [2]


@pytest.mark.parametrize(
    ("rule", "ids", "steps", "status"),
    [
        ("none", [5, EOS, 6, 7], 4, "complete"),
        ("stop", [5, EOS, MASK, MASK], 2, "eos"),
        ("fill", [5, EOS, EOS, EOS], 2, "complete"),
    ],
)
def test_end_of_text_rules(rule, ids, steps, status):
    """Order by confidence: cell 1 (end of text), cell 0, then the tail."""
    backbone = _table([5, EOS, 6, 7], [0.8, 0.9, 0.7, 0.6])
    result = Decoder(policy=ConfidencePolicy(), settings=DecodeSettings(eos_rule=rule))(
        backbone, _canvas(backbone, 4)
    )
    assert result.ids[0, 2:].tolist() == ids
    assert result.num_steps.tolist() == [steps]
    assert result.status == [status]


def test_an_end_of_text_behind_a_mask_does_not_end_the_answer():
    backbone = _table([5, 6, EOS, 7], [0.5, 0.6, 0.9, 0.7])
    recorder = Recorder()
    Decoder(policy=ConfidencePolicy(), settings=DecodeSettings(eos_rule="stop"))(
        backbone, _canvas(backbone, 4), [recorder]
    )
    # 4 (end of text), 5 (0.7), 3, then 2 closes the text: all four steps are needed.
    assert len(recorder.records) == 4


def test_idle_steps_are_counted_and_masks_stay_at_the_limit():
    backbone = _table([5, 6], [0.5, 0.6])
    result = Decoder(**THRESHOLD, settings=DecodeSettings(stall_rule="idle", max_steps=3))(
        backbone, _canvas(backbone, 2)
    )
    assert result.num_steps.tolist() == [3]
    assert result.idle_steps.tolist() == [3]
    assert result.stalled_steps.tolist() == [0]
    assert result.status == ["step_limit"]
    assert result.ids[0, 2:].tolist() == [MASK, MASK]


@pytest.mark.parametrize("window", [None, BlockWindow(3), SlidingWindow(4)])
@pytest.mark.parametrize(
    "plugs",
    [
        {"policy": RandomPolicy()},
        {"policy": EntropyPolicy(), "quota": FixedQuota(2)},
        {"policy": MarginPolicy(), "quota": ScheduleQuota(5)},
        {"policy": ConfidencePolicy(), "sampler": Sampler(temperature=1.0, top_p=0.9)},
        {"policy": ThresholdPolicy(0.5), "quota": NoQuota()},
    ],
    ids=["random", "entropy", "margin", "drawn", "threshold"],
)
def test_a_padded_batch_equals_its_rows_alone_and_observers_change_nothing(window, plugs):
    """The canvas depends on order, so any leak between rows or from padding would show."""
    prompts = [[4, 5, 6], [7], [8, 9], [3] * 5]

    def logits(ids: Tensor) -> Tensor:
        # Padding must not count: positions are taken from the first real token.
        pad = (ids == 1).sum(1)
        rolled = torch.stack([row.roll(-int(n)) for row, n in zip(ids, pad, strict=True)])
        table = _hashed(rolled * (rolled != 1))
        return torch.stack([t.roll(int(n), 0) for t, n in zip(table, pad, strict=True)])

    decoder, backbone = Decoder(window=window, **plugs), TableBackbone(logits, 12)
    result = as_rows_alone(decoder, backbone, prompts, 7)
    batch = prompt_canvas(prompts, response_length=7, spec=backbone.spec, seeds=range(11, 15))
    watched = decoder(backbone, batch, [Recorder("hidden", "region", "entropy")])
    assert torch.equal(result.ids, watched.ids)
    assert torch.equal(result.num_steps, watched.num_steps)


def test_records_chain_and_end_at_the_result():
    backbone = TableBackbone(_hashed, 12)
    recorder = Recorder()
    result = Decoder(policy=EntropyPolicy(), quota=FixedQuota(2))(
        backbone, _canvas(backbone, 5), [recorder]
    )
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
        return _hashed(ids)

    class SlowRecorder(Recorder):
        def on_step(self, record: StepRecord) -> None:
            now[0] += 100.0

    backbone = TableBackbone(forward, 12)
    result = Decoder(policy=EntropyPolicy())(backbone, _canvas(backbone, 5), [SlowRecorder()])
    assert result.seconds.tolist() == [5.0]


def test_a_mask_in_the_prompt_is_refused():
    backbone = _table([5], [0.9])
    canvas = prompt_canvas([[4, MASK]], response_length=1, spec=backbone.spec, seeds=[0])
    with pytest.raises(ValueError, match="row 0, column 1 holds the mask id"):
        Decoder(policy=ConfidencePolicy())(backbone, canvas)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_end_a_decode_and_its_row_is_named(bad: float):
    """From its second step on, in the row that has a 7 in its prompt."""

    def logits(ids: Tensor) -> Tensor:
        found = _hashed(ids)
        begun = (ids[:, 2:] != MASK).any(1) & (ids[:, 0] == 7)
        return torch.where(begun[:, None, None], torch.full_like(found, bad), found)

    backbone = TableBackbone(logits, vocab_size=12)
    canvas = prompt_canvas([[4, 4], [7, 4]], response_length=3, spec=backbone.spec, seeds=[0, 1])
    with pytest.raises(NotANumberError, match=r"not numbers at step 1 \(rows \[1\]") as error:
        Decoder(policy=ConfidencePolicy())(backbone, canvas)
    assert error.value.rows == [1]


def test_prompt_and_response_stay_within_the_positions_of_the_model():
    backbone = _table([5, 6], [0.9, 0.8])
    backbone.max_positions = 4
    lit_dlm.generate(backbone, [[4, 4]], response_length=2)
    for prompts, length in (([[4, 4]], 100_000), ([[4], [4, 4, 4]], 2)):
        with pytest.raises(ValueError, match=r"response_length: .* at most the 4 positions"):
            lit_dlm.generate(backbone, prompts, response_length=length)


def test_plugs_that_ask_for_different_hidden_layers_are_refused():
    backbone = _table([5], [0.9])
    one, two = Recorder("hidden"), Recorder("hidden", hidden_layers=(-2,))
    with pytest.raises(ValueError, match="hidden_layers"):
        Decoder(policy=ConfidencePolicy())(backbone, _canvas(backbone, 1), [one, two])


def test_idle_rule_needs_a_step_limit():
    with pytest.raises(ValueError, match="max_steps"):
        DecodeSettings(stall_rule="idle")
