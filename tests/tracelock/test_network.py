from dataclasses import replace

import pytest
import torch

from lit_dlm.tracelock.network import (
    AcceptanceConfig,
    AcceptanceHead,
    accepted,
    frontier_distance,
    response_offsets,
    sinusoids,
)

SMALL = AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=32, dropout=0.0)


def small_head(**changes: object) -> AcceptanceHead:
    torch.manual_seed(0)
    head = AcceptanceHead(5, replace(SMALL, **changes)).eval()
    torch.nn.init.normal_(head.tau_head.weight)
    return head


def inputs(B: int = 2, R: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(B, R, 5, generator=generator)
    state = torch.tensor([0, 0, 1, 2, 2, 2][:R]).expand(B, R)
    return features, state, torch.ones(B, R, dtype=torch.bool)


def test_published_sizes_give_6_340_226_parameters() -> None:
    """in 833*384+384 = 320,256; table 257*384 = 98,688; token 384; five layers of 1,183,872
    (qkv 443,520, out 147,840, ffn 295,680 + 295,296, norms 1,536); norm 768; two heads 770."""
    config = AcceptanceConfig(positions="learned", use_state_embedding=False)
    head = AcceptanceHead(833, config)
    assert sum(p.numel() for p in head.parameters()) == 6_340_226


def test_decision_is_logit_minus_the_threshold_of_its_row() -> None:
    output = small_head()(*inputs())
    assert output.tau.abs().min() > 0
    torch.testing.assert_close(output.decision_logits, output.logits - output.tau[:, None])


@pytest.mark.parametrize("positions", ["frontier", "learned"])
def test_invisible_and_padded_positions_change_nothing(positions: str) -> None:
    """Values that are no numbers, positions left out, and two padded columns in front."""
    head = small_head(positions=positions)
    features, state, visible = inputs()
    whole = head(features, state, visible)
    pad = torch.nn.functional.pad
    padded = head(
        pad(features, (0, 0, 2, 0), value=9.0),
        pad(state, (2, 0)),
        pad(visible, (2, 0), value=False),
    )
    torch.testing.assert_close(padded.logits[:, 2:], whole.logits)
    visible[:, 4:] = False
    base = head(features, state, visible)
    short = head(features[:, :4], state[:, :4], visible[:, :4])
    torch.testing.assert_close(base.logits[:, :4], short.logits)
    features[:, 4:] = torch.nan
    other = head(features, state, visible)
    assert torch.equal(base.logits[:, :4], other.logits[:, :4])
    assert torch.equal(base.tau, other.tau)


def test_every_visible_position_informs_every_other() -> None:
    features, state, visible = inputs(B=1)
    small_head()(features.requires_grad_(), state, visible).logits[0, 0].backward()
    assert features.grad is not None
    assert (features.grad[0].abs().sum(-1) > 0).all()


def test_positions_count_from_the_leftmost_mask_or_from_the_prompt_to_the_table_end() -> None:
    is_gen = torch.tensor([[False, False, True, False, True], [True, True, False, False, False]])
    assert frontier_distance(is_gen).tolist() == [[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    state = torch.tensor([[0, 0, 1, 2, 2, 2]])
    assert response_offsets(state).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert response_offsets(torch.ones(1, 400).long()).amax() == 256


@pytest.mark.parametrize("positions", ["frontier", "learned"])
def test_packed_features_score_alike(positions: str) -> None:
    """States with two, none and all of six positions visible; the first has a gap."""
    head = small_head(positions=positions)
    features, state, _ = inputs(B=3)
    visible = torch.tensor([[0, 1, 0, 1, 0, 0], [0] * 6, [1] * 6]).bool()
    whole = head(features, state, visible)
    packed = head(features[visible], state, visible)
    torch.testing.assert_close(packed.logits[visible], whole.logits[visible])
    torch.testing.assert_close(packed.tau, whole.tau)
    assert not packed.logits[~visible].any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = [head(rows, state, visible) for rows in (features, features[visible])]
    assert {one.dtype for out in rounded for one in (out.logits, out.tau)} == {torch.float32}
    for out in rounded:
        torch.testing.assert_close(out.logits[visible], whole.logits[visible], atol=0.1, rtol=0)


def test_sinusoids_at_zero_and_quarter_period() -> None:
    """Distance 0: sines 0, cosines 1. The first frequency is 1: sin(-1), cos(-1)."""
    table = sinusoids(torch.tensor([0, -1]), 4)
    assert table[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    torch.testing.assert_close(table[1, 0], torch.sin(torch.tensor(-1.0)))
    torch.testing.assert_close(table[1, 3], torch.cos(torch.tensor(-1e-4)))


@pytest.mark.parametrize(("option", "value"), [("width", 10), ("num_layers", 0), ("dropout", 1.0)])
def test_bad_sizes_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        small_head(**{option: value})


def test_accepted_are_at_or_above_the_threshold_and_the_cap_keeps_the_best() -> None:
    """Threshold 0.5 is logit 0; of three accepted the two largest stay."""
    logits = torch.tensor([[0.0, 2.0, -0.1, 1.0, 9.0]])
    candidates = torch.tensor([[True, True, True, True, False]])
    free = accepted(logits, candidates, threshold=0.5)
    capped = accepted(logits, candidates, threshold=0.5, max_accept=2)
    assert free.tolist() == [[True, True, False, True, False]]
    assert capped.tolist() == [[False, True, False, True, False]]
