"""What observers keep, where the tensors that they are given hold other values soon after."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.callbacks.discrimination import DiscriminationObserver
from lit_dlm.decoding import BlockWindow, Decoder
from lit_dlm.decoding.api import Occupancy, SampledWrites
from lit_dlm.trajectories.capture import FeatureCapture, TrajectoryCapture
from tests.decoding.models import tiny_backbone
from tests.decoding.states import decoded, streamed

LENGTHS = [9, 8, 2, 30, 1, 7]
PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate(LENGTHS)]
HALVES = d.FractionLayout([d.Region(name="a", fraction=0.5), d.Region(name="b", fraction=0.5)])
DECODER = Decoder(
    policy=d.DynamicPolicy(0.1), quota=d.FixedQuota(2), window=BlockWindow(4), layout=HALVES
)


class Overwritten(d.Observer):
    """Gives an observer copies whose values are lost as soon as it has seen them."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self.hidden_layers = getattr(observer, "hidden_layers", ())

    @property
    def requires(self) -> frozenset[str]:
        return self._observer.requires

    def on_start(self, state: d.DecodeState) -> None:
        _see(self._observer.on_start, state)

    def on_step(self, record: d.StepRecord) -> bool | None:
        return _see(self._observer.on_step, record)

    def on_refill(self, result: d.DecodeResult, state: d.DecodeState) -> None:
        _see(lambda seen: self._observer.on_refill(result, seen), state)

    def on_end(self, result: d.DecodeResult) -> None:
        self._observer.on_end(result)


def _see(call: Callable[[Any], Any], values: Any) -> Any:
    copied = deepcopy(values)
    answer = call(copied)
    _overwrite(copied)
    return answer


def _overwrite(values: Any) -> None:
    for value in vars(values).values():
        if torch.is_tensor(value):
            value.fill_(True if value.dtype == torch.bool else 77)
        elif hasattr(value, "__dataclass_fields__"):
            _overwrite(value)


def _captured(level: str, **options: Any) -> Callable[..., Any]:
    def found(wrap: Callable[[Any], Any]) -> list[str]:
        capture = TrajectoryCapture(vocab_size=97, level=level, **options)
        records = []
        for ended in streamed(DECODER, tiny_backbone(), PROMPTS, 12, 3, wrap(capture)):
            records += capture.trajectories([str(number) for number in ended.numbers])
        values = [
            (name, value.tolist() if hasattr(value, "tolist") else value)
            for record in records
            for name, value in {**vars(record), **record.signals}.items()
            if name not in ("signals", "features")
        ]
        stored = [record.features for record in records if record.features is not None]
        return repr(
            [values, [(one.dequantized().tolist(), one.proposals.tolist()) for one in stored]]
        )

    return found


def _filled(wrap: Callable[[Any], Any]) -> Any:
    fill = d.RegionFill()
    rows = streamed(DECODER, tiny_backbone(), PROMPTS, 12, 3, wrap(fill))
    return [curve.by_name() for _ in rows for curve in fill.curves()]


def _drawn(wrap: Callable[[Any], Any]) -> Any:
    sampled, decoder = SampledWrites(), DECODER.replace(sampler=d.Sampler(temperature=1.0))
    rows = streamed(decoder, tiny_backbone(), PROMPTS, 12, 3, wrap(sampled))
    return [sampled.ended().tolist() for _ in rows]


def _at_work(wrap: Callable[[Any], Any]) -> Any:
    occupancy = Occupancy()
    list(streamed(DECODER, tiny_backbone(), PROMPTS, 12, 3, wrap(occupancy)))
    return occupancy.share


def _discriminated(wrap: Callable[[Any], Any]) -> Any:
    observer = DiscriminationObserver()
    decoded(DECODER, tiny_backbone(), PROMPTS, 12, wrap(observer))
    return observer.totals().tolist()


FEATURES = FeatureCapture(
    function=lambda hidden, prob, **_scores: torch.cat([hidden.flatten(2), prob[..., None]], -1),
    hidden_layers=(-2, -1),
    groups=(32, 1),
    projector_digest="none",
    scheme="fp16",
)
LOGITS = FeatureCapture(
    function=None, hidden_layers=(), groups=(97,), projector_digest="", layout="logits"
)
FOUND = {
    "tokens": _captured("tokens"),
    "signals": _captured("signals"),
    "features": _captured("features", features=FEATURES),
    "logits": _captured("logits", features=LOGITS),
    "own signals": _captured("tokens", signals={"step_commit": lambda step: step.commit.char()}),
    "regions": _filled,
    "draws": _drawn,
    "occupancy": _at_work,
    "discrimination": _discriminated,
}


@pytest.mark.parametrize("name", FOUND)
def test_an_observer_needs_no_tensor_after_it_was_called(name: str):
    """A record's tensors, and those of a state that it starts with, belong to the next steps."""
    expected = FOUND[name](lambda observer: observer)
    assert expected
    assert FOUND[name](Overwritten) == expected
