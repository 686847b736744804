"""Pre-training: the loss falls, the parts add up, and a resumed run equals an uninterrupted one."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer

import lit_dlm
from lit_dlm.backbones import Architecture, HFBackbone, load_tokenizer
from lit_dlm.datamodules.pretraining import PretrainBatches, PretrainDataModule
from lit_dlm.modules.pretrain import PretrainModule
from lit_dlm.toy.word_problems import WordProblems
from tests.finetuning import quiet

TINY = str(Path(lit_dlm.__file__).parent / "assets" / "tiny")


def micro(trainable: bool = True) -> HFBackbone:
    """A backbone of one layer and 8 dimensions with the tiny vocabulary."""
    torch.manual_seed(0)
    return HFBackbone(
        architecture=Architecture(
            vocab_size=462,
            hidden_size=8,
            intermediate_size=16,
            num_layers=1,
            num_heads=1,
            rope_theta=100.0,
            initializer_range=0.08,
            tie_embeddings=True,
            family="tiny",
            pad_id=0,
            eos_ids=(1,),
            mask_id=2,
            forbidden_ids=(0, 2, 3, 4),
        ),
        trainable=trainable,
    )


def data() -> PretrainDataModule:
    """Two batches an update."""
    return PretrainDataModule(
        [WordProblems("train")],
        tokenizer=TINY,
        batch_size=4,
        rows_per_update=8,
        drills=WordProblems("train"),
    )


@pytest.mark.slow
def test_the_loss_falls_and_the_export_loads(tmp_path: Path) -> None:
    module = PretrainModule(
        micro(), tokenizer=TINY, warmup_steps=2, export_dir=str(tmp_path / "model")
    )
    batches = PretrainBatches([WordProblems("train")], load_tokenizer(TINY), batch_size=32)
    held_back = batches.batch(1_000)

    def bound() -> float:
        with torch.no_grad():
            return float(module.training_step(held_back))

    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    before = bound()
    del module.log
    quiet(tmp_path, max_steps=12).fit(module, data())
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert bound() < before - 0.05
    exported = HFBackbone(str(tmp_path / "model"), dtype="float32")
    torch.testing.assert_close(
        exported.model.lm_head.weight,
        module.backbone.model.lm_head.weight.detach().half().float(),
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (Path(TINY) / name).read_bytes()


def test_the_loss_equals_that_of_full_logits() -> None:
    """Weight G / n on the cross-entropy of each hidden cell over B G, plus the drills' mean."""
    module = PretrainModule(micro(), tokenizer=TINY)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    task = WordProblems("train")
    batch = PretrainBatches([task], load_tokenizer(TINY), batch_size=4, drills=task).batch(0)
    loss = module.training_step(batch)
    loss.backward()
    table = module.backbone.model.lm_head.weight
    found, table.grad = table.grad, None

    is_response = torch.arange(batch.ids.shape[1]) >= batch.start
    hidden = torch.zeros_like(batch.pad_mask)
    hidden[:, is_response] = batch.hidden
    logits = module.backbone.denoise(
        batch.ids.masked_fill(hidden, 2), pad_mask=batch.pad_mask
    ).logits
    cells = F.cross_entropy(logits.transpose(1, 2), batch.ids, reduction="none") * hidden
    B, G = batch.hidden.shape
    expected = (cells.nan_to_num().sum(1) * G / hidden.sum(1)).sum() / (B * G)
    drill = batch.drill
    assert drill is not None
    shown = drill.ids.masked_fill(drill.hidden, 2)
    logits = module.backbone.denoise(shown, pad_mask=drill.pad_mask).logits
    expected = expected + 0.7 * F.cross_entropy(logits[drill.hidden], drill.ids[drill.hidden])
    torch.testing.assert_close(loss, expected)
    expected.backward()
    torch.testing.assert_close(found, table.grad)


def test_matrices_and_others_are_told_apart() -> None:
    module = PretrainModule(micro(), tokenizer=TINY)
    module.trainer = Trainer(max_steps=3, accelerator="cpu", logger=False)
    setup = module.configure_optimizers()
    matrices, others = setup["optimizer"].param_groups  # type: ignore[index,call-overload]
    # One layer: q, k, v, o, gate, up, down. Others: embedding, three biases, three norms.
    assert len(matrices["params"]) == 7
    assert len(others["params"]) == 7


def test_a_frozen_backbone_and_an_endless_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"backbone\.trainable"):
        PretrainModule(micro(trainable=False), tokenizer=TINY)
    module = PretrainModule(micro(), tokenizer=TINY)
    module.trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match=r"trainer\.max_steps: expected at least 1, got -1"):
        module.configure_optimizers()
