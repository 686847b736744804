"""Cache schemes against a slow reference, in padded batches whose rows drift apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lit_dlm.decoding as d
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import BlockWindow, ConfidencePolicy, Decoder, DualCache, PrefixCache, decode
from lit_dlm.decoding.regions import Region
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.backbones.folders import FAST_DLLM, weights_of, write
from tests.decoding.models import SPARSE, in_blocks, scorer, tiny_backbone
from tests.decoding.slow_cache import slow_decode
from tests.decoding.states import Recorder, as_rows_alone, decoded

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13, 14, 15, 16, 17]]
SCHEMES = {
    "prefix": PrefixCache(),
    "horizon": PrefixCache(horizon=3),
    "dual": DualCache(),
}


def rules(name: str, backbone: HFBackbone) -> dict[str, Any]:
    """Policy and quota; under all but ``static`` rows drift apart."""
    if name == "static":
        return {"policy": ConfidencePolicy(), "quota": d.EvenQuota(steps_per_block=3)}
    if name == "dynamic":
        return {"policy": d.DynamicPolicy(0.15), "quota": d.EvenQuota(steps_per_block=4)}
    if name == "threshold":
        return {"policy": d.ThresholdPolicy(0.15), "quota": d.NoQuota()}
    learned = scorer(backbone, spread=8.0)
    policy = TraceLockPolicy(scorer=learned, threshold=0.5, max_accept_per_step=3)
    return {"policy": policy, "quota": d.NoQuota()}


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rule", "window", "block"),
    [
        ("threshold", BlockWindow(4), 4),
        ("static", BlockWindow(4), 4),
        ("static", d.FullWindow(), 10),  # one block
    ],
)
def test_a_padded_batch_equals_the_slow_reference(scheme, shift, rule, window, block):
    """Response 10 in blocks of 4 (the last one short)."""
    backbone = tiny_backbone(shift=shift)
    decoder = Decoder(window=window, cache=SCHEMES[scheme], **rules(rule, backbone))
    result = decoded(decoder, backbone, PROMPTS, 10)
    steps = []
    for row, prompt in enumerate(PROMPTS):
        tokens, num_steps = slow_decode(
            backbone,
            prompt,
            response=10,
            block=block,
            scheme={"horizon": "prefix"}.get(scheme, scheme),
            horizon=3 if scheme == "horizon" else None,
            threshold=0.15 if rule == "threshold" else None,
            steps_per_block=3 if rule == "static" else None,
        )
        assert result.ids[row, -10:].tolist() == tokens
        steps.append(num_steps)
    assert result.num_steps.tolist() == steps
    assert (len(set(steps)) > 1) == (rule == "threshold")  # the rows did drift apart


class CountedBlockCache(d.BlockCache):
    """Counts the steps that enter a block, over all rows."""

    num_refreshes = 0

    def refresh_span(self, *columns: int) -> Any:
        self.num_refreshes += 1
        return super().refresh_span(*columns)


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("rule", ["static", "dynamic", "tracelock"])
@pytest.mark.parametrize("changes", [{"shift": 0}, {"shift": 1}, SPARSE, {"causal_context": True}])
def test_the_block_cache_is_exact_in_a_padded_batch(origin, rule, changes):
    """Prompts of 5, 1 and 7 tokens: with blocks from the sequence's start all rows differ.

    What lies right of the block is computed only without a cache; no policy sees it.
    """
    backbone = tiny_backbone(**{**in_blocks(origin), **changes})
    components = {"window": BlockWindow(4, origin=origin), **rules(rule, backbone)}
    plain = decoded(Decoder(**components), backbone, PROMPTS, 10)
    cache = CountedBlockCache()
    cached = decoded(Decoder(cache=cache, **components), backbone, PROMPTS, 10)
    assert torch.equal(cached.ids, plain.ids)
    assert torch.equal(cached.num_steps, plain.num_steps)
    # Response 10: from its own start 3 blocks; from the sequence's, ceil((P % 4 + 10) / 4).
    assert cache.num_refreshes == (9 if origin == "response" else 10)


def test_a_prompt_that_is_one_block_sees_no_prefilled_block_of_its_response():
    """Two prompts twice each, so that prompts run by themselves; a marker of two whole blocks."""
    backbone = tiny_backbone(**in_blocks("response"), whole_prompt=True)
    layout = d.TemplateLayout(
        [Region(name="a", marker=list(range(10, 18)), length=8), Region(name="b", marker=[7])]
    )
    components = {"policy": d.ThresholdPolicy(0.3), "quota": d.NoQuota(), "layout": layout}
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14]] * 2
    plain = decoded(Decoder(**components), backbone, prompts, 24)
    cached = decoded(Decoder(cache=d.BlockCache(), **components), backbone, prompts, 24)
    assert torch.equal(cached.ids, plain.ids)


@torch.no_grad()
def test_parts_of_blocks_are_decoded_as_the_releases_sampler_does(tmp_path):
    """Fast-dLLM v2's own ``generate`` on random weights: blocks of 8, parts of 4, threshold 0.12.

    Prompts of 11 and 5 tokens, alone and in one batch. Its forwards are 15 and 13: one for the long
    prompt, and one for each at the end, which only keeps the last block.
    """
    golden = load_file(Path(__file__).parents[1] / "golden" / "families.safetensors")
    folder = write(tmp_path / "m", FAST_DLLM, weights_of(FAST_DLLM))
    overrides = {"block_size": 8, "forbidden_ids": [3, 39]}
    backbone = HFBackbone(str(folder), spec_overrides=overrides).eval()
    decoder = Decoder(
        policy=d.ThresholdPolicy(threshold=0.12),
        window=BlockWindow(4, origin="sequence"),
        cache=d.SubBlockCache(),
    )
    long = [5, 9, 4, 7, 6, 11, 30, 2, 8, 17, 25]
    wanted = {size: golden[f"fast_dllm.decode.part.{size}"] for size in (11, 5)}
    both = decoded(decoder, backbone, [long, long[:5]], 21)
    for row, (size, num_steps) in enumerate({11: 13, 5: 12}.items()):
        tokens = wanted[size]
        alone = decoded(decoder, backbone, [long[:size]], len(tokens))
        assert alone.ids[0, -len(tokens) :].equal(tokens)
        assert alone.num_steps.tolist() == [num_steps]
        assert both.ids[row, 11:][: len(tokens)].equal(tokens)
    assert not wanted[11].equal(golden["fast_dllm.decode.block.11"])  # the cache is not exact


def test_sixteen_rows_in_different_blocks_share_every_forward():
    """Prompts of 1 to 7 tokens and a threshold: rows enter their blocks at different steps."""
    backbone = tiny_backbone(**in_blocks("sequence"))
    window = BlockWindow(4, origin="sequence")
    decoder = Decoder(window=window, cache=d.BlockCache(), **rules("dynamic", backbone))
    prompts = [[5 + 3 * row + i for i in range(1 + row % 7)] for row in range(16)]
    seen = Recorder()
    batch = as_rows_alone(decoder, backbone, prompts, 30, seen)
    assert max(len(set(one.state.block.tolist())) for one in seen.records) >= 4  # in one step
    assert batch.num_forwards == batch.num_steps.max()


@pytest.mark.parametrize("changes", [{"shift": 0}, {"shift": 1}, SPARSE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tracelock_decodes_with_every_cache_and_rows_do_not_matter(scheme, changes):
    backbone = tiny_backbone(**changes)
    components = {"window": BlockWindow(4), "cache": SCHEMES[scheme]}
    as_rows_alone(Decoder(**components, **rules("tracelock", backbone)), backbone, PROMPTS, 10)


@pytest.mark.parametrize("shift", [0, 1])
def test_features_outside_the_window_stay_those_of_the_last_forward_that_covered_them(shift):
    """Dual cache, blocks [5, 9) and [9, 13): between refreshes only the block's rows change."""
    backbone = tiny_backbone(shift=shift)
    seen = Recorder("hidden", "region", hidden_layers=(-2, -1))
    decoder = Decoder(policy=ConfidencePolicy(), window=BlockWindow(4), cache=DualCache())
    decoded(decoder, backbone, PROMPTS[:1], 8, seen)
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


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache()])
def test_a_row_that_leaves_takes_its_cache_with_it(cache):
    """Row 1 has two masks and leaves first; the others decode as they do alone."""
    backbone = tiny_backbone()
    canvas = d.prompt_canvas(PROMPTS, response_length=8, spec=backbone.spec, seeds=[0, 1, 2])
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    ids[1, -8:-2], editable[1, -8:-2] = 9, False
    decoder = Decoder(policy=ConfidencePolicy(), window=BlockWindow(4), cache=cache)
    result = decode(backbone, decoder, replace(canvas, ids=ids, editable=editable))
    assert result.num_steps.tolist() == [8, 2, 8]
    # Steps 0-1 run all rows (0: a refresh), 2-7 the two that are left.
    assert result.num_forwards == 8
    for row in (0, 2):
        alone = decoded(decoder, backbone, [PROMPTS[row]], 8)
        assert torch.equal(alone.ids[0, -8:], result.ids[row, -8:])


@pytest.mark.parametrize(
    ("changes", "components", "message"),
    [
        ({}, {"cache": d.BlockCache()}, "BlockCache is for block attention"),
        (in_blocks("sequence"), {"cache": DualCache()}, "DualCache is for full attention"),
        (
            in_blocks("sequence"),
            {"cache": d.BlockCache(), "window": BlockWindow(2, origin="sequence")},
            "BlockCache is for block attention",
        ),
        (
            in_blocks("sequence"),
            {"cache": d.SubBlockCache(), "window": BlockWindow(4, origin="sequence")},
            "SubBlockCache is for block attention, in parts of",
        ),
        ({}, {"cache": DualCache(), "window": d.SlidingWindow(4)}, "SlidingWindow has no blocks"),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused(changes, components, message):
    decoder = Decoder(policy=ConfidencePolicy(), **components)
    with pytest.raises(ValueError, match=message):
        decoded(decoder, tiny_backbone(**changes), PROMPTS[:1], 8)
    with pytest.raises(ValueError, match="horizon"):
        PrefixCache(horizon=-1)
