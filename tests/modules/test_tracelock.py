from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.decoding import Decoder, NoQuota, prompt_canvas
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.losses.acceptance import AcceptanceLossSettings
from lit_dlm.metrics.acceptance import RolloutProxy
from lit_dlm.modules.finite import NonFiniteError
from lit_dlm.modules.selection import SelectionSettings
from lit_dlm.modules.state_batch import StateBatch, collate_states, trace_state
from lit_dlm.modules.tracelock import MONITOR, TraceLockModule
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
    values: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "default_root_dir": root,
        "max_steps": 24,
        "val_check_interval": 5,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(**{**values, **options})


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
    example = trace_state(record, 1)
    example = type(example)(
        trace=record,
        response=example.response,
        features=torch.zeros(4, module().scorer.head.num_features).numpy(),
        proposals=torch.tensor([7, 8, 5, EOS]).int().numpy(),
    )
    seen = module().observe(collate_states([example]))
    assert seen.state.tolist() == [[1, 2, 2, 2]]
    assert seen.label.tolist() == [[False, True, False, True]]
    assert seen.decidable.tolist() == [[False, True, True, True]]
    assert seen.is_tail.tolist() == [[False, False, False, True]]


def test_every_proposal_is_right_at_the_step_that_commits_it() -> None:
    """A greedy decode commits its proposals: at each step the written positions have label 1."""
    backbone = small_backbone()
    model = module()
    for record in recorded(backbone, 3):
        for step in range(record.num_steps):
            seen = model.observe(collate_states([trace_state(record, step)]))
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
        seen = model.observe(collate_states([trace_state(record, step)]))
        output = model.scorer(seen.features, seen.state, seen.present)
        shown = seen.state[:, -8:] == 2 if layout == "masked" else torch.ones(1, 8).bool()
        torch.testing.assert_close(output.decision_logits[:, -8:][shown], logits[shown])


@pytest.mark.slow
def test_training_lowers_the_loss(shards: Path, tmp_path: Path) -> None:
    losses: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any
        ) -> None:
            losses.append(float(outputs["loss"]))

    trainer(tmp_path, max_steps=60, callbacks=[Watch()]).fit(module(), datamodule=data(shards))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


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


@pytest.mark.slow
@pytest.mark.parametrize("source", ["features", "tokens"])
def test_killed_and_resumed_run_equals_an_uninterrupted_one(
    shards: Path, tmp_path: Path, source: str
) -> None:
    """Stopped after 13 steps, in the middle of the second pass and between two validations."""
    options: dict[str, Any] = {"source": source}
    if source == "tokens":
        options |= {"step_ratio": 0.4, "num_workers": 2}
    whole = module()
    trainer(tmp_path / "whole").fit(whole, datamodule=data(shards, **options))

    class KilledError(RuntimeError):
        pass

    class Kill(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 14:
                raise KilledError

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=13, save_top_k=-1)
    with pytest.raises(KilledError):
        trainer(tmp_path / "cut", callbacks=[saver, Kill()], enable_checkpointing=True).fit(
            module(), datamodule=data(shards, **options)
        )
    (checkpoint,) = (tmp_path / "saved").glob("*.ckpt")
    torch.manual_seed(99)
    resumed = module()
    trainer(tmp_path / "resumed").fit(
        resumed, datamodule=data(shards, **options), ckpt_path=checkpoint, weights_only=True
    )
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_checkpoint_holds_no_backbone_and_loads_without_pickle(
    shards: Path, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer(tmp_path, max_steps=3, callbacks=[saver], enable_checkpointing=True).fit(
        module(), datamodule=data(shards)
    )
    stored = torch.load(saver.best_model_path, weights_only=True)
    assert not [key for key in stored["state_dict"] if key.startswith("backbone")]
    assert "scorer.head.in_proj.weight" in stored["state_dict"]


def test_exported_policy_is_the_best_checkpoint(shards: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", monitor=MONITOR, mode="max", filename="{step}")
    fitted = trainer(tmp_path, callbacks=[saver], enable_checkpointing=True, val_check_interval=3)
    model = module()
    model.scores.proxy = RolloutProxy(threshold=0.7)
    fitted.fit(model, datamodule=data(shards))
    policy = AcceptanceScorer.load(tmp_path / "policy")
    stored = torch.load(saver.best_model_path, weights_only=True)
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


def test_copies_that_fill_a_batch_do_not_count(shards: Path) -> None:
    batch: StateBatch = next(iter(prepared(shards).val_dataloader()))
    copies = type(batch)(**{**vars(batch), "is_real": torch.zeros_like(batch.is_real)})
    seen = module().observe(copies)
    assert not seen.decidable.any()


def prepared(shards: Path) -> TrajectoryDataModule:
    source = data(shards)
    source.setup("fit")
    return source


def test_written_tail_counts_only_when_asked() -> None:
    """Tokens 7, EOS, EOS: the second is written, the third masked. The release scores both."""
    record = recorded(small_backbone(), 1, response_length=3)[0]
    record = type(record)(
        uid="x", prompt_ids=record.prompt_ids, num_steps=3, mask_id=record.mask_id, vocab_size=24,
        tokens=np.array([7, EOS, EOS], dtype=np.int32), commit_step=np.array([2, 0, 1]),
    )  # fmt: skip
    batch = collate_states([trace_state(record, 1)])
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


def test_unknown_export_monitor_is_named() -> None:
    with pytest.raises(ValueError, match=r"export_monitor: .* got 'val/loss'"):
        module(export_monitor="val/loss")


def test_plateau_schedule_halves_the_rate_after_its_patience(shards: Path, tmp_path: Path) -> None:
    """A frozen loss: with patience 1, validations 3 and 5 halve 1e-2 to 2.5e-3."""
    rates: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    class Frozen(TraceLockModule):
        def validation_step(self, batch: StateBatch, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)

        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            super().log(name, torch.tensor(1.0) if name == "val/loss" else value, *args, **kwargs)

    torch.manual_seed(0)
    model = Frozen(
        small_backbone(),
        tokenizer="unused",
        projector=small_projector(),
        head=HEAD,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.5, patience=1
        ),
    )
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_steps": 12}
    trainer(tmp_path, callbacks=[Watch()], **options).fit(model, datamodule=data(shards))
    assert rates[0] == 1e-2
    assert rates[-1] == pytest.approx(2.5e-3)
