from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from lit_dlm.decoding import (
    Decoder,
    DecodeSettings,
    FixedQuota,
    Sampler,
    ScheduleQuota,
    prompt_canvas,
)
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy, left_of_window_end
from lit_dlm.decoding.windows import NoQuota, SlidingWindow
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.projection import Projector, ProjectorConfig, acceptance_features, feature_groups
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.trajectories.capture import FeatureCapture, TrajectoryCapture
from tests.decoding.states import Recorder, as_rows_alone
from tests.fakes import EOS, MASK, TableBackbone, fake_spec

G = 12


def scorer(
    *, bias: float = 0.0, spread: float = 1.0, layout: str = "generation"
) -> AcceptanceScorer:
    """Random weights; logits are ``spread`` times the network's plus ``bias``."""
    torch.manual_seed(0)
    config = ProjectorConfig(hidden_size=4, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
    head = AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16)
    built = AcceptanceScorer(
        Projector.random_orthogonal(config),
        head=head,
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


@pytest.mark.parametrize(
    ("bias", "cap", "steps", "stalls"),
    [(50, 4, 3, 0), (50, 8, 2, 0), (50, None, 1, 0), (-50, 4, G, G)],
)
def test_steps_where_everything_or_nothing_is_accepted(bias, cap, steps, stalls) -> None:
    """Twelve masks: 12 / 4 = 3, ceil(12 / 8) = 2, 1 without a cap, and one by one as stalls."""
    policy = TraceLockPolicy(scorer=scorer(bias=bias), max_accept_per_step=cap)
    result = decoder(policy)(hashing_backbone(), canvas([[3, 4], [5, 6]]))
    assert result.num_steps.tolist() == result.policy_forwards.tolist() == [steps, steps]
    assert result.stalled_steps.tolist() == [stalls, stalls]
    assert not (result.ids == MASK).any()


def test_fallback_commits_the_best_scored_candidate() -> None:
    recorder = Recorder()
    decoder(TraceLockPolicy(scorer=scorer(bias=-50.0)))(
        hashing_backbone(), canvas([[3, 4]]), [recorder]
    )
    best = [
        record.scores.masked_fill(~record.candidates, -torch.inf).argmax(1).tolist()
        for record in recorder.records
    ]
    assert recorder.commits() == best
    assert len(best) == G


def test_cap_keeps_the_surest_acceptances() -> None:
    policy, recorder = TraceLockPolicy(scorer=scorer(bias=50.0), max_accept_per_step=2), Recorder()
    decoder(policy)(hashing_backbone(), canvas([[3, 4]]), [recorder])
    for record in recorder.records:
        dropped = record.scores[record.candidates & ~record.commit]
        assert not len(dropped) or record.scores[record.commit].min() >= dropped.max()
    assert [len(cells) for cells in recorder.commits()] == [2] * (G // 2)


@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_padded_row_decodes_as_alone(layout: str) -> None:
    """Scores around the threshold, so that rows take different numbers of steps."""
    policy = TraceLockPolicy(scorer=scorer(spread=8.0, bias=-5.0, layout=layout), threshold=0.5)
    prompts = [[3], [4, 5, 6], [7, 3, 4, 5, 6], [5, 5]]
    together = as_rows_alone(decoder(policy), hashing_backbone(), prompts, G)
    assert len(set(together.num_steps.tolist())) > 1


@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_decisions_are_those_of_the_network_on_whole_canvases(layout: str) -> None:
    """On the CPU only what a layout shows is computed; the slow way computes every column."""
    built = scorer(spread=8.0, layout=layout)
    policy = TraceLockPolicy(scorer=built, threshold=0.7)
    seen = []

    def compare(state, candidates, proposal):
        features = built.features(
            proposal.hidden,
            proposal.raw_prob,
            entropy=proposal.raw_entropy,
            margin=proposal.raw_margin,
        )
        columns = torch.arange(state.ids.shape[1])
        visible = left_of_window_end(state.masked, candidates)
        visible &= columns >= (0 if layout == "all" else state.start)
        if state.pad_mask is not None:
            visible &= state.pad_mask
        states = torch.where(columns >= state.start, 1, 0) + state.masked.long()
        slow = built(features, states, visible).decision_logits
        fast = original(state, candidates, proposal)
        torch.testing.assert_close(fast[candidates], slow[candidates])
        seen.append(int(candidates.sum()))
        return fast

    original = policy.decision_logits
    policy.decision_logits = compare  # type: ignore[method-assign]
    plugs = Decoder(policy=policy, window=SlidingWindow(6), quota=NoQuota())
    plugs(hashing_backbone(), canvas([[3], [4, 5, 6], [7, 3, 4, 5, 6]]))
    assert len(seen) > 3


def test_decisions_ignore_what_lies_right_of_the_window() -> None:
    """Proposals and hidden states right of the window are replaced by garbage."""
    policy = TraceLockPolicy(scorer=scorer(spread=8.0), threshold=0.5)
    spied = []
    original = policy.select

    def select(state, candidates, proposal, quota):
        chosen = original(state, candidates, proposal, quota)
        outside = ~left_of_window_end(state.masked, candidates)
        garbage = torch.where(outside, 0.123, proposal.raw_prob)
        hidden = torch.where(outside[..., None, None], 77.0, proposal.hidden)
        changed = replace(proposal, raw_prob=garbage, hidden=hidden)
        spied.append(bool(outside.any()))
        again = original(state, candidates, changed, quota)
        assert torch.equal(chosen.commit, again.commit)
        assert torch.equal(chosen.scores, again.scores)
        return chosen

    policy.select = select  # type: ignore[method-assign]
    plugs = Decoder(policy=policy, window=SlidingWindow(4), quota=NoQuota())
    plugs(hashing_backbone(), canvas([[3, 4], [5, 6]]))
    assert any(spied)


SAMPLERS = [
    {"temperature": temperature, "score_on": score_on, **filters}
    for temperature, score_on, filters in product(
        (0.0, 1.0, 0.3),
        ("raw", "filtered"),
        ({}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.6}),
    )
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_features_of_capture_and_of_decoding_are_those_of_raw_logits(sampler) -> None:
    """Every step is kept and shown to the policy; the slow reference reads the model's softmax."""
    built = scorer(spread=8.0, bias=-5.0)
    shown, kept, backbone = [], [], hashing_backbone()
    function = partial(acceptance_features, built.projector, settings=built.settings.features)

    def spied(into, compute):
        def call(*args, **scores):
            into.append(compute(*args, **scores))
            return into[-1]

        return call

    def slow(record):
        state, proposal = record.state, record.proposal
        denoised = backbone.denoise(state.ids, hidden_layers=(-3, -2, -1))
        probs = denoised.logits.softmax(-1)
        top = probs.topk(2, dim=-1).values
        return function(
            denoised.hidden,
            probs.gather(-1, proposal.ids[..., None])[..., 0],
            entropy=torch.special.entr(probs).sum(-1),
            margin=top[..., 0] - top[..., 1],
        )[:, state.start :].flatten(0, 1)

    recorder = Recorder()
    capture = TrajectoryCapture(
        vocab_size=8,
        level="features",
        features=FeatureCapture(
            function=spied(kept, function),
            hidden_layers=(-3, -2, -1),
            groups=feature_groups(built.projector.config, built.settings.features),
            projector_digest="digest",
            step_ratio=1.0,
            scores=frozenset({"entropy", "margin"}),
        ),
    )
    built.features = spied(shown, built.features)  # type: ignore[method-assign]
    policy = TraceLockPolicy(scorer=built, threshold=0.5)
    plugs = Decoder(policy=policy, quota=NoQuota(), sampler=Sampler(**sampler))
    plugs(backbone, canvas([[3, 4]]), [capture, recorder])
    assert len(shown) == len(kept) == len(recorder.records) > 1
    for one, other, record in zip(shown, kept, recorder.records, strict=True):
        assert torch.equal(one, other.flatten(0, 1))
        torch.testing.assert_close(one, slow(record))


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


@pytest.mark.parametrize(
    "options", [{"threshold": 1.2}, {"max_accept_per_step": 0}, {"path": None, "scorer": None}]
)
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TraceLockPolicy(**{"scorer": scorer(), **options})


def test_a_missing_folder_is_no_matter_before_it_is_used(tmp_path: Path) -> None:
    unused = decoder(TraceLockPolicy(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"policy folder .*none: config\.json is missing"):
        unused.check(hashing_backbone())


def test_policy_of_another_backbone_is_refused() -> None:
    policy = TraceLockPolicy(scorer=scorer())
    policy.check_backbone(hashing_backbone())
    policy.scorer.backbone = {"hidden_size": 3584}
    with pytest.raises(ValueError, match="hidden_size=3584, got hidden_size=4"):
        policy.check_backbone(hashing_backbone())


# -- as the release counts -------------------------------------------------------------------------


def released(policy: TraceLockPolicy, *, steps: int = 256) -> Decoder:
    """Its window, quota and rules; the gate is the policy's."""
    return Decoder(policy=policy, window=SlidingWindow(128), quota=ScheduleQuota(steps))


def long_canvas(length: int = 256):
    return prompt_canvas([[3]], response_length=length, spec=fake_spec(), seeds=[0])


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "steps"), [(50.0, 64), (-50.0, 256)])
def test_release_extremes_with_its_schedule(bias: float, steps: int) -> None:
    """256 / 4 = 64 steps where all is accepted; 256 where nothing is: the quota stays below one
    until the last step, when a single mask is left."""
    policy = TraceLockPolicy(scorer=scorer(bias=bias), release_compat=True)
    assert released(policy)(one_token_backbone(5), long_canvas()).num_steps.tolist() == [steps]


def one_token_backbone(token: int) -> TableBackbone:
    """Proposes one token everywhere."""
    table = torch.zeros(257, 8)
    table[:, token] = 9.0
    return TableBackbone(table)


def test_release_gate_lets_the_fallback_open_it() -> None:
    """All proposals end the text and all are accepted: one by fallback, then 255 / 4 = 64."""
    policy = TraceLockPolicy(scorer=scorer(bias=50.0), release_compat=True)
    assert released(policy)(one_token_backbone(EOS), long_canvas()).num_steps.tolist() == [65]


def test_our_gate_keeps_a_row_whose_proposals_all_end_the_text() -> None:
    """The loop's gate leaves such a row as it is: 256 / 4 steps and no fallback."""
    policy = TraceLockPolicy(scorer=scorer(bias=50.0))
    plugs = Decoder(
        policy=policy,
        window=SlidingWindow(128),
        quota=NoQuota(),
        settings=DecodeSettings(eos_gate=True),
    )
    result = plugs(one_token_backbone(EOS), long_canvas())
    assert result.num_steps.tolist() == [64]
    assert result.stalled_steps.tolist() == [0]


def mixed_backbone() -> TableBackbone:
    """Column 1 proposes the end of text with more confidence than the others a word."""
    table = torch.zeros(5, 8)
    table[:, 5] = 3.0
    table[1, EOS] = 6.0
    return TableBackbone(table)


def first_commit(decoder: Decoder, backbone=None, canvas=None) -> list[int]:
    recorder = Recorder()
    decoder(backbone or mixed_backbone(), canvas or long_canvas(4), [recorder])
    return recorder.commits()[0]


def scored_by_hand(
    logits: Callable[..., torch.Tensor], *, release_compat: bool, **options: object
) -> TraceLockPolicy:
    """A policy whose decision logits are a function of the proposal."""
    policy = TraceLockPolicy(scorer=scorer(), release_compat=release_compat, **options)
    policy.decision_logits = lambda state, candidates, proposal: logits(proposal)
    return policy


def prefers_the_end(level: float) -> Callable[..., torch.Tensor]:
    return lambda proposal: torch.where(proposal.ids == EOS, level + 10.0, level)


def from_the_left(level: float) -> Callable[..., torch.Tensor]:
    return lambda proposal: (
        level - torch.arange(proposal.prob.shape[1]).float().expand_as(proposal.prob)
    )


@pytest.mark.parametrize(
    ("level", "options"),
    [
        # Nothing is accepted, and the end of text is the best: the release commits it, the loop's
        # gate takes the best of the others.
        (-20.0, {}),
        # Cap 1 keeps the end of text, the gate then drops it, and the fallback commits it after
        # all; ours drops it first and accepts the next best.
        (10.0, {"max_accept_per_step": 1}),
    ],
)
def test_the_release_commits_an_end_of_text_that_our_gate_holds_back(level, options) -> None:
    one, two = (
        scored_by_hand(prefers_the_end(level), release_compat=compat, **options)
        for compat in (True, False)
    )
    gated = DecodeSettings(eos_gate=True)
    assert first_commit(Decoder(policy=one, quota=NoQuota())) == [1]
    assert first_commit(Decoder(policy=two, quota=NoQuota(), settings=gated)) == [2]


def test_release_gate_knows_the_end_of_text_and_no_end_of_turn() -> None:
    """Text, text, end of turn, end of text, all accepted under a cap of 4: it drops the last."""
    end_of_turn = 6
    table = torch.zeros(8, 8)
    for column, token in enumerate([5, 5, end_of_turn, EOS, 5, 5], start=2):
        table[column, token] = 9.0
    backbone = TableBackbone(table)
    backbone.spec = fake_spec(eos_ids=(EOS, end_of_turn))
    policy = scored_by_hand(from_the_left(50.0), release_compat=True)
    canvas = prompt_canvas([[3, 3]], response_length=6, spec=backbone.spec, seeds=[0])
    assert first_commit(Decoder(policy=policy, quota=NoQuota()), backbone, canvas) == [2, 3, 4]


def test_release_quota_takes_the_most_probable() -> None:
    policy = scored_by_hand(from_the_left(-50.0), release_compat=True)
    assert first_commit(Decoder(policy=policy, quota=FixedQuota(1))) == [1]


def test_the_description_names_the_settings_and_the_weights() -> None:
    policy = TraceLockPolicy(scorer=scorer(), threshold=0.9, max_accept_per_step=None)
    facts = {"threshold": 0.9, "max_accept_per_step": None, "weights": policy.scorer.digest()}
    assert policy.describe() == facts
    assert TraceLockPolicy(scorer=scorer(), release_compat=True).describe()["release_compat"]


def test_policy_time_is_part_of_the_decode_time() -> None:
    policy = TraceLockPolicy(scorer=scorer(bias=50.0))
    result = decoder(policy)(hashing_backbone(), canvas([[3, 4], [5, 6]]))
    assert result.policy_seconds is not None
    assert (result.policy_seconds > 0).all()
    assert (result.policy_seconds < result.seconds).all()
