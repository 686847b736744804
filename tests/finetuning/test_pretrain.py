"""Pre-training: the loss falls, the parts add up, and a resumed run equals an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lit_dlm
from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.datamodules.pretraining import PretrainDataModule
from lit_dlm.finetuning.pretrain import PretrainModule
from lit_dlm.toy.word_problems import WordProblems
from tests.finetuning.runs import quiet

TINY = str(Path(lit_dlm.__file__).parent / "assets" / "tiny")
TASK = WordProblems("train")


def module(trainable: bool = True, **options: Any) -> PretrainModule:
    """A backbone of one layer and 8 dimensions with the tiny vocabulary."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 462, "hidden_size": 8, "intermediate_size": 16, "num_layers": 1}
    ids = {"pad_id": 0, "eos_ids": (1,), "mask_id": 2, "forbidden_ids": (0, 2, 3, 4)}
    kind = {"num_heads": 1, "tie_embeddings": True, "initializer_range": 0.08}
    architecture = Architecture(**sizes, **ids, **kind)
    backbone = HFBackbone(architecture=architecture, trainable=trainable)
    return PretrainModule(backbone, tokenizer=TINY, **options)


def drawn(**options: Any) -> PretrainDataModule:
    return PretrainDataModule(sources=[TASK], tokenizer=TINY, **options)


@pytest.mark.slow
def test_the_loss_falls_and_the_export_loads(tmp_path: Path) -> None:
    """With two batches an update."""
    model = module(warmup_steps=2, export_dir=str(tmp_path / "model"))
    held_back = drawn(batch_size=32).batch(1_000)
    data = drawn(batch_size=4, drills=TASK)
    bounds = []
    for steps in (0, 12):
        if steps:
            quiet(tmp_path, max_steps=steps, accumulate_grad_batches=2).fit(model, data)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "log", lambda *args, **kwargs: None)
            bounds.append(float(model.training_step(held_back)))
    assert bounds[1] < bounds[0] - 0.05
    head = HFBackbone(str(tmp_path / "model"), dtype="float32").model.lm_head.weight
    torch.testing.assert_close(head, model.backbone.model.lm_head.weight.detach().half().float())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (Path(TINY) / name).read_bytes()


def test_the_loss_equals_that_of_full_logits() -> None:
    """Weight G / n on the cross-entropy of each hidden cell over B G, plus the drills' mean."""
    model = module()
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = drawn(batch_size=4, drills=TASK).batch(0)
    loss = model.training_step(batch)
    loss.backward()
    table = model.backbone.model.lm_head.weight
    found, table.grad = table.grad, None

    hidden = F.pad(batch.hidden, (batch.start, 0))
    logits = model.backbone.denoise(
        batch.ids.masked_fill(hidden, 2), pad_mask=batch.pad_mask
    ).logits
    cells = F.cross_entropy(logits.transpose(1, 2), batch.ids, reduction="none") * hidden
    B, G = batch.hidden.shape
    expected = (cells.nan_to_num().sum(1) * G / hidden.sum(1)).sum() / (B * G)
    drill = batch.drill
    shown = drill.ids.masked_fill(drill.hidden, 2)
    logits = model.backbone.denoise(shown, pad_mask=drill.pad_mask).logits
    expected = expected + 0.7 * F.cross_entropy(logits[drill.hidden], drill.ids[drill.hidden])
    torch.testing.assert_close(loss, expected)
    expected.backward()
    torch.testing.assert_close(found, table.grad)


def test_matrices_and_others_are_told_apart(tmp_path: Path) -> None:
    """One layer: q, k, v, o, gate, up, down. Others: embedding, three biases, three norms."""
    with pytest.raises(ValueError, match=r"backbone\.trainable"):
        module(trainable=False)
    model = module()
    model.trainer = quiet(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match=r"trainer\.max_steps: expected at least 1, got -1"):
        model.configure_optimizers()
    model.trainer = quiet(tmp_path, max_steps=3)
    groups = model.configure_optimizers()["optimizer"].param_groups  # type: ignore[index]
    assert [len(group["params"]) for group in groups] == [7, 7]
