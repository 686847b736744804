import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lit_dlm
import lit_dlm.decoding as d
from lit_dlm.backbones.projection import acceptance_features, feature_groups
from lit_dlm.decoding import Decoder, NoQuota, SlidingWindow
from lit_dlm.decoding.decoder import with_option
from lit_dlm.system.files import write_folder
from lit_dlm.toy.python_functions import PythonFunctions
from lit_dlm.toy.sudoku import Sudoku
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.tracelock.policy import TraceLockPolicy, left_of_window_end
from lit_dlm.tracelock.scorer import CommitSettings
from lit_dlm.trajectories.capture import FeatureCapture, TrajectoryCapture
from tests.decoding.models import scorer, table_backbone
from tests.decoding.states import Recorder, as_rows_alone, decoded
from tests.fakes import EOS, MASK, PAD, TableBackbone, fake_spec

G = 12


def mixed(ids: Tensor) -> Tensor:
    """Soft logits that depend on the whole (unpadded) row."""
    real = (ids != PAD).long()
    columns = torch.arange(ids.shape[1] - 1, -1, -1)
    whole = (ids * real * (columns * 7 + 3)).sum(1, keepdim=True)
    seed = (whole[..., None] + (columns[:, None] + 1) * torch.arange(1, 9)) % 13
    return seed.float() / 2


BACKBONE = TableBackbone(mixed, 8)


def decoder(policy: TraceLockPolicy, window: SlidingWindow | None = None) -> Decoder:
    return Decoder(policy=policy, quota=NoQuota(), window=window)


@pytest.mark.parametrize(
    ("bias", "cap", "steps", "stalls"),
    [(50, 4, 3, 0), (50, 8, 2, 0), (50, None, 1, 0), (-50, 4, G, G)],
)
def test_steps_where_everything_or_nothing_is_accepted(bias, cap, steps, stalls) -> None:
    """Twelve masks: 12 / 4 = 3, ceil(12 / 8) = 2, 1 without a cap, and one by one as stalls."""
    policy = TraceLockPolicy(scorer=scorer(bias=bias), max_accept_per_step=cap)
    result = decoded(decoder(policy), BACKBONE, [[3, 4], [5, 6]], G)
    assert result.num_steps.tolist() == result.policy_forwards.tolist() == [steps, steps]
    assert result.stalled_steps.tolist() == [stalls, stalls]
    assert not (result.ids == MASK).any()
    assert result.policy_seconds is not None
    assert (result.policy_seconds > 0).all()
    assert (result.policy_seconds < result.seconds).all()  # it is part of the decode's time


@pytest.mark.parametrize(("bias", "cap", "count"), [(-50.0, 4, 1), (50.0, 2, 2)])
def test_fallback_and_cap_take_the_surest_candidates(bias, cap, count) -> None:
    policy = TraceLockPolicy(scorer=scorer(bias=bias), max_accept_per_step=cap)
    recorder = Recorder()
    decoded(decoder(policy), BACKBONE, [[3, 4]], G, recorder)
    surest = [
        sorted(record.scores.masked_fill(~record.candidates, -torch.inf)[0].topk(count)[1].tolist())
        for record in recorder.records
    ]
    assert recorder.commits() == surest
    assert len(surest) == G // count


@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_padded_row_decodes_as_alone(layout: str) -> None:
    """Scores around the threshold, so that rows take different numbers of steps."""
    policy = TraceLockPolicy(scorer=scorer(spread=8.0, bias=-5.0, layout=layout), threshold=0.5)
    prompts = [[3], [4, 5, 6], [7, 3, 4, 5, 6], [5, 5]]
    together = as_rows_alone(decoder(policy), BACKBONE, prompts, G)
    assert len(set(together.num_steps.tolist())) > 1


@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_decisions_are_those_of_the_network_on_what_is_left_of_the_windows_end(layout: str) -> None:
    """On the CPU only what a layout shows is computed; the slow way computes every column.

    It gets garbage instead of what lies right of the window.
    """
    built = scorer(spread=8.0, layout=layout)
    policy = TraceLockPolicy(scorer=built, threshold=0.7)
    original, outside = policy.decision_logits, []

    def compare(state, candidates, proposal):
        columns = torch.arange(state.ids.shape[1])
        visible = left_of_window_end(state.masked, candidates)
        outside.append(bool((~visible).any()))
        features = built.features(
            torch.where(visible[..., None, None], proposal.hidden, 77.0),
            torch.where(visible, proposal.raw_prob, 0.123),
            entropy=proposal.raw_entropy,
            margin=proposal.raw_margin,
        )
        visible &= columns >= (0 if layout == "all" else state.start)
        if state.pad_mask is not None:
            visible &= state.pad_mask
        states = torch.where(columns >= state.start, 1, 0) + state.masked.long()
        slow = built(features, states, visible).decision_logits
        fast = original(state, candidates, proposal)
        torch.testing.assert_close(fast[candidates], slow[candidates])
        return fast

    policy.decision_logits = compare  # type: ignore[method-assign]
    decoded(decoder(policy, SlidingWindow(6)), BACKBONE, [[3], [4, 5, 6], [7, 3, 4, 5, 6]], G)
    assert len(outside) > 3
    assert any(outside)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("score_on", ["raw", "filtered"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.6}])
def test_features_of_capture_and_of_decoding_are_those_of_raw_logits(
    temperature, score_on, filters
) -> None:
    """Every step is kept and shown to the policy; the slow reference reads the model's softmax."""
    built = scorer(spread=8.0, bias=-5.0)
    shown, kept, recorder = [], [], Recorder()
    function = partial(acceptance_features, built.projector, settings=built.settings.features)

    def spied(into, compute):
        def call(*args, **scores):
            into.append(compute(*args, **scores))
            return into[-1]

        return call

    def slow(record):
        state, proposal = record.state, record.proposal
        denoised = BACKBONE.denoise(state.ids, hidden_layers=(-3, -2, -1))
        probs = denoised.logits.softmax(-1)
        top = probs.topk(2, dim=-1).values
        return function(
            denoised.hidden,
            probs.gather(-1, proposal.ids[..., None])[..., 0],
            entropy=torch.special.entr(probs).sum(-1),
            margin=top[..., 0] - top[..., 1],
        )[:, state.start :].flatten(0, 1)

    features = FeatureCapture(
        function=spied(kept, function),
        hidden_layers=(-3, -2, -1),
        groups=feature_groups(built.projector.config, built.settings.features),
        projector_digest="digest",
        scores=frozenset({"entropy", "margin"}),
    )
    capture = TrajectoryCapture(vocab_size=8, level="features", features=features)
    built.features = spied(shown, built.features)  # type: ignore[method-assign]
    sampler = d.Sampler(temperature=temperature, score_on=score_on, **filters)
    policy = TraceLockPolicy(scorer=built, threshold=0.5)
    components = Decoder(policy=policy, quota=NoQuota(), sampler=sampler)
    decoded(components, BACKBONE, [[3, 4]], G, capture, recorder)
    assert len(shown) == len(kept) == len(recorder.records) > 1
    for one, other, record in zip(shown, kept, recorder.records, strict=True):
        assert torch.equal(one, other.flatten(0, 1))
        torch.testing.assert_close(one, slow(record))


def test_window_end_is_the_first_mask_behind_the_last_candidate() -> None:
    """Written cells between the last candidate and the next mask are still shown."""

    def row(text: str) -> Tensor:
        return torch.tensor([[char == "1" for char in text]])

    shown = left_of_window_end(row("0101100111"), row("0101000000"))
    assert shown.tolist() == row("1111000000").tolist()
    assert left_of_window_end(row("0101000"), row("0101000")).all()
    assert left_of_window_end(row("0111000"), row("0101000")).all()  # gated


def test_loads_from_the_exported_folder_when_it_is_used(tmp_path: Path) -> None:
    unused = decoder(TraceLockPolicy(tmp_path))
    with pytest.raises(ValueError, match=r"policy folder .*: config\.json is missing"):
        unused.check(BACKBONE)
    built = scorer(spread=8.0)
    built.save(tmp_path)
    stored, given = (
        decoded(decoder(policy), BACKBONE, [[3, 4]], G).ids
        for policy in (TraceLockPolicy(tmp_path), TraceLockPolicy(scorer=built))
    )
    assert torch.equal(stored, given)


def test_what_is_not_given_is_as_the_folder_says(tmp_path: Path) -> None:
    """A folder from before it said anything is read as the release decides."""
    built = scorer(bias=50.0)
    built.commits = CommitSettings(threshold=0.7, max_accept_per_step=None)
    built.save(tmp_path / "new")
    record = json.loads((tmp_path / "new/config.json").read_text())
    assert record.pop("commits") == {"threshold": 0.7, "max_accept_per_step": None}
    names = {"config": "config.json", "weights": "model.safetensors"}
    write_folder(tmp_path / "old", record, built.state_dict(), **names)
    for folder, options, threshold, cap, steps in (
        ("new", {}, 0.7, None, 1),
        ("new", {"threshold": 0.9}, 0.9, None, 1),
        ("new", {"max_accept_per_step": 6}, 0.7, 6, 2),
        ("old", {}, 0.99, 4, 3),
        ("old", {"max_accept_per_step": None}, 0.99, None, 1),
    ):
        policy = TraceLockPolicy(tmp_path / folder, **options)
        facts = {"threshold": threshold, "max_accept_per_step": cap, "weights": built.digest()}
        assert policy.describe() == facts
        assert decoded(decoder(policy), BACKBONE, [[3, 4]], G).num_steps.tolist() == [steps]
    assert TraceLockPolicy(scorer=built, release_compat=True).describe()["release_compat"]
    swept = with_option(decoder(TraceLockPolicy(tmp_path / "new")), "policy.threshold", 0.8)
    assert swept.policy.describe()["max_accept_per_step"] is None


@pytest.mark.parametrize(
    "options", [{"threshold": 1.2}, {"max_accept_per_step": 0}, {"path": None, "scorer": None}]
)
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TraceLockPolicy(**{"scorer": scorer(), **options})


def test_policy_of_another_backbone_is_refused() -> None:
    policy = TraceLockPolicy(scorer=scorer())
    policy.check_backbone(BACKBONE)
    policy.scorer.backbone = {"hidden_size": 3584}
    with pytest.raises(ValueError, match="hidden_size=3584, got hidden_size=4"):
        policy.check_backbone(BACKBONE)


# -- as the release counts -------------------------------------------------------------------------

RELEASED = {"release_compat": True}, {"quota": d.ScheduleQuota(64)}
GATED = {}, {"quota": NoQuota(), "settings": d.DecodeSettings(eos_gate=True)}


@pytest.mark.parametrize(
    ("components", "bias", "token", "steps"),
    [
        (RELEASED, 50.0, 5, 16),  # 64 / 4 where all is accepted
        # Nothing is: the quota stays below one until the last step, when a single mask is left.
        (RELEASED, -50.0, 5, 64),
        # All proposals end the text and all are accepted: one by fallback, then 63 / 4.
        (RELEASED, 50.0, EOS, 17),
        # Our gate, which is the loop's, leaves such a row as it is.
        (GATED, 50.0, EOS, 16),
    ],
)
def test_steps_of_a_model_that_proposes_one_token(components, bias, token, steps) -> None:
    options, others = components
    policy = TraceLockPolicy(scorer=scorer(bias=bias), **options)
    backbone = table_backbone([token] * 64, [0.9] * 64, prompt=1)
    components = Decoder(policy=policy, window=SlidingWindow(32), **others)
    result = decoded(components, backbone, [[3]], 64)
    assert result.num_steps.tolist() == [steps]
    if others is GATED[1]:
        assert result.stalled_steps.tolist() == [0]


MIXED = table_backbone([EOS, 5, 5, 5], [0.95, 0.6, 0.6, 0.6], prompt=1)
"""Column 1 proposes the end of text with more confidence than the others a word."""
TURN = table_backbone([5, 5, 6, EOS, 5, 5], [0.99] * 6, prompt=1)
TURN.spec = fake_spec(eos_ids=(EOS, 6))


def prefers_the_end(level: float, proposal: d.Proposal) -> Tensor:
    return torch.where(proposal.ids == EOS, level + 10.0, level)


def from_the_left(level: float, proposal: d.Proposal) -> Tensor:
    return level - torch.arange(proposal.prob.shape[1]).expand_as(proposal.prob)


@pytest.mark.parametrize(
    ("logits", "options", "backbone", "commits", "ours"),
    [
        # Nothing is accepted, and the end of text is the best: the release commits it, the loop's
        # gate takes the best of the others.
        (partial(prefers_the_end, -20.0), {}, MIXED, [1], [2]),
        # Cap 1 keeps the end of text, the gate then drops it, and the fallback commits it after
        # all; ours drops it first and accepts the next best.
        (partial(prefers_the_end, 10.0), {"max_accept_per_step": 1}, MIXED, [1], [2]),
        # Text, text, end of turn, end of text, all accepted under a cap of 4: the release drops
        # the last alone, our gate both ends.
        (partial(from_the_left, 50.0), {}, TURN, [1, 2, 3], [1, 2, 5, 6]),
    ],
)
def test_the_gate_of_the_release_and_ours(logits, options, backbone, commits, ours) -> None:
    gates = {"settings": d.DecodeSettings(eos_gate=True)}
    for more, components, expected in (({"release_compat": True}, {}, commits), ({}, gates, ours)):
        assert first_commit(logits, backbone, {**options, **more}, **components) == expected


def test_release_quota_takes_the_most_probable() -> None:
    logits, options = partial(from_the_left, -50.0), {"release_compat": True}
    assert first_commit(logits, MIXED, options, quota=d.FixedQuota(1)) == [1]


def first_commit(logits, backbone: TableBackbone, options: dict, **components: object) -> list[int]:
    """What the first step commits, of a policy whose decision logits are a function."""
    policy, recorder = TraceLockPolicy(scorer=scorer(), **options), Recorder()
    policy.decision_logits = lambda state, candidates, proposal: logits(proposal)
    components = {"policy": policy, "quota": NoQuota(), **components}
    decoded(Decoder(**components), backbone, [[3]], len(backbone.table) - 1, recorder)
    return recorder.commits()[0]


@pytest.mark.slow
def test_policies_that_ship_decode_their_models_well() -> None:
    """Forty problems each: nearly all right, in a third of the forwards of one by one.

    Nothing but the name is given, as in their cards.
    """
    functions = partial(PythonFunctions, allow_code_execution=True)
    for name, kind, cells, most, least in (
        ("tiny", WordProblems, 32, 11, 34),
        ("tiny", functions, 32, 4, 38),
        ("tiny-planning", Sudoku, 20, 5, 38),
    ):
        task = kind(split="test", num_examples=40, seed=3)
        decode = decoder(TraceLockPolicy(name))
        prompts = [example.text for example in task.examples()]
        done = lit_dlm.generate(name, prompts, decode=decode, response_length=cells)
        right = sum(
            task.grade(*pair).is_correct for pair in zip(task.examples(), done.texts, strict=True)
        )
        assert right >= least
        assert sum(done.num_steps) / len(done.num_steps) < most
    with pytest.raises(ValueError, match=r"none at .*tiny-pictures/outcome_policy"):
        _ = TraceLockPolicy("tiny-pictures").scorer
