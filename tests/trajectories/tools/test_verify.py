"""Verification finds what was changed, names it, and calls nothing else changed."""

import os
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from lit_dlm import decoding
from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.backbones.export import export_model
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota
from lit_dlm.decoding.windows import SteppedBlockWindow
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.store.provenance import run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.tools.execution import canvas_of, free_running, teacher_forced
from lit_dlm.trajectories.tools.verify import Execution, verify
from tests.components import AlternatePolicy
from tests.fakes import EOS, MASK, TableBackbone, fake_spec, logits_for
from tests.trajectories.decoded_sets import DECODERS, LENGTH, NUM_TEXTS, decoded_set, write_set
from tests.trajectories.samples import flip, read_all, small_record

pytestmark = pytest.mark.slow  # decodes are made and executed again

ONE = DECODERS["confidence"]  # a token a step


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backbone):
    return decoded_set(tmp_path_factory.mktemp("set") / "set", DECODERS, backbone)


@pytest.fixture(scope="module")
def small(tmp_path_factory, backbone):
    decoders = {name: DECODERS[name] for name in ("confidence", "drawn")}
    return decoded_set(tmp_path_factory.mktemp("small") / "set", decoders, backbone)


@pytest.fixture(scope="module")
def records(small):
    """Three rows of one batch; every step writes one token, so there are 12 steps."""
    return read_all(small)[:3]


def check(folder, backbone, *, level=3, sample=None, **options):
    execution = Execution(backbone=backbone, **options)
    return verify(shards_in(folder), level=level, execution=execution, sample=sample)


def assert_exact(folder, backbone, *, num_methods=1, **options):
    found = {record.uid: record for record in read_all(folder)}
    assert len(found) == NUM_TEXTS * num_methods
    for level in (3, 4):
        result = check(folder, backbone, level=level, **options)
        assert (result.problems, result.differences, result.failed) == ([], [], False)
        assert result.counts == {"exact": len(found), "explained": 0, "failed": 0}
        for verdict in result.verdicts:
            assert verdict.num_checked == verdict.num_agreeing == found[verdict.uid].num_steps
            assert verdict.token_agreement == 1.0


def test_the_same_settings_are_exact_for_every_kind_of_decoder(folder, backbone):
    """Block counters, schedules, idle steps, noise, gates, fills and sliding windows."""
    tokenizer = load_tokenizer("tiny")
    assert_exact(folder, backbone, num_methods=len(DECODERS), tokenizer=tokenizer)
    # A sample is spread over the whole set.
    uids = {verdict.uid for verdict in check(folder, backbone, sample=4).verdicts}
    assert len({uid.partition("@")[2] for uid in uids}) > 2
    assert len(uids) == 4


def test_rows_of_a_block_model_in_different_blocks_are_exact(tmp_path):
    """The decoder names no window, its record that of the model; the rows drift apart."""
    block = HFBackbone("tiny", spec_overrides={"attention": "block", "block_size": 4})
    components = {
        "policy": decoding.DynamicPolicy(0.5),
        "quota": decoding.EvenQuota(steps_per_block=4),
    }
    bare = Decoder(cache=decoding.BlockCache(), **components)
    folder = decoded_set(tmp_path / "set", {"cached": bare.on(block.spec)}, block, batch_size=4)
    assert_exact(folder, block)
    records = read_all(folder)
    assert len({record.num_steps for record in records}) > 1
    for execute in (teacher_forced, free_running):
        assert [verdict.outcome for verdict in execute(block, bare, records)] == ["exact"] * 4


def test_changed_weights_and_tokenizers_are_named(small, backbone, tmp_path):
    other, tokenizer = load_backbone("tiny"), load_tokenizer("tiny")
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    export_model(other, tmp_path / "other")
    loaded = HFBackbone(str(tmp_path / "other"))
    tokenizer.add_tokens(["zzz"])
    recorded, now = (b.describe()["weights_sha256"] for b in (backbone, loaded))
    for level in (3, 4):
        result = check(small, loaded, level=level)
        assert f'model.weights digest: "{recorded}" recorded, "{now}" now' in result.differences
        assert result.counts["failed"] > 0
    result = check(small, backbone, tokenizer=tokenizer, sample=1)
    assert [line.partition(":")[0] for line in result.differences] == ["tokenizer digest"]
    assert result.counts["failed"] == 0
    assert result.failed


def test_a_changed_token_fails_its_own_step_alone(backbone, records):
    """The last committed token has no later step to mislead."""
    T = G = LENGTH
    last, tokens = int(records[1].commit_step.argmax()), records[1].tokens.copy()
    tokens[last] += 1 if tokens[last] < 400 else -1
    changed = [records[0], replace(records[1], tokens=tokens, signals={}), records[2]]
    forced, free = (execute(backbone, ONE, changed) for execute in (teacher_forced, free_running))
    for verdicts in (forced, free):
        assert [verdict.outcome for verdict in verdicts] == ["exact", "failed", "exact"]
    assert forced[1].differing_steps[0] == T - 1
    assert (forced[1].num_checked, forced[1].num_agreeing) == (T, T - 1)
    assert f"position {last}: token {tokens[last]} recorded, token " in forced[1].reason
    assert free[1].token_agreement == pytest.approx((G - 1) / G)


def test_swapped_steps_and_a_step_too_many_or_too_few_fail(backbone, records):
    record, T = records[0], LENGTH
    step = record.commit_step
    swapped = replace(record, commit_step=np.select([step == 0, step == T - 1], [T - 1, 0], step))
    longer = replace(record, num_steps=T + 1)
    cut = replace(
        record,
        num_steps=T - 1,
        commit_step=np.where(step == T - 1, -1, step),
        tokens=np.where(step == T - 1, record.mask_id, record.tokens),
        status="step_limit",
        signals={},
    )
    (alone,) = free_running(backbone, ONE, [longer])
    verdicts = [teacher_forced(backbone, ONE, [r])[0] for r in (swapped, longer, cut)]
    assert {verdict.outcome for verdict in (alone, *verdicts)} == {"failed"}
    assert verdicts[0].differing_steps[0] == 0
    assert "the record stops at 11 steps, the loop has 12" in verdicts[2].reason


def test_a_window_with_steps_of_its_own_is_the_budget_of_a_record():
    """Blocks of one cell and two steps each: the second cell is written in step 2 of 4."""
    decoder = Decoder(policy=decoding.ConfidencePolicy(), window=SteppedBlockWindow(1, steps=4))
    backbone = TableBackbone(logits_for([3, 4, 5], [0.5, 0.9, 0.8]))
    whole = table_record([4, 5], [0, 2])
    cut = table_record([4, MASK], [0, -1], num_steps=2, status="step_limit")
    verdicts = teacher_forced(backbone, decoder, [whole, cut])
    assert [verdict.outcome for verdict in verdicts] == ["exact", "failed"]
    assert "the record stops at 2 steps, the loop has 4" in verdicts[1].reason


table_record = partial(small_record, mask_id=MASK, vocab_size=8)
_AT_90 = {"policy": decoding.ThresholdPolicy(0.9), "quota": NoQuota()}
FILLING = Decoder(**_AT_90, settings=DecodeSettings(eos_rule="fill"))
CELLS = [EOS, 5, 6, 4, 5, 6]  # what the model proposes, with the probabilities of a case


@pytest.mark.parametrize(
    ("decoder", "probs", "tokens", "steps", "margin", "outcomes"),
    [
        # The loop commits 0, 1, 2. The record differs at step 0 by 0.700 - 0.695, below 0.01; from
        # there, with 1 committed, it takes 0, as the loop does.
        (ONE, [0.7, 0.695, 0.3], [EOS, 5, 6], [1, 0, 2], 0.005, ["explained"] * 2),
        (ONE, [0.7, 0.685, 0.3], [EOS, 5, 6], [1, 0, 2], 0.015, ["failed"] * 2),
        # Position 2 first: 0.700 - 0.300.
        (ONE, [0.7, 0.695, 0.3], [EOS, 5, 6], [1, 2, 0], 0.4, ["failed"] * 2),
        # The record committed both at once, 0.899 under the threshold as well.
        (Decoder(**_AT_90), [0.899, 0.95], [EOS, 5], [0, 0], 0.001, ["explained"] * 2),
        # It committed the end of text at 0 at once, so 2 was filled in step 0 as well. The loop
        # commits 1 only: two positions differ, and the fill follows from the near tie.
        (FILLING, [0.899, 0.95, 0.3], [EOS, 5, EOS], [0, 0, 0], 0.001, ["explained"] * 2),
        # The record has all the other way round, 0.001 apart. Each step that differs is a near tie,
        # but they are 5 of 6 steps (the last has one choice left), which explains nothing; in a
        # free run they may follow from the first.
        (
            ONE,
            [0.190, 0.189, 0.188, 0.187, 0.186, 0.185],
            CELLS,
            [5, 4, 3, 2, 1, 0],
            0.005,
            ["failed", "explained"],
        ),
    ],
)
def test_near_ties_are_explained_by_their_margin(decoder, probs, tokens, steps, margin, outcomes):
    backbone = TableBackbone(logits_for([3, *CELLS[: len(probs)]], [0.5, *probs]))
    forced, free = (
        execute(backbone, decoder, [table_record(tokens, steps)])[0]
        for execute in (teacher_forced, free_running)
    )
    assert [forced.outcome, free.outcome] == outcomes
    assert [forced.margin, free.margin] == pytest.approx([margin, margin], abs=1e-5)
    assert forced.differing_steps == ([0, 1, 2, 3, 4] if tokens is CELLS else [0])


def test_a_near_tie_of_tokens_is_explained():
    """Token 4 has 0.400, token 5 has 0.396, the rest of 0.204 is shared by others."""
    probs = torch.full((3, 8), 0.204 / 4)
    probs[:, 4], probs[:, 5] = 0.400, 0.396
    probs[:, [MASK, 1]] = 1e-9
    records = [table_record([4, 5], [0, 1]), table_record([4, 6], [0, 1])]
    near, far = teacher_forced(TableBackbone(probs.log()), ONE, records)
    assert [near.outcome, far.outcome] == ["explained", "failed"]
    assert [near.margin, far.margin] == pytest.approx([0.004, 0.400 - 0.051], abs=1e-5)


@pytest.mark.parametrize(
    ("threshold", "edited", "outcome", "margin"),
    [
        (0.5, True, "exact", 0.0),
        (0.5, False, "explained", 0.005),
        (0.4, False, "failed", 0.105),
        (0.51, True, "explained", 0.005),
        (0.6, True, "failed", 0.095),
    ],
)
def test_near_ties_of_edits_are_explained(threshold, edited, outcome, margin):
    """Beside token 6 token 7 has 0.505 where 5 stands, in the step that the full block gets."""

    def table(ids):
        first = logits_for([3, 7, 6], [0.5, 0.505, 0.9])
        plain = logits_for([3, 5, 6], [0.5, 0.9, 0.9])
        return torch.where((ids[:, 2] == 6)[:, None, None], first, plain)

    backbone = TableBackbone(table, 8)
    backbone.spec = fake_spec(edits_tokens=True)
    policy = decoding.TokenEditingPolicy(edit_threshold=threshold, max_post_steps=1)
    record = replace(table_record([5, 6], [0, 0]), num_steps=2)
    if edited:
        record = replace(table_record([7, 6], [1, 0]), superseded=np.array([[0, 0, 5]]))
    (verdict,) = teacher_forced(backbone, Decoder(policy=policy, quota=NoQuota()), [record])
    assert (verdict.outcome, verdict.num_checked) == (outcome, 2)
    assert verdict.margin == pytest.approx(margin, abs=1e-5)


def test_given_cells_are_fed_and_never_decided():
    backbone = TableBackbone(logits_for([3, 4, 5, 6], [0.5, 0.9, 0.8, 0.7]))
    record = table_record([4, 7, 6], [0, -1, 1], given=[False, True, False])
    for execute in (teacher_forced, free_running):
        assert execute(backbone, ONE, [record])[0].outcome == "exact"
        assert backbone.canvases[0].tolist() == [[3, MASK, 7, MASK]]
        backbone.canvases.clear()


def test_what_cannot_be_executed_is_refused_by_name(small, backbone, records):
    for name, value in (("mask_id", 7), ("vocab_size", 999)):
        with pytest.raises(ValueError, match=f"{records[0].uid}.* got .*{value}"):
            canvas_of([replace(records[0], **{name: value})], backbone)
    with pytest.raises(ValueError, match="level"):
        verify(shards_in(small), level=5)


def test_seeds_that_do_not_follow_from_the_runs_seed_are_named(small, backbone, records, tmp_path):
    changed = [*records[:2], replace(records[2], seed=5)]
    folder = write_set(tmp_path / "set", changed, run_of_shard(shards_in(small)[0])[0])
    (line,) = check(folder, backbone).differences
    assert line.startswith("seed: 1 records, the first 'task/test/2@confidence', hold another seed")


@pytest.mark.parametrize("size", [-1, 0, 2])
def test_any_batch_size_of_a_strange_run_executes_all_records(small, backbone, tmp_path, size):
    run, _ = run_of_shard(shards_in(small)[0])
    run = replace(run, hardware={**run.hardware, "batch_size": size})
    result = check(write_set(tmp_path / "set", read_all(small), run), backbone)
    assert result.counts["exact"] == len(read_all(small))


def test_levels_0_to_2_find_what_they_are_for(small, tmp_path):
    """Flipped bits of a block, a tar header and the end, a cut file, forged and lost files."""
    (shard,) = shards_in(small)
    twin = shutil.copytree(small, tmp_path / "twin")  # the same uids in another folder are no harm
    for level in range(3):
        assert verify([shard, *shards_in(twin)], level=level).problems == []
    side = TrajectoryShardReader(small).side_file(shard)
    block, beside = side.blocks[1], f"{shard.name}.json"

    def forged(folder):
        path = folder / beside
        path.write_text(path.read_text().replace(side.sha256, "0" * 64))

    damages = {
        (0, block.key): lambda f: flip(f / shard.name, block.offset + block.size // 2),
        (0, "finds 1 of 2 blocks"): lambda f: flip(f / shard.name, block.offset - 362),
        (0, "expected .* bytes"): lambda f: os.truncate(f / shard.name, side.bytes - 2000),
        (0, "needs its side file"): lambda f: (f / beside).unlink(),
        (2, "sha256"): lambda f: flip(f / shard.name, -1),
        (2, "the manifest: sha256"): forged,
        (2, "there is no manifest"): lambda f: (f / "manifest.json").unlink(),
        (2, "but it is gone"): lambda f: [(f / name).unlink() for name in (beside, shard.name)],
    }
    for number, ((level, expected), damage) in enumerate(damages.items()):
        copy = shutil.copytree(small, tmp_path / str(number))
        damage(copy)
        paths = shards_in(copy) or [copy / shard.name]
        assert re.search(expected, "\n".join(verify(paths, level=level).problems)), expected
        if level == 2 and shards_in(copy):
            assert verify(paths, level=1).problems == []


def test_another_record_under_the_same_uid_is_not_authentic(small, tmp_path):
    """Whole, well-formed and from the same run, but not what the manifest lists."""
    records, (shard,) = read_all(small), shards_in(small)
    records[0] = replace(records[0], seed=1)
    forged = write_set(tmp_path / "set", records, run_of_shard(shard)[0])
    shutil.copy(small / "manifest.json", forged)
    assert verify(shards_in(forged), level=1).problems == []
    assert any("sha256" in line for line in verify(shards_in(forged), level=2).problems)


def test_a_policy_from_outside_of_the_package_decides_again(backbone, tmp_path):
    decoder = Decoder(policy=AlternatePolicy(), window=decoding.FullWindow())
    folder = decoded_set(tmp_path / "set", {"alternate": decoder}, backbone)
    assert_exact(folder, backbone, component_modules=["tests.components"])
    with pytest.raises(ValueError, match=r"method 'alternate': .* --components tests\.components"):
        check(folder, backbone)


def test_a_learned_policy_is_loaded_by_its_digest_and_decides_again(backbone, tmp_path):
    """Its window, its rows and its features are rebuilt from the recorded canvases alone."""
    torch.manual_seed(0)
    scorer = AcceptanceScorer(
        Projector(ProjectorConfig(hidden_size=96, num_snapshots=2, hidden_rank=4, delta_rank=2)),
        head=AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16),
        settings=ScorerSettings(hidden_layers=(-2, -1)),
    )
    scorer.save(tmp_path / "policy")
    decoder = Decoder(
        policy=TraceLockPolicy(tmp_path / "policy", threshold=0.5, max_accept_per_step=2),
        quota=NoQuota(),
        window=decoding.SlidingWindow(6),
        settings=DecodeSettings(eos_rule="fill"),
    )
    folder = decoded_set(tmp_path / "set", {"learned": decoder}, backbone)
    assert_exact(folder, backbone, policy_folders=[tmp_path / "policy"])
    with pytest.raises(ValueError, match=r"method 'learned': .* no policy has the weights digest"):
        check(folder, backbone)
