from pathlib import Path

import pytest
import torch

from lit_dlm.decoding import Decoder, DecodeSettings, prompt_canvas
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy, left_of_window_end
from lit_dlm.decoding.quotas import NoQuota
from lit_dlm.decoding.windows import SlidingWindow
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from tests.fakes import MASK, TableBackbone, fake_spec

G = 12


def scorer(
    *, bias: float = 0.0, spread: float = 1.0, layout: str = "generation"
) -> AcceptanceScorer:
    """Random weights; logits are ``spread`` times the network's plus ``bias``."""
    torch.manual_seed(0)
    config = ProjectorConfig(hidden_size=4, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
    built = AcceptanceScorer(
        Projector.random_orthogonal(config),
        head=AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16),
        settings=ScorerSettings(layout=layout, hidden_layers=(-3, -2, -1)),
    )
    with torch.no_grad():
        built.head.logit_head.weight *= spread
        built.head.logit_head.bias.fill_(bias)
    return built


def hashing_backbone() -> TableBackbone:
    """Logits and hidden states that depend on the whole (unpadded) row."""

    def table(ids: torch.Tensor) -> torch.Tensor:
        real = (ids != fake_spec().pad_id).long()
        columns = torch.arange(ids.shape[1] - 1, -1, -1)
        mixed = (ids * real * (columns * 7 + 3)).sum(1, keepdim=True)
        seed = (mixed[..., None] + (columns[:, None] + 1) * torch.arange(1, 9)) % 13
        return seed.float() / 2

    return TableBackbone(table, vocab_size=8)


def decoder(policy: TraceLockPolicy, **settings: object) -> Decoder:
    return Decoder(policy=policy, quota=NoQuota(), settings=DecodeSettings(**settings))


def canvas(prompts: list[list[int]], **changes: int):
    return prompt_canvas(
        prompts, response_length=G, spec=fake_spec(), seeds=list(range(len(prompts))), **changes
    )


@pytest.mark.parametrize(("cap", "steps"), [(4, 3), (8, 2), (None, 1)])
def test_policy_that_accepts_everything_takes_length_over_cap_steps(
    cap: int | None, steps: int
) -> None:
    """Twelve masks: 12 / 4 = 3, ceil(12 / 8) = 2, and 1 without a cap."""
    policy = TraceLockPolicy(scorer=scorer(bias=50.0), max_accept_per_step=cap)
    result = decoder(policy)(hashing_backbone(), canvas([[3, 4], [5, 6]]))
    assert result.num_steps.tolist() == [steps, steps]
    assert result.policy_forwards.tolist() == [steps, steps]
    assert not (result.ids == MASK).any()


def test_policy_that_accepts_nothing_takes_one_step_per_mask() -> None:
    policy = TraceLockPolicy(scorer=scorer(bias=-50.0))
    result = decoder(policy)(hashing_backbone(), canvas([[3, 4]]))
    assert result.num_steps.tolist() == [G]
    assert result.stalled_steps.tolist() == [G]


def test_release_extremes_for_256_tokens() -> None:
    """The release's bounds with its cap of 4: 256 / 4 = 64 steps and 256 steps."""
    for bias, steps in ((50.0, 64), (-50.0, 256)):
        long = prompt_canvas([[3]], response_length=256, spec=fake_spec(), seeds=[0])
        policy = TraceLockPolicy(scorer=scorer(bias=bias))
        assert decoder(policy)(hashing_backbone(), long).num_steps.tolist() == [steps]


def test_fallback_commits_the_best_scored_candidate() -> None:
    policy = TraceLockPolicy(scorer=scorer(bias=-50.0))
    seen = []

    class Watch:
        requires = frozenset()

        def on_start(self, state):
            del state

        def on_end(self, result):
            del result

        def on_step(self, record):
            best = record.scores.masked_fill(~record.candidates, -torch.inf).argmax(1)
            seen.append(record.commit[0].nonzero()[:, 0].tolist() == best.tolist())

    decoder(policy)(hashing_backbone(), canvas([[3, 4]]), [Watch()])
    assert seen == [True] * G


def test_cap_keeps_the_surest_acceptances() -> None:
    policy = TraceLockPolicy(scorer=scorer(bias=50.0), max_accept_per_step=2)
    commits = []

    class Watch:
        requires = frozenset()

        def on_start(self, state):
            del state

        def on_end(self, result):
            del result

        def on_step(self, record):
            kept = record.scores[record.commit]
            dropped = record.scores[record.candidates & ~record.commit]
            commits.append(len(kept))
            assert not len(dropped) or kept.min() >= dropped.max()

    decoder(policy)(hashing_backbone(), canvas([[3, 4]]), [Watch()])
    assert commits == [2] * (G // 2)


@pytest.mark.parametrize("layout", ["generation", "all"])
def test_padded_row_decodes_as_alone(layout: str) -> None:
    """Scores around the threshold, so that rows take different numbers of steps."""
    policy = TraceLockPolicy(scorer=scorer(spread=8.0, bias=-5.0, layout=layout), threshold=0.5)
    prompts = [[3], [4, 5, 6], [7, 3, 4, 5, 6], [5, 5]]
    together = decoder(policy)(hashing_backbone(), canvas(prompts))
    for row, prompt in enumerate(prompts):
        alone = decoder(policy)(hashing_backbone(), canvas([prompt]))
        assert torch.equal(together.ids[row, together.start :], alone.ids[0, alone.start :])
        assert together.num_steps[row] == alone.num_steps[0]
    assert len(set(together.num_steps.tolist())) > 1


def test_decisions_ignore_what_lies_right_of_the_window() -> None:
    """Proposals and hidden states right of the window are replaced by garbage."""
    policy = TraceLockPolicy(scorer=scorer(spread=8.0), threshold=0.5)
    spied = []
    original = policy.select

    def select(state, candidates, proposal, quota):
        chosen = original(state, candidates, proposal, quota)
        outside = ~left_of_window_end(state.masked, candidates)
        garbage = torch.where(outside, 0.123, proposal.prob)
        hidden = torch.where(outside[..., None, None], 77.0, proposal.hidden)
        changed = type(proposal)(proposal.ids, garbage, proposal.entropy, proposal.margin, hidden)
        spied.append(bool(outside.any()))
        again = original(state, candidates, changed, quota)
        assert torch.equal(chosen.commit, again.commit)
        assert torch.equal(chosen.scores, again.scores)
        return chosen

    policy.select = select  # type: ignore[method-assign]
    plugs = Decoder(policy=policy, window=SlidingWindow(4), quota=NoQuota())
    plugs(hashing_backbone(), canvas([[3, 4], [5, 6]]))
    assert any(spied)


def test_window_end_is_the_first_mask_behind_the_last_candidate() -> None:
    """Written cells between the last candidate and the next mask are still shown."""

    def row(text: str) -> torch.Tensor:
        return torch.tensor([[char == "1" for char in text]])

    shown = left_of_window_end(row("0101100111"), row("0101000000"))
    assert shown.tolist() == row("1111000000").tolist()
    assert left_of_window_end(row("0101000"), row("0101000")).all()
    gated = left_of_window_end(row("0111000"), row("0101000"))
    assert gated.all()


def test_loads_from_the_exported_folder(tmp_path: Path) -> None:
    built = scorer(spread=8.0)
    built.save(tmp_path)
    results = [
        decoder(policy)(hashing_backbone(), canvas([[3, 4]])).ids
        for policy in (TraceLockPolicy(tmp_path), TraceLockPolicy(scorer=built))
    ]
    assert torch.equal(*results)


def test_description_names_the_settings_and_the_weights() -> None:
    policy = TraceLockPolicy(scorer=scorer(), threshold=0.9, max_accept_per_step=None)
    facts = policy.describe()
    assert facts["threshold"] == 0.9
    assert facts["max_accept_per_step"] is None
    assert facts["weights"] == policy.scorer.digest()


@pytest.mark.parametrize(("option", "value"), [("threshold", 1.2), ("max_accept_per_step", 0)])
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        TraceLockPolicy(scorer=scorer(), **{option: value})


def test_needs_exactly_one_source_of_weights() -> None:
    with pytest.raises(ValueError, match="exactly one of path and scorer"):
        TraceLockPolicy()


def test_policy_of_another_backbone_is_refused() -> None:
    policy = TraceLockPolicy(scorer=scorer())
    policy.check_backbone(hashing_backbone())
    policy.scorer.backbone = {"hidden_size": 3584}
    with pytest.raises(ValueError, match="hidden_size=3584, got hidden_size=4"):
        policy.check_backbone(hashing_backbone())
