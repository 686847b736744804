"""Cache schemes against a slow reference, in padded batches whose rows drift apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_dlm.backbones.base import backbone_facts
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DualCache,
    DynamicPolicy,
    EvenQuota,
    FullWindow,
    NoQuota,
    PrefixCache,
    SlidingWindow,
    ThresholdPolicy,
    prompt_canvas,
)
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from tests.backbones.conftest import tiny_architecture
from tests.decoding.slow_cache import slow_decode
from tests.decoding.states import Recorder, as_rows_alone

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13, 14, 15, 16, 17]]
SCHEMES = {
    "prefix": PrefixCache(),
    "horizon": PrefixCache(horizon=3),
    "dual": DualCache(),
}


def _backbone(**changes: object) -> HFBackbone:
    torch.manual_seed(3)
    values = {"vocab_size": 97, "num_layers": 2, "num_kv_heads": 1, **changes}
    return HFBackbone(architecture=tiny_architecture(**values)).eval()


def _decode(backbone, decoder: Decoder, prompts, response: int):
    canvas = prompt_canvas(
        prompts, response_length=response, spec=backbone.spec, seeds=range(len(prompts))
    )
    return decoder(backbone, canvas)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", ["threshold", "quota"])
def test_a_padded_batch_equals_the_slow_reference(scheme, shift, rule):
    """Response 10 in blocks of 4 (the last one short); a threshold lets rows drift apart."""
    backbone = _backbone(shift=shift)
    plugs = (
        {"policy": ThresholdPolicy(0.15), "quota": NoQuota()}
        if rule == "threshold"
        else {"policy": ConfidencePolicy(), "quota": EvenQuota(steps_per_block=3)}
    )
    decoder = Decoder(window=BlockWindow(4), cache=SCHEMES[scheme], **plugs)
    result = _decode(backbone, decoder, PROMPTS, 10)
    steps = []
    for row, prompt in enumerate(PROMPTS):
        tokens, num_steps = slow_decode(
            backbone,
            prompt,
            response=10,
            block=4,
            scheme={"horizon": "prefix"}.get(scheme, scheme),
            horizon=3 if scheme == "horizon" else None,
            threshold=0.15 if rule == "threshold" else None,
            steps_per_block=3 if rule == "quota" else None,
        )
        assert result.ids[row, -10:].tolist() == tokens
        steps.append(num_steps)
    assert result.num_steps.tolist() == steps
    assert result.num_refreshes.tolist() == [3] * 3
    if rule == "threshold":
        assert len(set(steps)) > 1  # the rows did drift apart


def _block_backbone(origin: str, shift: int = 0) -> HFBackbone:
    return _backbone(
        decoder="qwen3", attention="block", block_size=4, block_origin=origin, shift=shift
    )


BLOCK_RULES = {
    "static": {"policy": ConfidencePolicy(), "quota": EvenQuota(steps_per_block=2)},
    "dynamic": {"policy": DynamicPolicy(0.15), "quota": EvenQuota(steps_per_block=4)},
}


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("rule", BLOCK_RULES)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_block_cache_is_exact_in_a_padded_batch(origin, rule, shift):
    """Prompts of 5, 1 and 7 tokens: with blocks from the sequence's start all rows differ."""
    backbone = _block_backbone(origin, shift)
    plugs = {"window": BlockWindow(4, origin=origin), **BLOCK_RULES[rule]}
    plain = _decode(backbone, Decoder(**plugs), PROMPTS, 10)
    cached = _decode(backbone, Decoder(cache=BlockCache(), **plugs), PROMPTS, 10)
    assert torch.equal(cached.ids, plain.ids)
    assert torch.equal(cached.num_steps, plain.num_steps)
    # Response 10: from its own start 3 blocks; from the sequence's, ceil((P % 4 + 10) / 4).
    expected = [3] * 3 if origin == "response" else [3, 3, 4]
    assert cached.num_refreshes.tolist() == expected


def test_sixteen_rows_in_different_blocks_share_every_forward():
    """Prompts of 1 to 7 tokens and a threshold: rows enter their blocks at different steps."""
    backbone = _block_backbone("sequence")
    decoder = Decoder(
        window=BlockWindow(4, origin="sequence"), cache=BlockCache(), **BLOCK_RULES["dynamic"]
    )
    prompts = [[5 + 3 * row + i for i in range(1 + row % 7)] for row in range(16)]
    seen = Recorder()
    canvas = prompt_canvas(prompts, response_length=30, spec=backbone.spec, seeds=range(11, 27))
    decoder(backbone, canvas, [seen])
    assert max(len(set(one.state.block.tolist())) for one in seen.records) >= 4  # in one step
    batch = as_rows_alone(decoder, backbone, prompts, 30)
    assert batch.num_forwards == batch.num_steps.max()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tracelock_decodes_with_every_cache_and_rows_do_not_matter(scheme, shift):
    backbone = _backbone(shift=shift)
    policy = TraceLockPolicy(scorer=_scorer(backbone), threshold=0.5, max_accept_per_step=3)
    decoder = Decoder(policy=policy, quota=NoQuota(), window=BlockWindow(4), cache=SCHEMES[scheme])
    as_rows_alone(decoder, backbone, PROMPTS, 10)


def test_tracelock_with_the_block_cache_equals_tracelock_without():
    """What lies right of the block is computed only without a cache; the policy does not see it."""
    backbone = _block_backbone("sequence")
    policy = TraceLockPolicy(scorer=_scorer(backbone), threshold=0.5, max_accept_per_step=3)
    plugs = {"policy": policy, "quota": NoQuota(), "window": BlockWindow(4, origin="sequence")}
    plain = _decode(backbone, Decoder(**plugs), PROMPTS, 10)
    cached = _decode(backbone, Decoder(cache=BlockCache(), **plugs), PROMPTS, 10)
    assert torch.equal(cached.ids, plain.ids)


def _scorer(backbone: HFBackbone) -> AcceptanceScorer:
    torch.manual_seed(0)
    config = ProjectorConfig(
        hidden_size=backbone.hidden_size, hidden_rank=3, delta_rank=2, kind="random_orthogonal"
    )
    built = AcceptanceScorer(
        Projector.random_orthogonal(config),
        head=AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16),
        settings=ScorerSettings(hidden_layers=(-3, -2, -1)),
        backbone=backbone_facts(backbone.spec, backbone),
    )
    with torch.no_grad():
        built.head.logit_head.weight *= 8.0
    return built.eval()


@pytest.mark.parametrize("shift", [0, 1])
def test_features_outside_the_window_stay_those_of_the_last_forward_that_covered_them(shift):
    """Dual cache, blocks [5, 9) and [9, 13): between refreshes only the block's rows change."""
    backbone = _backbone(shift=shift)
    seen = Recorder("hidden", "region", hidden_layers=(-2, -1))
    canvas = prompt_canvas([PROMPTS[0]], response_length=8, spec=backbone.spec, seeds=[0])
    decoder = Decoder(policy=ConfidencePolicy(), window=BlockWindow(4), cache=DualCache())
    decoder(backbone, canvas, [seen])
    for step, record in enumerate(seen.records):
        hidden = record.proposal.hidden
        assert hidden is not None
        if step % 4 == 0:  # a refresh: everything is that of a plain forward
            plain = backbone.denoise(record.state.ids, hidden_layers=(-2, -1)).hidden
            torch.testing.assert_close(hidden, plain)
            continue
        before = seen.records[step - 1].proposal.hidden
        block = 5 if step < 4 else 9
        # Aligned row ``i`` is raw row ``i - shift``.
        inside = torch.zeros(13, dtype=torch.bool)
        inside[block + shift : min(block + 4 + shift, 13)] = True
        assert torch.equal(hidden[:, ~inside], before[:, ~inside])
        assert not torch.isclose(hidden[:, inside], before[:, inside]).all()


def test_a_row_that_leaves_takes_its_cache_with_it():
    """Row 1 has two masks and leaves first; the others decode as they do alone."""
    backbone = _backbone()
    canvas = prompt_canvas(PROMPTS, response_length=8, spec=backbone.spec, seeds=[0, 1, 2])
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    ids[1, -8:-2], editable[1, -8:-2] = 9, False
    canvas = replace(canvas, ids=ids, editable=editable)
    for cache in (PrefixCache(), DualCache()):
        decoder = Decoder(policy=ConfidencePolicy(), window=BlockWindow(4), cache=cache)
        result = decoder(backbone, canvas)
        assert result.num_steps.tolist() == [8, 2, 8]
        assert result.num_refreshes.tolist() == [2, 1, 2]
        # Steps 0-1 run all rows (0: a refresh), 2-7 the two that are left.
        assert result.num_forwards == 8
        for row in (0, 2):
            alone = _decode(backbone, decoder, [PROMPTS[row]], 8)
            assert torch.equal(alone.ids[0, -8:], result.ids[row, -8:])


def test_a_full_window_is_one_block():
    backbone = _backbone()
    decoder = Decoder(policy=ConfidencePolicy(), window=FullWindow(), cache=PrefixCache())
    result = _decode(backbone, decoder, [PROMPTS[0]], 6)
    tokens, _ = slow_decode(
        backbone, PROMPTS[0], response=6, block=6, scheme="prefix", steps_per_block=6
    )
    assert result.ids[0, -6:].tolist() == tokens
    assert result.num_refreshes.tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "plugs", "message"),
    [
        ({}, {"cache": BlockCache()}, "BlockCache is for block attention"),
        (
            {"attention": "block", "block_size": 4},
            {"cache": DualCache()},
            "DualCache is for full attention",
        ),
        (
            {"attention": "block", "block_size": 4},
            {"cache": BlockCache(), "window": BlockWindow(2, origin="sequence")},
            "BlockCache is for block attention",
        ),
        ({}, {"cache": DualCache(), "window": SlidingWindow(4)}, "SlidingWindow has no blocks"),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused(changes, plugs, message):
    backbone = _backbone(**changes)
    with pytest.raises(ValueError, match=message):
        _decode(backbone, Decoder(policy=ConfidencePolicy(), **plugs), [PROMPTS[0]], 8)
    with pytest.raises(ValueError, match="horizon"):
        PrefixCache(horizon=-1)
