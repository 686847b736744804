"""Verification finds what was changed, names it, and calls nothing else changed."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_dlm.backbones import load_tokenizer
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BlockCache,
    ConfidencePolicy,
    Decoder,
    DynamicPolicy,
    EvenQuota,
    FullWindow,
    NoQuota,
    SlidingWindow,
    ThresholdPolicy,
)
from lit_dlm.decoding.decoder import DecodeSettings
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.trajectories import verify as verification
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.store.provenance import run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.verify import (
    Execution,
    Verification,
    canvas_of,
    free_running,
    teacher_forced,
    verify,
)
from tests.fakes import EOS, MASK, TableBackbone, logits_for
from tests.plugs import AlternatePolicy
from tests.trajectories.decoded_sets import (
    DECODERS,
    NUM_TEXTS,
    decoded,
    decoded_set,
    run_record,
    tiny,
    write_set,
)

pytestmark = pytest.mark.slow  # decodes are made and executed again


@pytest.fixture(scope="module")
def backbone() -> HFBackbone:
    return tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoded_set(tmp_path_factory.mktemp("set") / "set")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoded_set(tmp_path_factory.mktemp("small") / "set", ("confidence", "drawn"))


def check(folder: Path, backbone: HFBackbone | None = None, **options: object) -> Verification:
    names = ("level", "sample")
    settings = {name: options.pop(name) for name in names if name in options}
    execution = None if backbone is None else Execution(backbone=backbone, **options)  # type: ignore[arg-type]
    return verify(shards_in(folder), execution=execution, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [3, 4])
def test_the_same_settings_are_exact_for_every_kind_of_decoder(
    folder: Path, backbone: HFBackbone, level: int
) -> None:
    """Block counters, schedules, idle steps, noise, gates, fills, sliding windows and caches."""
    result = check(folder, backbone, level=level, tokenizer=load_tokenizer("tiny"))
    assert result.problems == []
    assert result.differences == []
    assert result.counts == {"exact": NUM_TEXTS * len(DECODERS), "explained": 0, "failed": 0}
    assert not result.failed
    records = {record.uid: record for record in TrajectoryShardReader(folder)}
    for verdict in result.verdicts:
        assert verdict.num_checked == verdict.num_agreeing == records[verdict.uid].num_steps
        assert verdict.token_agreement == 1.0


def test_rows_of_a_block_model_in_different_blocks_are_exact(tmp_path: Path) -> None:
    """The decoder names no window, its record that of the model; the rows drift apart."""
    block = HFBackbone("tiny", spec_overrides={"attention": "block", "block_size": 4})
    plugs = {"policy": DynamicPolicy(0.5), "quota": EvenQuota(steps_per_block=4)}
    decoder = Decoder(cache=BlockCache(), **plugs).on(block.spec)
    records = decoded(block, decoder, "cached", batch_size=4)
    assert len({record.num_steps for record in records}) > 1
    run = run_record(block, {"cached": decoder}, batch_size=4)
    folder = write_set(tmp_path / "set", records, run, records_per_block=4)
    for level in (3, 4):
        result = check(folder, block, level=level)
        assert not result.failed
        assert result.counts == {"exact": NUM_TEXTS, "explained": 0, "failed": 0}
    bare = Decoder(cache=BlockCache(), **plugs)
    for execute in (teacher_forced, free_running):
        assert [verdict.outcome for verdict in execute(block, bare, records)] == ["exact"] * 4


def test_a_changed_weight_is_named_and_the_records_that_it_changes_fail(
    small: Path, backbone: HFBackbone, tmp_path: Path
) -> None:
    other = tiny()
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    other.export(tmp_path / "other")
    loaded = HFBackbone(str(tmp_path / "other"))
    for level in (3, 4):
        result = check(small, loaded, level=level)
        recorded, now = (b.describe()["weights_sha256"] for b in (backbone, loaded))
        line = f'model.weights digest: "{recorded}" recorded, "{now}" now'
        assert line in result.differences
        assert result.counts["failed"] > 0
        assert result.failed


def test_a_changed_tokenizer_is_named(small: Path, backbone: HFBackbone) -> None:
    other = load_tokenizer("tiny")
    other.add_tokens(["zzz"])
    result = check(small, backbone, level=3, tokenizer=other, sample=1)
    assert [line.partition(":")[0] for line in result.differences] == ["tokenizer digest"]
    assert result.failed


def test_a_changed_token_is_found_at_its_step_and_does_not_cascade_when_teacher_forced(
    backbone: HFBackbone,
) -> None:
    """The last committed token has no later step to mislead, the first one may mislead others."""
    decoder = DECODERS["confidence"]
    records = decoded(backbone, decoder, "confidence")[:3]
    last = int(records[1].commit_step.argmax())
    tokens = records[1].tokens.copy()
    tokens[last] = tokens[last] + 1 if tokens[last] < 400 else tokens[last] - 1
    changed = [records[0], replace(records[1], tokens=tokens, signals={}), records[2]]
    first, second, third = teacher_forced(backbone, decoder, changed)
    assert (first.outcome, third.outcome) == ("exact", "exact")
    T = records[1].num_steps
    assert (second.outcome, second.first_step) == ("failed", T - 1)
    assert (second.num_checked, second.num_agreeing) == (T, T - 1)
    assert f"position {last}: token {tokens[last]} recorded, token " in second.reason
    free = free_running(backbone, decoder, changed)
    assert [v.outcome for v in free] == ["exact", "failed", "exact"]
    G = records[1].num_generated
    assert free[1].token_agreement == pytest.approx((G - 1) / G)


def test_swapped_steps_and_a_step_too_many_or_too_few_fail(backbone: HFBackbone) -> None:
    decoder = DECODERS["confidence"]
    record = decoded(backbone, decoder, "confidence")[0]
    T = record.num_steps
    swapped = np.where(record.commit_step == 0, T - 1, record.commit_step)
    swapped[record.commit_step == T - 1] = 0
    (verdict,) = teacher_forced(backbone, decoder, [replace(record, commit_step=swapped)])
    assert (verdict.outcome, verdict.first_step) == ("failed", 0)
    for execute in (teacher_forced, free_running):
        (verdict,) = execute(backbone, decoder, [replace(record, num_steps=T + 1)])
        assert verdict.outcome == "failed"
    last = record.commit_step == T - 1
    cut = replace(
        record,
        num_steps=T - 1,
        commit_step=np.where(last, -1, record.commit_step),
        tokens=np.where(last, record.mask_id, record.tokens),
        status="step_limit",
        signals={},
    )
    (verdict,) = teacher_forced(backbone, decoder, [cut])
    assert verdict.outcome == "failed"
    assert "the record stops at 11 steps, the loop has 12" in verdict.reason


def table_record(tokens: list[int], steps: list[int], **changes: object) -> Trajectory:
    values: dict[str, object] = {
        "uid": "x",
        "prompt_ids": [3],
        "tokens": tokens,
        "commit_step": steps,
        "num_steps": max(steps) + 1,
        "mask_id": MASK,
        "vocab_size": 8,
    }
    return Trajectory(**{**values, **changes})  # type: ignore[arg-type]


def test_a_near_tie_of_positions_is_explained_and_a_clear_choice_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probabilities 0.700, 0.695, 0.300 at response positions 0, 1, 2 (the prompt has one cell).

    The loop commits 0, 1, 2. A record that says 1, 0, 2 differs at step 0 by 0.700 - 0.695 = 0.005,
    below 0.01; from there, with 1 committed, it takes 0, as the loop does. A record that says
    2 first differs by 0.700 - 0.300 = 0.4.
    """
    backbone = TableBackbone(logits_for([3, 4, 5, 6], [0.5, 0.7, 0.695, 0.3]))
    decoder = Decoder(policy=ConfidencePolicy())
    tie = table_record([4, 5, 6], [1, 0, 2])
    clear = table_record([4, 5, 6], [1, 2, 0])
    for execute in (teacher_forced, free_running):
        first, second = execute(backbone, decoder, [tie, clear])
        assert first.outcome == "explained"
        assert first.margin == pytest.approx(0.005, abs=1e-6)
        assert second.outcome == "failed"
        assert second.margin == pytest.approx(0.4, abs=1e-6)
    monkeypatch.setattr(verification, "TOLERANCE", 0.004)
    (strict,) = teacher_forced(backbone, decoder, [tie])
    assert strict.outcome == "failed"


def test_a_model_that_finds_near_ties_everywhere_explains_nothing() -> None:
    """All six positions score about 0.19, 0.001 apart, and the record has them the other way round.

    Each step that differs is a near tie, but they are 5 of 6 steps: the last has one choice left.
    """
    probs = [0.5, 0.190, 0.189, 0.188, 0.187, 0.186, 0.185]
    backbone = TableBackbone(logits_for([3, 4, 5, 6, 4, 5, 6], probs))
    record = table_record([4, 5, 6, 4, 5, 6], [5, 4, 3, 2, 1, 0])
    (verdict,) = teacher_forced(backbone, Decoder(policy=ConfidencePolicy()), [record])
    assert verdict.margin == pytest.approx(0.005, abs=1e-6)
    assert verdict.differing_steps == [0, 1, 2, 3, 4]
    assert verdict.outcome == "failed"


def test_a_near_tie_of_tokens_is_explained() -> None:
    """Token 4 has 0.400, token 5 has 0.396, the rest of 0.204 is shared by others."""
    probs = torch.full((3, 8), 0.204 / 4)
    probs[:, 4], probs[:, 5] = 0.400, 0.396
    probs[:, [MASK, 1]] = 1e-9
    backbone = TableBackbone(probs.log())
    decoder = Decoder(policy=ConfidencePolicy())
    near, far = table_record([4, 5], [0, 1]), table_record([4, 6], [0, 1])
    first, second = teacher_forced(backbone, decoder, [near, far])
    assert first.outcome == "explained"
    assert first.margin == pytest.approx(0.004, abs=1e-5)
    assert second.outcome == "failed"
    assert second.margin == pytest.approx(0.400 - 0.051, abs=1e-5)


def test_a_probability_at_the_threshold_is_a_near_tie() -> None:
    """0.899 and 0.95 against a threshold of 0.9: the record committed both at once."""
    backbone = TableBackbone(logits_for([3, 4, 5], [0.5, 0.899, 0.95]))
    decoder = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota())
    (verdict,) = teacher_forced(backbone, decoder, [table_record([4, 5], [0, 0])])
    assert verdict.outcome == "explained"
    assert verdict.margin == pytest.approx(0.001, abs=1e-5)


def test_the_fill_of_an_ended_answer_is_part_of_its_step_and_explained_with_it() -> None:
    """End of text at position 0 with 0.899 under a threshold of 0.9, position 1 with 0.95 over it.

    The record committed the end at once, so position 2 was filled in step 0 as well. The loop
    commits position 1 only: two positions differ, and the fill follows from the near tie.
    """
    backbone = TableBackbone(logits_for([3, EOS, 5, 6], [0.5, 0.899, 0.95, 0.3]))
    decoder = Decoder(
        policy=ThresholdPolicy(0.9), quota=NoQuota(), settings=DecodeSettings(eos_rule="fill")
    )
    (verdict,) = teacher_forced(backbone, decoder, [table_record([EOS, 5, EOS], [0, 0, 0])])
    assert verdict.outcome == "explained"
    assert verdict.margin == pytest.approx(0.001, abs=1e-5)


def test_given_cells_are_fed_and_never_decided() -> None:
    backbone = TableBackbone(logits_for([3, 4, 5, 6], [0.5, 0.9, 0.8, 0.7]))
    decoder = Decoder(policy=ConfidencePolicy(), window=FullWindow())
    record = table_record([4, 7, 6], [0, -1, 1], given=np.array([False, True, False]))
    (verdict,) = teacher_forced(backbone, decoder, [record])
    assert verdict.outcome == "exact"
    assert backbone.canvases[0].tolist() == [[3, MASK, 7, MASK]]
    assert free_running(backbone, decoder, [record])[0].outcome == "exact"


def test_records_are_sampled_over_the_whole_set(folder: Path, backbone: HFBackbone) -> None:
    verdicts = check(folder, backbone, level=3, sample=4).verdicts
    assert len({verdict.uid for verdict in verdicts}) == len(verdicts) == 4
    assert len({verdict.uid.partition("@")[2] for verdict in verdicts}) > 2


def test_a_policy_from_outside_of_the_package_decides_again(
    backbone: HFBackbone, tmp_path: Path
) -> None:
    decoder = Decoder(policy=AlternatePolicy(), window=FullWindow())
    run = run_record(backbone, {"alternate": decoder})
    folder = write_set(tmp_path / "set", decoded(backbone, decoder, "alternate"), run)
    for level in (3, 4):
        result = check(folder, backbone, level=level, plug_modules=["tests.plugs"])
        assert result.counts == {"exact": NUM_TEXTS, "explained": 0, "failed": 0}
        assert not result.failed
    with pytest.raises(ValueError, match=r"method 'alternate': .* --plugs tests\.plugs"):
        check(folder, backbone, level=3)


def test_what_cannot_be_executed_is_refused_by_name(small: Path, backbone: HFBackbone) -> None:
    record = next(iter(TrajectoryShardReader(small)))
    for change in ({"mask_id": 7}, {"vocab_size": 999}):
        with pytest.raises(ValueError, match=f"{record.uid}.* got .*{next(iter(change.values()))}"):
            canvas_of([replace(record, **change)], backbone)
    with pytest.raises(ValueError, match="level"):
        check(small, level=5)


def test_seeds_that_do_not_follow_from_the_runs_seed_are_named(
    backbone: HFBackbone, tmp_path: Path
) -> None:
    records = decoded(backbone, DECODERS["confidence"], "confidence")
    records[2] = replace(records[2], seed=5)
    run = run_record(backbone, {"confidence": DECODERS["confidence"]})
    write_set(tmp_path / "set", records, run)
    result = check(tmp_path / "set", backbone, level=3)
    (line,) = result.differences
    assert line.startswith("seed: 1 records, the first 'task/test/2@confidence', hold another seed")


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_levels_0_to_2_find_what_they_are_for(small: Path, tmp_path: Path) -> None:
    """Flipped bits of a block, a tar header and the end, a cut file, forged and lost files."""
    for level in range(3):
        assert check(small, level=level).problems == []
    (shard,) = shards_in(small)
    side = TrajectoryShardReader(small).side_file(shard)
    block, beside = side.blocks[1], f"{shard.name}.json"

    def forged(folder: Path) -> None:
        path = folder / beside
        path.write_text(path.read_text().replace(side.sha256, "0" * 64))

    damages = {
        (0, block.key): lambda f: flipped(f / shard.name, block.offset + block.size // 2),
        (0, "finds 1 of 2 blocks"): lambda f: flipped(f / shard.name, block.offset - 362),
        (0, "expected .* bytes"): lambda f: (f / shard.name).write_bytes(
            shard.read_bytes()[:-2000]
        ),
        (0, "needs its side file"): lambda f: (f / beside).unlink(),
        (2, "sha256"): lambda f: flipped(f / shard.name, -1),
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


def test_another_record_under_the_same_uid_is_not_authentic(
    small: Path, backbone: HFBackbone, tmp_path: Path
) -> None:
    """Whole, well-formed and from the same run, but not what the manifest lists."""
    copy = tmp_path / "set"
    shutil.copytree(small, copy)
    records = list(TrajectoryShardReader(small))
    records[0] = replace(records[0], seed=1)
    run = run_of_shard(shards_in(small)[0])[0]
    write_set(tmp_path / "forged", records, run, records_per_block=4)
    for path in (tmp_path / "forged").glob("*.tar*"):
        shutil.copy(path, copy / path.name)
    assert check(copy, level=1).problems == []
    assert any("sha256" in problem for problem in check(copy, level=2).problems)


def test_a_learned_policy_is_loaded_by_its_digest_and_decides_again(
    backbone: HFBackbone, tmp_path: Path
) -> None:
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
        window=SlidingWindow(6),
        settings=DecodeSettings(eos_rule="fill"),
    )
    run = run_record(backbone, {"learned": decoder})
    folder = write_set(tmp_path / "set", decoded(backbone, decoder, "learned"), run)
    for level in (3, 4):
        result = check(folder, backbone, level=level, policy_folders=[tmp_path / "policy"])
        assert result.counts == {"exact": NUM_TEXTS, "explained": 0, "failed": 0}
        assert not result.failed
    with pytest.raises(ValueError, match=r"method 'learned': .* no policy has the weights digest"):
        check(folder, backbone, level=3)
