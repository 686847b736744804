import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_dlm import decoding
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, decode, prompt_canvas
from lit_dlm.decoding.api import DecodePrompt, WorkQueue, decode_stream
from lit_dlm.trajectories import Trajectory, capture as capture_module
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, TrajectoryCapture
from lit_dlm.trajectories.format import decode_block
from lit_dlm.trajectories.members import decode_members, encode_members
from tests.fakes import EOS, MASK, PAD, TableBackbone, fake_spec
from tests.trajectories.samples import assert_all_same, assert_same, from_history

VOCAB, G = 12, 10
PROMPTS = [[3], [4, 5, 6], [7, 8], [5, 5, 5], [9], [3, 9, 4], [6, 7], [8]]
SEEDS = [11 * i + 1 for i in range(8)]
_TABLES = torch.randn(2, 20, VOCAB, generator=torch.Generator().manual_seed(0))


def logits(ids: Tensor) -> Tensor:
    """Depends on the canvas, and on columns counted from the right, so padding changes nothing."""
    tables = 2.0 * _TABLES[:, -ids.shape[1] :]
    weights = torch.arange(ids.shape[1], 0, -1)
    mood = torch.sin(((ids - PAD) * weights).sum(1).double()).float()
    return tables[0] + mood[:, None, None] * tables[1]


class Watcher:
    """The slow reference: keeps every canvas of every row."""

    requires = frozenset()

    def on_start(self, state: decoding.DecodeState) -> None:
        self.histories = {int(r): [state.ids[i, -G:].clone()] for i, r in enumerate(state.rows)}
        self.records: list[decoding.StepRecord] = []

    def on_step(self, record: decoding.StepRecord) -> None:
        self.records.append(record)
        for i, row in enumerate(record.state.rows.tolist()):
            self.histories[row].append(record.new_ids[i, -G:].clone())

    def on_end(self, result: decoding.DecodeResult) -> None:
        """Nothing to finish."""


def run(decoder: Decoder, observers, prompts=PROMPTS, seeds=SEEDS) -> decoding.DecodeResult:
    canvas = prompt_canvas(prompts, response_length=G, spec=fake_spec(), seeds=seeds)
    return decode(TableBackbone(logits, VOCAB), decoder, canvas, observers)


_THRESHOLD = {"policy": decoding.ThresholdPolicy(0.5), "quota": NoQuota()}
DECODERS = {
    "one": Decoder(policy=decoding.ConfidencePolicy()),
    "threshold": Decoder(**_THRESHOLD),
    "blocks": Decoder(
        policy=decoding.RandomPolicy(), window=decoding.BlockWindow(5), quota=decoding.FixedQuota(2)
    ),
    "warm": Decoder(**_THRESHOLD, sampler=decoding.Sampler(temperature=1.0)),
    "stop": Decoder(**_THRESHOLD, settings=DecodeSettings(eos_rule="stop")),
    "fill": Decoder(**_THRESHOLD, settings=DecodeSettings(eos_rule="fill")),
    "limit": Decoder(policy=decoding.ConfidencePolicy(), settings=DecodeSettings(max_steps=4)),
}


def feature_function(hidden: Tensor, prob: Tensor, *, entropy: Tensor) -> Tensor:
    return torch.cat([hidden.flatten(2), prob[..., None], entropy[..., None]], dim=-1)


def observer(level: str = "tokens", **changes) -> TrajectoryCapture:
    """A capture; ``changes`` are those of the features."""
    settings = {
        "function": feature_function,
        "hidden_layers": (-2, -1),
        "groups": (4, 4, 1, 1),
        "projector_digest": "digest",
        "steps": partial(KeptSteps, ratio=0.5),
        "scores": frozenset({"entropy"}),
    }
    if level == "logits":
        bare = {"function": None, "hidden_layers": (), "groups": (VOCAB,), "layout": "logits"}
        settings |= bare
    kept = level in ("features", "logits")
    features = FeatureCapture(**settings | changes) if kept else None
    return TrajectoryCapture(vocab_size=VOCAB, level=level, features=features)


def captured(name, level="tokens", *, prompts=PROMPTS, seeds=SEEDS, **changes) -> list[Trajectory]:
    capture = observer(level, **changes)
    run(DECODERS[name], [capture], prompts, seeds)
    return capture.trajectories([f"u{i}" for i in seeds])


def test_records_equal_what_a_slow_watcher_saw():
    ends = {}
    for name, decoder in DECODERS.items():
        watcher, capture = Watcher(), observer()
        result = run(decoder, [watcher, capture])
        records = capture.trajectories([f"u{i}" for i in range(8)], [{"row": i} for i in range(8)])
        for row, record in enumerate(records):
            expected = from_history(
                torch.stack(watcher.histories[row]).numpy(),
                uid=f"u{row}",
                prompt_ids=PROMPTS[row],
                mask_id=MASK,
                vocab_size=VOCAB,
                seed=SEEDS[row],
                status=result.status[row],
                meta={"row": row},
            )
            assert_same(record, expected)
            assert record.num_steps == int(result.num_steps[row])
            np.testing.assert_array_equal(record.tokens, result.ids[row, -G:].numpy())
        assert_all_same(records, decode_block(encode_members(records)[0]))
        ends[name] = records
    # The cases do cover rows that leave early, stops, fills and limits.
    assert len({record.num_steps for record in ends["threshold"]}) > 1
    assert "eos" in {record.status for record in ends["stop"]}
    assert any((record.tokens == EOS).sum() > 1 for record in ends["fill"])
    assert {record.status for record in ends["limit"]} == {"step_limit"}


@pytest.mark.parametrize("level", ["tokens", "signals", "features", "logits"])
def test_neither_capture_nor_the_batch_changes_a_record(level):
    capture = observer(level)
    plain, watched = run(DECODERS["warm"], []), run(DECODERS["warm"], [capture])
    assert torch.equal(plain.ids, watched.ids)
    assert torch.equal(plain.num_steps, watched.num_steps)
    for row, record in enumerate(capture.trajectories([f"u{seed}" for seed in SEEDS])):
        one = slice(row, row + 1)
        (alone,) = captured("warm", level, prompts=PROMPTS[one], seeds=SEEDS[one])
        assert_same(record, alone)


def test_signals_are_the_proposals_at_masked_positions():
    """Region proposals: for each (step, masked position) what the watcher saw there."""
    watcher, capture = Watcher(), observer("signals")
    run(DECODERS["threshold"], [watcher, capture])
    records = capture.trajectories([f"u{i}" for i in range(8)])
    for row, record in enumerate(records):
        record.validate()
        signals = record.signals
        for k, (step, position) in enumerate(record.masked_rows()):
            seen = watcher.records[step]
            slot = seen.state.rows.tolist().index(row)
            column = seen.state.start + position
            assert signals["step_proposal"][k] == seen.proposal.ids[slot, column]
            prob = seen.proposal.prob[slot, column].half().item()
            assert signals["step_prob"][k] == prob
            if record.commit_step[position] == step:
                assert signals["commit_prob"][position] == prob
        assert (signals["step_entropy"] > 0).all()
    assert_all_same(records, decode_block(encode_members(records)[0]))


def test_the_commit_margin_is_the_gap_to_the_best_candidate_passed_over():
    """One commit per step by probability: the gap is the largest minus the second largest
    probability among masked cells; the last step has no alternative, so its gap is infinite."""
    watcher, capture = Watcher(), observer("signals")
    run(DECODERS["one"], [watcher, capture], PROMPTS[:1], SEEDS[:1])
    (record,) = capture.trajectories(["a"])
    for position, step in enumerate(record.commit_step):
        seen = watcher.records[step]
        best = seen.proposal.prob[0][seen.state.masked[0]].sort(descending=True).values
        gap = best[0] - best[1] if len(best) > 1 else torch.tensor(torch.inf)
        assert record.signals["commit_margin"][position] == gap.half().item()
        assert record.signals["commit_score"][position] == best[0].half().item()


def test_a_filled_tail_has_no_commit_probability():
    """Cells that the end-of-text rule wrote were not scored; they lie behind an end of text."""
    records = captured("fill", "signals")
    tails = [np.isnan(record.signals["commit_prob"]) for record in records]
    for record, filled in zip(records, tails, strict=True):
        assert (record.tokens[filled] == EOS).all()
        assert not filled[: int(np.argmax(record.tokens == EOS)) + 1].any()
    assert np.concatenate(tails).any()


@pytest.mark.parametrize("layout", ["generation", "all"])
def test_features_are_kept_at_the_planned_steps(layout):
    """The fake backbone's hidden state at layer l is id * (l + 10), so at layers -2 and -1 the
    features are 8 and 9 times the canvas id, which replay knows."""
    records = captured("threshold", "features", layout=layout, scheme="fp16")
    for seed, record in zip(SEEDS, records, strict=True):
        record.validate()
        features = record.features
        assert features.kept_steps.tolist() == KeptSteps(seed, ratio=0.5).steps(record.num_steps)
        for k, step in enumerate(features.kept_steps):
            prompt = record.prompt_ids if layout == "all" else []
            ids = np.array([*prompt, *record.state_at(step)])
            values = features.dequantized()[k]
            np.testing.assert_array_equal(values[:, :4], np.repeat(8.0 * ids[:, None], 4, 1))
            np.testing.assert_array_equal(values[:, 4:8], np.repeat(9.0 * ids[:, None], 4, 1))
            written = (record.commit_step == step) & (record.tokens != MASK)
            proposals = features.proposals[k]
            np.testing.assert_array_equal(proposals[-G:][written], record.tokens[written])
            if layout == "all":
                np.testing.assert_array_equal(proposals[:-G], record.prompt_ids)


@pytest.mark.parametrize("name", ["blocks", "warm"])
def test_logits_are_those_of_every_masked_position(name):
    """Also outside the block, and without temperature; rounded to float16, where a table of normal
    numbers is off by less than 2**-10."""
    for record in captured(name, "logits", scheme="fp16"):
        stored = record.features
        assert stored.kept_steps.tolist() == KeptSteps(record.seed, ratio=0.5).steps(
            record.num_steps
        )
        for k, step in enumerate(stored.kept_steps):
            state = record.state_at(step)
            canvas = torch.tensor([*record.prompt_ids, *state])[None]
            expected = logits(canvas)[0, -G:].numpy()
            expected[:, [MASK, PAD]] = -np.inf
            values = stored.dequantized()[k]
            at = state == MASK
            np.testing.assert_allclose(values[at], expected[at], rtol=2**-11, atol=2**-25)
            np.testing.assert_array_equal(values[~at], 0.0)
    assert_all_same([record], decode_members(*encode_members([record]))[1])


def test_logits_that_no_reader_would_take_are_refused_before_the_first_step(monkeypatch):
    """Ten positions and twelve ids: 240 bytes of float16 a step, and one of every two is kept."""
    monkeypatch.setattr(capture_module, "MAX_LOGIT_BYTES", 1200)
    captured("one", "logits", scheme="fp16", seeds=[1], prompts=[[3]])
    monkeypatch.setattr(capture_module, "MAX_LOGIT_BYTES", 1199)
    rule = r"step_ratio: expected at most 1199 bytes of logits a response, got 1200 \(5 steps of 10"
    with pytest.raises(ValueError, match=rule):
        captured("one", "logits", scheme="fp16", seeds=[1], prompts=[[3]])


def test_small_and_masked_features_are_those_of_all_rows():
    """The same decode: int8 within one percent of fp16, and of the masked rows alone bit by bit."""
    exact, whole, masked = (
        captured("threshold", "features", **changes)
        for changes in ({"scheme": "fp16"}, {}, {"layout": "masked"})
    )
    for record, b, c in zip(exact, whole, masked, strict=True):
        x, y, z = (one.features.dequantized() for one in (record, b, c))
        assert np.sqrt(((x - y) ** 2).mean() / (x**2).mean()) < 0.01
        for k, step in enumerate(record.features.kept_steps):
            at = record.state_at(step) == MASK
            np.testing.assert_array_equal(y[k][at], z[k][at])
            assert not z[k][~at].any()


class NoWaits(TorchFunctionMode):
    """Fails where work on the meta device would wait for it, were it a GPU.

    Reading values of a meta tensor fails by itself; what is left are copies from the host.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            raise AssertionError("torch.tensor copies to a device and waits")
        if func is Tensor.to and args[0].device.type == "cpu" and "meta" in str(args[1]):
            assert kwargs.get("non_blocking"), "a copy to the device that waits"
        return func(*args, **kwargs)


def test_no_step_at_level_features_waits_for_the_device(monkeypatch):
    """Copies to the host go to a stream of their own, for which a stand-in is enough."""

    def on_device(value):
        tensors = {name: t.to("meta") for name, t in vars(value).items() if isinstance(t, Tensor)}
        return replace(value, **tensors)

    watcher, capture = Watcher(), observer("features", steps=lambda _seed: range(G))
    run(DECODERS["one"], [watcher, capture], PROMPTS[:2], SEEDS[:2])
    step = watcher.records[0]
    monkeypatch.setattr(capture_module.HostCopies, "add", lambda _self, x: torch.empty(x.shape))
    capture.on_start(step.state)
    parts = {name: on_device(getattr(step, name)) for name in ("state", "proposal")}
    step = replace(on_device(step), **parts)
    with NoWaits():
        capture.on_step(step)
    assert "region" in capture.requires


def test_only_steps_that_are_kept_look_at_the_whole_response():
    """In blocks of two cells only what is masked is asked for, and all only at planned steps."""
    asked = []

    class Counting(TableBackbone):
        def denoise(self, ids, *, columns=None, **options):
            asked.append(columns.shape[1])
            return super().denoise(ids, columns=columns, **options)

    decoder = Decoder(policy=decoding.ConfidencePolicy(), window=decoding.BlockWindow(2))
    capture = observer("features", steps=partial(KeptSteps, ratio=0.3))
    canvas = prompt_canvas([[3]], response_length=G, spec=fake_spec(), seeds=[11])
    decode(Counting(logits, VOCAB), decoder, canvas, [capture])
    kept = KeptSteps(11, ratio=0.3).steps(G)
    assert 0 < len(kept) < G
    assert asked == [G if step in kept else 2 - step % 2 for step in range(G)]
    (record,) = capture.trajectories(["a"])
    assert record.features.kept_steps.tolist() == sorted(kept)


@pytest.mark.parametrize("asked", ["as rows end", "at the end"])
@pytest.mark.parametrize("options", [{"level": "signals"}, {"level": "features", "layout": "all"}])
def test_records_of_rows_that_are_replaced_are_those_of_one_batch(options, asked):
    """16 prompts in 3 places."""
    prompts, seeds = PROMPTS * 2, [7 * i for i in range(16)]
    for name in ("threshold", "blocks", "stop"):
        capture, found, order = observer(**options), {}, []
        for numbers in queued(name, 3, list(zip(prompts, seeds, strict=True)), capture):
            order += numbers
            if asked == "as rows end" or len(order) == 16:
                records = capture.trajectories([f"u{seeds[number]}" for number in order])
                found.update(zip(order, records, strict=True))
                order = []
        expected = captured(name, prompts=prompts, seeds=seeds, **options)
        assert_all_same(expected, [found[number] for number in range(16)])


def queued(name: str, batch_size: int, starts: list, capture: TrajectoryCapture):
    for rows in decode_stream(
        TableBackbone(logits, VOCAB),
        DECODERS[name],
        WorkQueue(len(starts)),
        lambda number: DecodePrompt("", *starts[number]),
        response_length=G,
        batch_size=batch_size,
        observers=[capture],
    ):
        yield rows.numbers


def test_steps_that_no_open_row_needs_are_forgotten():
    """One place: a row's record does not hold the canvases of the rows before it."""
    capture = observer()
    for _ in queued("one", 1, [([3], number) for number in range(24)], capture):
        assert capture.captured().nbytes == G * G * 4  # G steps of G cells
        assert capture.captured() is capture.captured()


# -- buffers of steps ------------------------------------------------------------------------------

BUFFER = (4, 20, torch.int32)  # a step takes 320 bytes


@pytest.mark.parametrize("steps", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk_steps", [1, 5, 16, 20])
def test_every_step_comes_back_whatever_the_size_of_the_parts(monkeypatch, steps, chunk_steps):
    """Rows leave at steps 3 and 20; some of the parts are asked for and forgotten on the way."""
    monkeypatch.setattr(capture_module, "MAX_CHUNK_BYTES", 320 * chunk_steps)
    generator = torch.Generator().manual_seed(0)
    buffer = capture_module.StepBuffer(*BUFFER, capture_module.HostCopies(torch.device("cpu")))
    rows, truth = torch.arange(4), []
    for step in range(steps):
        rows = rows[rows < {3: 3, 20: 1}.get(step, 4)]
        values = torch.randint(0, 99, (len(rows), 22), generator=generator)
        buffer.append(rows, values)
        truth.append((rows.numpy(), values[:, 2:].numpy()))
        if step == 10:
            early = buffer.parts()
            buffer.forget(6)
            np.testing.assert_array_equal(early.of(2, slice(0, 11))[7], truth[7][1][2])
    parts = buffer.parts()
    assert parts.first_step <= 6
    for place in range(4):
        there = [values[place] for at, values in truth if place < len(at)]
        found = parts.of(place, slice(parts.first_step, len(there)))
        np.testing.assert_array_equal(found, np.array(there).reshape(-1, 20)[parts.first_step :])
    assert max((len(part) for part in parts.parts), default=0) <= chunk_steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_come_back_from_the_device_without_waiting_for_it():
    device = torch.device("cuda")
    copies = capture_module.HostCopies(device)
    buffer = capture_module.StepBuffer(*BUFFER, copies)
    rows, values = torch.arange(4, device=device), torch.arange(80, device=device).view(4, 20)
    steps = [values + step for step in range(40)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            buffer.append(rows, step)
        parts = buffer.parts()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies.wait()
    torch.testing.assert_close(torch.cat(parts.parts), torch.stack(steps).int().cpu())


# -- kept steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.1, 1 / 7])
def test_each_stratum_keeps_one_step(ratio):
    """Stratum j is ceil(j / ratio) to ceil((j + 1) / ratio) - 1."""
    for seed in (1, 2, 3):
        kept = KeptSteps(seed, ratio=ratio).steps(1000)
        for j in range(int(1000 * ratio) - 1):
            low, high = math.ceil(j / ratio), math.ceil((j + 1) / ratio)
            assert sum(low <= step < high for step in kept) == 1


def test_the_choice_depends_on_the_seed_alone():
    alone = KeptSteps(7, ratio=0.2).steps(300)
    assert KeptSteps(3, ratio=0.2).steps(300) != alone
    assert KeptSteps(7, ratio=0.2).steps(120) == [step for step in alone if step < 120]


def test_every_step_is_kept_equally_often():
    """With ratio 0.25 each of 40 steps is kept by a quarter of 2,000 rows: 500 +- 97 (5 sigma)."""
    kept = [KeptSteps(seed, ratio=0.25).steps(40) for seed in range(2000)]
    counts = np.bincount(np.concatenate(kept), minlength=40)
    assert counts.sum() == 2000 * 10
    assert np.abs(counts - 500).max() < 97
