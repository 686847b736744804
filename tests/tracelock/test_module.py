from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.backbones.projection import FeatureSettings
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, SlidingWindow, decode, prompt_canvas
from lit_dlm.decoding.windows import SteppedBlockWindow
from lit_dlm.tracelock.loss import AcceptanceLossSettings
from lit_dlm.tracelock.metrics import RolloutProxy, SelectionSettings, step_candidates, step_commits
from lit_dlm.tracelock.module import MONITOR, TraceLockModule
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.tracelock.scorer import AcceptanceScorer, CommitSettings, ScorerSettings
from lit_dlm.tracelock.states import collate_states
from lit_dlm.training.steps import NonFiniteError
from tests.finetuning.runs import quiet
from tests.tracelock.traces import trace
from tests.traces import (
    EOS,
    feature_capture,
    recorded,
    small_backbone,
    small_projector,
    write_shards,
)

pytestmark = pytest.mark.slow  # training runs

HEAD = AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16, dropout=0.1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    features = feature_capture(small_projector(), layout="masked")
    records = recorded(small_backbone(), 24, features=features)
    return write_shards(tmp_path_factory.mktemp("shards"), records)


def module(**options: Any) -> TraceLockModule:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "tokenizer": "unused",
        "projector": small_projector(),
        "head": HEAD,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }
    return TraceLockModule(small_backbone(**options.pop("kind", {})), **{**values, **options})


def trainer(root: Path, *savers: ModelCheckpoint, **options: Any) -> Trainer:
    values = {"max_steps": 12, "val_check_interval": 3, "gradient_clip_val": 1.0}
    saving = {"callbacks": list(savers), "enable_checkpointing": bool(savers)}
    return quiet(root, **{**values, **saving, **options})


def data(shards: Path, **options: Any) -> TrajectoryDataModule:
    values: dict[str, Any] = {"batch_size": 8, "val_fraction": 0.3}
    return TrajectoryDataModule(shards, **{**values, **options})


def test_labels_states_and_tail_of_a_hand_made_batch() -> None:
    """Stored proposals decide the labels; the last column ends as end of text."""
    record = trace([5], [7, 8, 9, EOS], [0, 1, 2, 3])
    model = module()
    stored = (np.zeros((4, model.scorer.head.num_features)), np.array([7, 8, 5, EOS]))
    seen = model.observe(collate_states([record], [record.state_at(1)], features=[stored]))
    assert seen.state.tolist() == [[1, 2, 2, 2]]
    assert seen.label.tolist() == [[False, True, False, True]]
    assert seen.decidable.tolist() == [[False, True, True, True]]
    assert seen.is_tail.tolist() == [[False, False, False, True]]
    filler = collate_states([record], [record.state_at(1)], features=[stored], is_real=[False])
    assert not model.observe(filler).decidable.any()


def test_written_tail_counts_only_when_asked() -> None:
    """Tokens 7, EOS, EOS: the second is written, the third masked. The release scores both."""
    record = trace([5], [7, EOS, EOS], [2, 0, 1])
    batch = collate_states([record], [record.state_at(1)])
    assert module().observe(batch).is_tail.tolist() == [[False, False, True]]
    loss = AcceptanceLossSettings(written_tail=True)
    parity = module(loss=loss, settings=ScorerSettings(layout="generation")).observe(batch)
    assert parity.is_tail.tolist() == [[False, True, True]]
    with pytest.raises(ValueError, match=r"^loss.written_tail: .* got 'masked'"):
        module(loss=loss, settings=ScorerSettings(layout="masked"))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("generation", {}), ("all", {}), ("masked", {}), ("masked", {"text_vocab_size": 9})],
)
def test_training_and_decoding_see_the_same_logits(layout: str, kind: dict[str, Any]) -> None:
    """The decode policy on a live state against the module on the recorded one."""
    model = module(settings=ScorerSettings(layout=layout), kind=kind).eval()
    policy = TraceLockPolicy(scorer=model.scorer, threshold=0.5)
    backbone = small_backbone(**kind)
    spied: list[torch.Tensor] = []
    original = policy.decision_logits

    def spy(state: Any, candidates: Any, proposal: Any) -> torch.Tensor:
        logits = original(state, candidates, proposal)
        spied.append(logits[:, state.start :].clone())
        return logits

    policy.decision_logits = spy  # type: ignore[method-assign]
    (record,) = recorded(backbone, 1, decoder=Decoder(policy=policy, quota=NoQuota()))
    assert len(spied) == record.num_steps
    for step, logits in enumerate(spied):
        seen = model.observe(collate_states([record], [record.state_at(step)]))
        output = model.scorer(seen.features, seen.state, seen.present)
        shown = seen.state[:, -8:] == 2 if layout == "masked" else torch.ones(1, 8).bool()
        torch.testing.assert_close(output.decision_logits[:, -8:][shown], logits[shown])


SELECTIONS = {
    "free": SelectionSettings(threshold=0.5, max_accept_per_step=None),
    "cap 1": SelectionSettings(threshold=0.5, max_accept_per_step=1),
    "mostly fallback": SelectionSettings(threshold=0.9999, max_accept_per_step=2),
    "window and gate": SelectionSettings(
        threshold=0.5,
        max_accept_per_step=2,
        window=SlidingWindow(3),
        settings=DecodeSettings(eos_gate=True),
    ),
}


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_replay_commits_what_the_decode_loop_commits(name: str) -> None:
    """Along a decode of the policy itself, every replayed step equals the recorded one."""
    backbone, selection, model = small_backbone(), SELECTIONS[name], module().eval()
    model.scorer.head.logit_head.weight.data *= 20.0
    policy = TraceLockPolicy(
        scorer=model.scorer,
        threshold=selection.threshold,
        max_accept_per_step=selection.max_accept_per_step,
    )
    decoder = Decoder(
        policy=policy, window=selection.window, quota=NoQuota(), settings=selection.settings
    )
    for record in recorded(backbone, 4, decoder=decoder):
        for step in range(record.num_steps):
            batch = collate_states([record], [record.state_at(step)])
            seen = model.observe(batch)
            proposals = batch.ids.clone()
            proposals[:, batch.start :] = seen.proposals
            candidates, visible = step_candidates(batch, proposals, backbone, selection)
            output = model.scorer(seen.features, seen.state, visible[:, batch.start :])
            commit = step_commits(output.decision_logits, candidates[:, batch.start :], selection)
            assert commit[0].nonzero()[:, 0].tolist() == record.committed_at(step).tolist()


def test_a_rate_that_is_too_high_ends_the_run_without_a_policy(
    shards: Path, tmp_path: Path
) -> None:
    """Clipping hides nothing: the gradients of weights beyond float32 are no numbers."""
    broken = module(optimizer=lambda params: torch.optim.SGD(params, lr=1e38))
    named = r"a gradient is not finite at optimiser step \d+; weig"
    with pytest.raises(NonFiniteError, match=named):
        trainer(tmp_path).fit(broken, data(shards))
    assert not (tmp_path / "policy").exists()


def test_exported_policy_is_the_best_checkpoint(shards: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", monitor=MONITOR, mode="max", filename="{step}")
    model = module()
    model.scores.proxy = RolloutProxy(threshold=0.7)
    trainer(tmp_path, saver, max_steps=24).fit(model, datamodule=data(shards))
    policy = AcceptanceScorer.load(tmp_path / "policy")
    stored = torch.load(saver.best_model_path, weights_only=True)
    assert not [key for key in stored["state_dict"] if key.startswith("backbone")]
    for name, value in policy.head.state_dict().items():
        assert torch.equal(value, stored["state_dict"][f"scorer.head.{name}"])
    assert policy.training_facts["global_step"] == stored["global_step"]
    assert policy.training_facts[MONITOR] == pytest.approx(float(saver.best_model_score))
    assert policy.backbone["hidden_size"] == 16
    assert policy.training_facts["tasks"] == ["fake"]
    backbone = small_backbone()
    canvas = prompt_canvas([[5, 6]], response_length=8, spec=backbone.spec, seeds=[0])
    decoder = Decoder(policy=TraceLockPolicy(tmp_path / "policy", threshold=0.5), quota=NoQuota())
    assert decode(backbone, decoder, canvas).policy_forwards.tolist() > [0]


def test_validation_scores_match_a_slow_reference(shards: Path, tmp_path: Path) -> None:
    """Loss and precision over the whole validation set, state by state, without a crop."""
    model = module(min_crop_ratio=1.0)
    model.scores.proxy = RolloutProxy(threshold=0.5)
    torch.nn.init.normal_(model.scorer.head.logit_head.weight)
    source = data(shards, batch_size=7)
    (scores,) = trainer(tmp_path).validate(model, datamodule=source, verbose=False)
    logits, labels = [], []
    model.eval().requires_grad_(False)
    for batch in source.val_dataloader():
        seen = model.observe(batch)
        for row in range(len(batch.ids)):
            one = [t[row : row + 1] for t in (seen.features, seen.state, seen.present)]
            chosen = seen.decidable[row] & ~seen.is_tail[row]
            logits.append(model.scorer(*one).decision_logits[0, chosen])
            labels.append(seen.label[row, chosen])
    logit, label = torch.cat(logits), torch.cat(labels)
    surprise = torch.nn.functional.softplus(torch.where(label, -logit, logit))
    for name, values, rel in (
        ("val/loss", surprise, 1e-4),
        ("val/rollout_proxy_precision", label[logit >= 0], 1e-5),
        ("val/rollout_proxy_accept_rate", logit >= 0, 1e-5),
    ):
        assert scores[name] == pytest.approx(float(values.double().mean()), rel=rel)


def test_a_folder_is_trained_further_and_validated_without_a_checkpoint(
    shards: Path, tmp_path: Path
) -> None:
    """Its scores are those of the policy in it, whose sizes it keeps; and training changes it."""
    trainer(tmp_path).fit(module(), data(shards))
    folder, loaded = str(tmp_path / "policy"), module()
    loaded.scorer = AcceptanceScorer.load(folder)
    (wanted,) = trainer(tmp_path).validate(loaded, data(shards), verbose=False)
    start = {"policy": folder, "projector": None, "head": None}
    (found,) = trainer(tmp_path).validate(module(**start), data(shards), verbose=False)
    assert found == wanted
    again = module(**start)
    trainer(tmp_path / "more", max_steps=3).fit(again, data(shards))
    after = AcceptanceScorer.load(tmp_path / "more" / "policy")
    assert after.digest() != AcceptanceScorer.load(folder).digest()
    assert (after.head.config, after.backbone) == (HEAD, again.scorer.backbone)
    # What it was made for stays: 0.7 was never the default, and another set has other tasks.
    start["policy"] = str(tmp_path / "made_for")
    after.commits, after.training_facts = CommitSettings(threshold=0.7), {"tasks": ["sudoku"]}
    after.save(start["policy"])
    trainer(tmp_path / "further", max_steps=3).fit(module(**start), data(shards))
    further = AcceptanceScorer.load(tmp_path / "further" / "policy")
    assert further.commits == after.commits
    assert further.training_facts["tasks"] == ["fake", "sudoku"]
    with pytest.raises(ValueError, match=r"^policy: expected a folder to start from, or a proj"):
        module(projector=None)
    others = {"head": replace(HEAD, num_layers=3), "settings": ScorerSettings(layout="all")}
    for name, other in others.items():
        with pytest.raises(
            ValueError, match=rf"^{name}: expected null, or that of policy, .* got "
        ):
            module(**{**start, name: other})
    plain = ScorerSettings(features=FeatureSettings(log_odds=False))
    with pytest.raises(ValueError, match=r"^data\.source: expected tokens, .* got features"):
        trainer(tmp_path / "plain").fit(module(settings=plain), data(shards))


def test_every_score_has_its_best_checkpoint_and_policy(shards: Path, tmp_path: Path) -> None:
    """The replay is scored, too; each monitored score exports its own weights."""
    savers = [
        ModelCheckpoint(tmp_path / name, monitor=f"val/{name}", mode="max", filename="{step}")
        for name in ("rollout_proxy_f0_5", "average_precision", "replay_score")
    ]
    selection = SelectionSettings(threshold=0.6)
    model = module(selection=selection, export_monitor="val/replay_score")
    fitted = trainer(tmp_path, *savers, val_check_interval=5, max_steps=10)
    fitted.fit(model, datamodule=data(shards))
    logged = fitted.logged_metrics
    assert 1.0 <= logged["val/replay_steps"] <= 8.0
    assert 0.0 <= logged["val/calibration_error"] <= 1.0
    main = AcceptanceScorer.load(tmp_path / "policy")
    assert "val/replay_score" in main.training_facts
    assert main.commits == CommitSettings(threshold=0.6)  # as validation decoded
    assert {path.name for path in (tmp_path / "policy_by").iterdir()} == {
        "rollout_proxy_f0_5", "average_precision",
    }  # fmt: skip


def test_a_resumed_run_of_tokens_equals_an_uninterrupted_one(shards: Path, tmp_path: Path) -> None:
    """Saved after 9 steps, in the middle of the second pass, read by two workers."""
    source = data(shards, source="tokens", step_ratio=0.4, num_workers=2)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=9, save_top_k=-1, filename="{step}")
    whole = module()
    trainer(tmp_path / "whole", saver, val_check_interval=5).fit(whole, datamodule=source)
    torch.manual_seed(99)
    resumed, source = module(), data(shards, source="tokens", step_ratio=0.4, num_workers=2)
    again = trainer(tmp_path / "resumed", val_check_interval=5)
    again.fit(resumed, source, ckpt_path=tmp_path / "step=9.ckpt", weights_only=True)
    heads = (one.scorer.head.state_dict() for one in (resumed, whole))
    torch.testing.assert_close(*heads, rtol=0, atol=0)


def test_a_plateau_schedule_is_stepped_at_every_validation(shards: Path, tmp_path: Path) -> None:
    """Three validations, farther apart than passes end, of which the first is the best by far."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    options = {"factor": 0.1, "patience": 0, "threshold": 100.0, "threshold_mode": "abs"}
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    model = module(lr_scheduler=partial(plateau, **options), optimizer=optimizer)
    trained = trainer(tmp_path, val_check_interval=4, check_val_every_n_epoch=None)
    source = data(shards, source="tokens", step_ratio=0.4, batch_size=64)
    trained.fit(model, datamodule=source)
    assert trained.num_training_batches < 4
    (group,) = trained.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(1e-5)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="min_crop_ratio"):
        module(min_crop_ratio=0.0)
    with pytest.raises(ValueError, match=r"SelectionSettings\.threshold"):
        SelectionSettings(threshold=1.5)
    selection, record = SelectionSettings(window=SteppedBlockWindow(4)), trace([5], [7], [0])
    batch = collate_states([record], [record.state_at(0)])
    with pytest.raises(ValueError, match=r"selection\.window\.steps: expected 0, got 256"):
        step_candidates(batch, batch.ids, small_backbone(), selection)
