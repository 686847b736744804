"""The discrimination score against a slow loop, and its callback in a run."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.callbacks.discrimination import (
    DiscriminationObserver,
    DiscriminationScore,
    score_curve,
)
from lit_dlm.decoding import (
    Decoder,
    EntropyPolicy,
    Sampler,
    SequentialPolicy,
    decode,
    prompt_canvas,
)
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule
from lit_dlm.training.masking import RandomMasking
from lit_dlm.trajectories.capture import TrajectoryCapture
from tests.finetuning.runs import VOCAB, Data, examples, run, small, two_processes
from tests.processes import in_two_processes


def test_curve_equals_a_slow_loop_over_recorded_entropies() -> None:
    """A third of all ids ends an answer. Stored entropies are float16, hence the tolerance."""
    ends_of_text = tuple(range(3, 11))
    backbone = small(eos_ids=ends_of_text)
    observer = DiscriminationObserver()
    capture = TrajectoryCapture(vocab_size=VOCAB, level="signals")
    prompts = [torch.arange(3, 4 + row) for row in range(6)]
    canvas = prompt_canvas(prompts, response_length=8, spec=backbone.spec, seeds=range(6))
    decode(backbone, Decoder(policy=EntropyPolicy()), canvas, [observer, capture])
    by_step: dict[int, list[float]] = {}
    saw_end = False
    for record in capture.trajectories([f"x/{row}" for row in range(6)]):
        values: dict[int, list[float]] = {}
        rows = zip(record.masked_rows().tolist(), record.signals["step_entropy"], strict=True)
        for (step, position), entropy in rows:
            ends = np.flatnonzero(np.isin(record.state_at(step), ends_of_text))
            saw_end |= len(ends) > 0
            if not len(ends) or position < ends[0]:
                values.setdefault(step, []).append(float(entropy))
        for step, found in values.items():
            if len(found) > 1:
                by_step.setdefault(step, []).append(float(np.var(found)))
    score, curve = score_curve(observer.totals())
    wanted = [float(np.mean(by_step[step])) for step in sorted(by_step)]
    assert saw_end
    assert curve[: len(wanted)] == pytest.approx(wanted, abs=2e-3)
    assert score == pytest.approx(np.mean(wanted), abs=2e-3)
    assert not any(curve[len(wanted) :])


def test_the_score_reads_the_model_whatever_the_sampler_scores() -> None:
    """Greedy and from left to right, so that the states are the same."""
    backbone, totals = small(), []
    canvas = prompt_canvas([[3], [4, 5]], response_length=8, spec=backbone.spec, seeds=[0, 1])
    for sampler in (Sampler(), Sampler(top_p=0.3, score_on="filtered")):
        observer = DiscriminationObserver()
        decoder = Decoder(policy=SequentialPolicy(), sampler=sampler)
        decode(backbone, decoder, canvas, [observer])
        totals.append(observer.totals()[0])
    assert totals[0].sum() > 0
    assert torch.equal(*totals)


def tuned(kind: Any, **options: Any) -> Any:
    sampler = Sampler(temperature=1.0)
    decoders = {"entropy": Decoder(policy=EntropyPolicy(), sampler=sampler)}
    return kind(small(), tokenizer="tiny", decoders=decoders, **options)


@pytest.mark.slow
def test_the_callback_measures_before_training_and_after_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_dlm.callbacks.discrimination._BATCH_SIZE", 3)
    callback = DiscriminationScore(str(tmp_path / "tds"), num_prompts=4)
    module = tuned(SFTModule, masking=RandomMasking())
    run(module, Data(examples(), batch_size=4), tmp_path, steps=4, callbacks=(callback,))
    found = json.loads((tmp_path / "tds" / "discrimination.json").read_text())
    assert list(found["scores"]) == ["start", "epoch 0", "epoch 1"]
    assert all(len(curve) <= 8 for curve in found["curves"].values())
    assert (tmp_path / "tds" / "discrimination.png").is_file()
    again = DiscriminationScore(str(tmp_path / "again"))
    again.load_state_dict(callback.state_dict())
    assert again.scores == callback.scores


@pytest.mark.slow
@pytest.mark.parametrize(("is_first", "val_fraction"), [(True, 0.3), (False, 0.3), (True, 0.0)])
def test_the_best_adapter_is_picked_by_the_score_of_its_own_epoch(
    tmp_path: Path, is_first: bool, val_fraction: float
) -> None:
    """Wherever the callback stands, beside what the module logs in validation, if any."""
    score = DiscriminationScore(str(tmp_path / "tds"), num_prompts=4)
    best = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/tds", mode="max")
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    module = tuned(TABOMModule, window=4, rank_window=4, optimizer=optimizer, warmup_steps=0)
    data = Data(examples(16), batch_size=4, val_fraction=val_fraction)
    callbacks = (score, best) if is_first else (best, score)
    run(module, data, tmp_path, steps=9, total=9, callbacks=callbacks)
    assert list(best.scores) == [f"epoch-{epoch:02d}" for epoch in range(3)]
    measured = [score.scores[f"epoch {epoch}"] for epoch in range(3)]
    assert list(best.scores.values()) == pytest.approx(measured, rel=1e-6)


def _measure(rank: int, folder: Path) -> tuple[float, dict[str, float], list[str]]:
    """What is logged, what was measured, and what Lightning says about it."""
    callback = DiscriminationScore(str(folder / "tds"), num_prompts=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        options = {"devices": 2, "strategy": two_processes("ddp"), "callbacks": (callback,)}
        module, data = tuned(SFTModule, masking=RandomMasking()), Data(examples(), batch_size=2)
        trainer = run(module, data, folder, steps=2, total=2, **options)
    advice = [str(one.message) for one in seen if "sync_dist" in str(one.message)]
    return float(trainer.callback_metrics["val/tds"]), callback.scores, advice


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_log_the_score_of_one(tmp_path: Path) -> None:
    first, second = in_two_processes(_measure, tmp_path)
    assert first == second
    logged, measured, advice = first
    assert logged == pytest.approx(measured["epoch 0"], rel=1e-6)
    assert advice == []
    alone = DiscriminationScore(str(tmp_path / "alone"), num_prompts=4)
    module, data = tuned(SFTModule, masking=RandomMasking()), Data(examples(), batch_size=2)
    run(module, data, tmp_path, steps=1, total=1, callbacks=(alone,))
    assert measured["start"] == pytest.approx(alone.scores["start"], rel=1e-6)
