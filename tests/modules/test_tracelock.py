from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.decoding import Decoder, NoQuota, prompt_canvas
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.losses.acceptance import AcceptanceLossSettings
from lit_dlm.metrics.acceptance import RolloutProxy
from lit_dlm.modules.selection import SelectionSettings
from lit_dlm.modules.state_batch import collate_states
from lit_dlm.modules.steps import NonFiniteError
from lit_dlm.modules.tracelock import MONITOR, TraceLockModule
from tests.finetuning import quiet
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
    records = recorded(
        small_backbone(), 24, features=feature_capture(small_projector(), layout="masked")
    )
    return write_shards(tmp_path_factory.mktemp("shards"), records)


def module(**options: Any) -> TraceLockModule:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "tokenizer": "unused",
        "projector": small_projector(),
        "head": HEAD,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }
    return TraceLockModule(small_backbone(), **{**values, **options})


def trainer(root: Path, **options: Any) -> Trainer:
    values = {"max_steps": 24, "val_check_interval": 5, "gradient_clip_val": 1.0}
    return quiet(root, **{**values, **options})


def data(shards: Path, **options: Any) -> TrajectoryDataModule:
    values: dict[str, Any] = {"batch_size": 8, "val_fraction": 0.3}
    return TrajectoryDataModule(shards, **{**values, **options})


def weights(model: TraceLockModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.scorer.head.state_dict().items()}


def test_labels_states_and_tail_of_a_hand_made_batch() -> None:
    """Stored proposals decide the labels; the last column ends as end of text."""
    record = recorded(small_backbone(), 1, response_length=4)[0]
    tokens = record.tokens.copy()
    tokens[:] = [7, 8, 9, EOS]
    record = type(record)(
        **{
            **{k: getattr(record, k) for k in ("uid", "prompt_ids", "num_steps", "mask_id")},
            "vocab_size": 24,
            "tokens": tokens,
            "commit_step": [0, 1, 2, 3],
        }
    )
    model = module()
    stored = (np.zeros((4, model.scorer.head.num_features)), np.array([7, 8, 5, EOS]))
    seen = model.observe(collate_states([record], [record.state_at(1)], features=[stored]))
    assert seen.state.tolist() == [[1, 2, 2, 2]]
    assert seen.label.tolist() == [[False, True, False, True]]
    assert seen.decidable.tolist() == [[False, True, True, True]]
    assert seen.is_tail.tolist() == [[False, False, False, True]]
    filler = collate_states([record], [record.state_at(1)], features=[stored], is_real=[False])
    assert not model.observe(filler).decidable.any()


def test_every_proposal_is_right_at_the_step_that_commits_it() -> None:
    """A greedy decode commits its proposals: at each step the written positions have label 1."""
    backbone = small_backbone()
    model = module()
    for record in recorded(backbone, 3):
        for step in range(record.num_steps):
            seen = model.observe(collate_states([record], [record.state_at(step)]))
            written = torch.from_numpy(record.committed_at(step))
            assert seen.label[0, written].all()


@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_training_and_decoding_see_the_same_logits(layout: str) -> None:
    """The decode policy on a live state against the module on the recorded one."""
    model = module(settings=ScorerSettings(layout=layout)).eval()
    policy = TraceLockPolicy(scorer=model.scorer, threshold=0.5)
    backbone = small_backbone()
    spied: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = policy.decision_logits

    def spy(state: Any, candidates: Any, proposal: Any) -> torch.Tensor:
        logits = original(state, candidates, proposal)
        spied.append((state.ids.clone(), logits[:, state.start :].clone()))
        return logits

    policy.decision_logits = spy  # type: ignore[method-assign]
    (record,) = recorded(backbone, 1, decoder=Decoder(policy=policy, quota=NoQuota()))
    assert len(spied) == record.num_steps
    for step, (_, logits) in enumerate(spied):
        seen = model.observe(collate_states([record], [record.state_at(step)]))
        output = model.scorer(seen.features, seen.state, seen.present)
        shown = seen.state[:, -8:] == 2 if layout == "masked" else torch.ones(1, 8).bool()
        torch.testing.assert_close(output.decision_logits[:, -8:][shown], logits[shown])


def test_a_rate_that_is_too_high_ends_the_run_without_a_policy(
    shards: Path, tmp_path: Path
) -> None:
    """Clipping hides nothing: the gradients of weights beyond float32 are no numbers."""
    broken = module(optimizer=lambda params: torch.optim.SGD(params, lr=1e38))
    with pytest.raises(
        NonFiniteError, match=r"a gradient is not finite at optimiser step \d+; weig"
    ):
        trainer(tmp_path).fit(broken, data(shards))
    assert not (tmp_path / "policy").exists()


def test_exported_policy_is_the_best_checkpoint(shards: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", monitor=MONITOR, mode="max", filename="{step}")
    fitted = trainer(tmp_path, callbacks=[saver], enable_checkpointing=True, val_check_interval=3)
    model = module()
    model.scores.proxy = RolloutProxy(threshold=0.7)
    fitted.fit(model, datamodule=data(shards))
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
    assert decoder(backbone, canvas).policy_forwards.tolist() > [0]


def test_validation_scores_match_a_slow_reference(shards: Path, tmp_path: Path) -> None:
    """Loss and precision over the whole validation set, state by state, without a crop."""
    model = module(min_crop_ratio=1.0)
    model.scores.proxy = RolloutProxy(threshold=0.5)
    torch.nn.init.normal_(model.scorer.head.logit_head.weight)
    run = trainer(tmp_path)
    source = data(shards, batch_size=7)
    (scores,) = run.validate(model, datamodule=source, verbose=False)
    loss, count, right, accepted = 0.0, 0, 0, 0
    model.eval().requires_grad_(False)
    for batch in source.val_dataloader():
        seen = model.observe(batch)
        for row in range(len(batch.ids)):
            one = [t[row : row + 1] for t in (seen.features, seen.state, seen.present)]
            decision = model.scorer(*one).decision_logits[0]
            for logit, label, decidable, tail in zip(
                decision, seen.label[row], seen.decidable[row], seen.is_tail[row], strict=True
            ):
                if decidable and not tail:
                    sign = 1.0 if label else -1.0
                    loss += float(torch.nn.functional.softplus(-sign * logit))
                    count += 1
                    accepted += int(logit >= 0)
                    right += int(logit >= 0 and bool(label))
    assert scores["val/loss"] == pytest.approx(loss / count, rel=1e-4)
    assert scores["val/rollout_proxy_precision"] == pytest.approx(right / accepted, rel=1e-5)
    assert scores["val/rollout_proxy_accept_rate"] == pytest.approx(accepted / count, rel=1e-5)


def test_written_tail_counts_only_when_asked() -> None:
    """Tokens 7, EOS, EOS: the second is written, the third masked. The release scores both."""
    record = recorded(small_backbone(), 1, response_length=3)[0]
    record = type(record)(
        uid="x", prompt_ids=record.prompt_ids, num_steps=3, mask_id=record.mask_id, vocab_size=24,
        tokens=np.array([7, EOS, EOS], dtype=np.int32), commit_step=np.array([2, 0, 1]),
    )  # fmt: skip
    batch = collate_states([record], [record.state_at(1)])
    assert module().observe(batch).is_tail.tolist() == [[False, False, True]]
    parity = module(loss=AcceptanceLossSettings(written_tail=True)).observe(batch)
    assert parity.is_tail.tolist() == [[False, True, True]]


def test_every_score_has_its_best_checkpoint_and_policy(shards: Path, tmp_path: Path) -> None:
    """The replay is scored, too; each monitored score exports its own weights."""
    savers = [
        ModelCheckpoint(tmp_path / name, monitor=f"val/{name}", mode="max", filename="{step}")
        for name in ("rollout_proxy_f0_5", "average_precision", "replay_score")
    ]
    selection = SelectionSettings(threshold=0.6)
    model = module(selection=selection, export_monitor="val/replay_score")
    fitted = trainer(tmp_path, callbacks=savers, enable_checkpointing=True, max_steps=10)
    fitted.fit(model, datamodule=data(shards))
    logged = fitted.logged_metrics
    assert 1.0 <= logged["val/replay_steps"] <= 8.0
    assert 0.0 <= logged["val/calibration_error"] <= 1.0
    main = AcceptanceScorer.load(tmp_path / "policy")
    assert "val/replay_score" in main.training_facts
    assert {path.name for path in (tmp_path / "policy_by").iterdir()} == {
        "rollout_proxy_f0_5", "average_precision",
    }  # fmt: skip


def test_a_resumed_run_of_tokens_equals_an_uninterrupted_one(shards: Path, tmp_path: Path) -> None:
    """Saved after 13 steps, in the middle of the second pass, read by two workers."""
    options = {"source": "tokens", "step_ratio": 0.4, "num_workers": 2}
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=13, save_top_k=-1, filename="{step}")
    whole = module()
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    trainer(tmp_path / "whole", **saving).fit(whole, datamodule=data(shards, **options))
    torch.manual_seed(99)
    resumed = module()
    trainer(tmp_path / "resumed").fit(
        resumed,
        datamodule=data(shards, **options),
        ckpt_path=tmp_path / "step=13.ckpt",
        weights_only=True,
    )
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_a_plateau_schedule_watches_the_loss_of_every_validation() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for every, wanted in ((2, (2, "step")), (0.5, (1, "epoch"))):
        model = module(lr_scheduler=plateau)
        model.trainer = SimpleNamespace(val_check_interval=every)
        found = model.configure_optimizers()["lr_scheduler"]
        assert (found["frequency"], found["interval"]) == wanted
        assert found["monitor"] == "val/loss"


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="min_crop_ratio"):
        module(min_crop_ratio=0.0)
