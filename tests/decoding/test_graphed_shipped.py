"""Every decoder of the shipped configurations, as graphs and in the eager loop."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.config.files import Composed, compose, decoder_options, load, packaged
from lit_dlm.config.parser import Parser
from lit_dlm.decoding.state import StepRecord
from lit_dlm.decoding.windows import SteppedBlockWindow
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from tests.decoding.models import in_blocks, scorer, tiny_backbone
from tests.decoding.ragged import PROMPTS
from tests.decoding.states import everything
from tests.graphs import EmulatedGraph, emulated

pytestmark = pytest.mark.slow  # builds the parser, and 80 decoders

FILES = [name.removeprefix("decode/") for name in packaged("decode") if name.count("/") == 1]
FORWARDS = {"dllm_rl_dream"}
"""Files whose steps are no graphs, only their forwards: the host decides how far a filter looks."""


def _entries(value: Any, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything in an experiment that has a policy, by where it stands."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from _entries(item, f"{at} {key}")
    if isinstance(value, dict) and "policy" in value and "backbone" not in value:
        yield at, value


def kind(decoder: d.Decoder) -> tuple[Any, ...]:
    """What may make a difference to graphs."""
    parts, sampler, rules = decoder.parts, decoder.sampler, decoder.settings
    return (
        *(type(parts[name]).__name__ for name in sorted(parts)),
        *(sampler.top_k, sampler.top_p, sampler.temperature > 0, sampler.score_on),
        *(rules.eos_rule, rules.eos_gate, rules.stall_rule),
    )


@pytest.fixture(scope="module")
def shipped() -> tuple[dict[str, d.Decoder], dict[str, d.Decoder]]:
    """Decoders of ``configs/decode``, and those of experiments that no other one is like."""
    entries = {name: load(f"decode/{name}") for name in FILES}
    for name in packaged("exp"):
        entries |= _entries(compose([f"--config={name}"]).document, name)
    # One start of the parser for all; it takes no dots in names.
    parser = Parser(prog="shipped")
    parser.add_argument("--config", action="config")
    parser.add_argument("--decoders", type=dict[str, d.Decoder])
    numbered = {f"n{number}": decoder_options(one) for number, one in enumerate(entries.values())}
    document = {"decoders": numbered}
    parsed = parser.parse_composed(Composed(document, document, []))
    decoders = dict(zip(entries, parser.instantiate(parsed).decoders.values(), strict=True))
    by_kind: dict[Any, str] = {}
    for name, decoder in decoders.items():
        by_kind.setdefault(kind(decoder), name)
    return (
        {name: decoders.pop(name) for name in FILES},
        {name: decoders[name] for name in by_kind.values() if name in decoders},
    )


def model_for(name: str, decoder: d.Decoder) -> HFBackbone:
    """A small random model that fits; its probabilities are spread between 0 and 1."""
    blocks = decoder.window.blocks if decoder.window else None
    edits = isinstance(decoder.policy, d.TokenEditingPolicy)
    most = decoder.sampler.allowed_ids
    changes: dict[str, Any] = {"vocab_size": 97 if most is None else most[1], "edits_tokens": edits}
    if isinstance(decoder.window, d.PipelineWindow):
        changes |= {**in_blocks("response"), "block_size": blocks[0], "whole_prompt": True}
    elif name == "nemotron":
        changes |= {**in_blocks("response"), "block_size": 32, "causal_context": True}
    elif edits or (blocks is not None and blocks[1] == "sequence"):
        changes |= in_blocks("sequence")
        if blocks is not None:
            changes["block_size"] = 32 if decoder.cache.in_parts else blocks[0]
    elif not isinstance(decoder.policy, d.WINOPolicy):
        changes["shift"] = int("dream" in name or "dual" in name)
    backbone = tiny_backbone(**changes)
    with torch.no_grad():
        backbone.model.lm_head.weight *= 4.0
    return backbone


def length_for(decoder: d.Decoder) -> int:
    """Two blocks, or all regions."""
    if isinstance(decoder.layout, d.FixedLayout):
        return 32
    if isinstance(decoder.layout, d.PictureLayout):
        return 17
    window = decoder.window
    return 12 if window is None or window.blocks is None else max(12, 2 * window.blocks[0])


def capture_for(decoder: d.Decoder, vocab_size: int) -> TrajectoryCapture:
    """All signals; without a cache, features of some steps: what steps must compute changes."""
    if decoder.cache.keeps:
        return TrajectoryCapture(vocab_size=vocab_size, level="signals")

    def function(hidden, prob, *, entropy, margin):
        return torch.cat([hidden.mean(-1), torch.stack([prob, entropy, margin], -1)], -1)

    features = FeatureCapture(
        function=function,
        hidden_layers=(-3, -2, -1),
        groups=(3, 3),
        projector_digest="",
        steps=lambda seed: KeptSteps(seed, ratio=0.3),
        scheme="fp16",
    )
    return TrajectoryCapture(vocab_size=vocab_size, level="features", features=features)


def check_signals(found: Trajectory, expected: Trajectory) -> None:
    """Padding changes the sizes of matrix products, and so may change the last bits."""
    assert found.signals.keys() == expected.signals.keys()
    for name, values in expected.signals.items():
        new, old = torch.tensor(found.signals[name]), torch.tensor(values)
        torch.testing.assert_close(new, old, equal_nan=True)
    if expected.features is not None:
        assert found.features is not None
        for name in ("kept_steps", "proposals"):
            new, old = (getattr(one.features, name) for one in (found, expected))
            assert new.tolist() == old.tolist()
        new, old = (torch.tensor(one.features.dequantized()) for one in (found, expected))
        # They are stored as float16, where the last bit is this share of the value.
        torch.testing.assert_close(new, old, rtol=2**-10, atol=1e-5)


def mode_of(name: str, decoder: d.Decoder, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decodes ragged rows in both ways; returns what its graphs hold."""
    backbone = model_for(name, decoder)
    if isinstance(decoder.policy, TraceLockPolicy):
        decoder.policy.scorer = scorer(backbone, spread=8.0)
    if isinstance(decoder.window, SteppedBlockWindow):
        decoder = decoder.replace(window=SteppedBlockWindow(6, steps=24))
    if (most := decoder.settings.max_steps) is not None:
        decoder = decoder.replace(settings=replace(decoder.settings, max_steps=min(most, 80)))
    length = length_for(decoder)
    is_large = length > 40 or backbone.vocab_size > 1000
    prompts, num_slots = (PROMPTS[:7], 3) if is_large else (PROMPTS[:12], 4)

    def run() -> tuple[dict[str, Any], list[Trajectory]]:
        capture = capture_for(decoder, backbone.vocab_size)
        return everything(decoder, backbone, prompts, length, num_slots, capture=capture)

    with emulated(monkeypatch, is_on=False):
        expected, records = run()
    with emulated(monkeypatch):
        found, records_found = run()
    assert found == expected, name
    assert len(expected["results"]) == len(prompts)
    for one, other in zip(records_found, records, strict=True):
        check_signals(one, other)
    assert any(graph.num_replays for graph in EmulatedGraph.made), name
    (held,) = {graph.holds for graph in EmulatedGraph.made}
    return "step" if held is StepRecord else "forward"


def test_every_decode_file_as_graphs(shipped: Any, monkeypatch: pytest.MonkeyPatch):
    modes = {name: mode_of(name, decoder, monkeypatch) for name, decoder in shipped[0].items()}
    assert len(modes) > 35
    assert {name for name, mode in modes.items() if mode == "forward"} == FORWARDS
    assert {*modes.values()} == {"step", "forward"}


def test_the_page_says_which_of_them_run_eagerly_in_part():
    page = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "cuda_graphs.md"
    assert set(re.findall(r"`decode/(\w+)`", page.read_text())) == FORWARDS


def test_decoders_of_experiments_as_graphs(shipped: Any, monkeypatch: pytest.MonkeyPatch):
    assert len(shipped[1]) > 30
    for name, decoder in shipped[1].items():
        is_filtered = decoder.sampler.top_k is not None or decoder.sampler.top_p is not None
        mode = mode_of(name, decoder, monkeypatch)
        assert mode == ("forward" if is_filtered else "step"), name
