"""Checkpoints are loaded whole into the model that they came from, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_dlm.backbones import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.rl.module import VALUE, TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.training.checkpoint import ADAPTERS_KEY
from tests.finetuning.runs import Data, examples, quiet, run, small, trained
from tests.rollouts import decoder

WAY_OUT = r"backbone\.init_args\.adapter=RUN_DIR/adapter"


def bare() -> HFBackbone:
    return small(lora=False).requires_grad_(False)


def adapted(**changes: Any) -> HFBackbone:
    model = bare()
    settings: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": "all", **changes}
    model.add_adapter(LoRASettings(**settings))
    return model


def sft(backbone: HFBackbone | None = None) -> SFTModule:
    return SFTModule(backbone or adapted(), tokenizer="tiny")


def decode(backbone: HFBackbone) -> DecodeModule:
    return DecodeModule(backbone, tokenizer="tiny")


def stored(module: LightningModule) -> dict[str, Any]:
    """What Lightning would write of a module."""
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def test_a_run_is_scored_by_its_own_settings_only(tmp_path: Path) -> None:
    """Through the trainer: the same adapter gets the weights, the bare model is refused."""
    module, data, path = sft(), Data(examples(), batch_size=4, val_fraction=0.3), "run.ckpt"
    run(module, data, tmp_path, steps=2, total=2)
    same, options = sft(), {"ckpt_path": tmp_path / path, "weights_only": True}
    quiet(tmp_path).validate(same, data, verbose=False, **options)
    torch.testing.assert_close(trained(same), trained(module), rtol=0, atol=0)
    refused = rf"has no use here for 28 weights.*{WAY_OUT}"
    with pytest.raises(ValueError, match=refused):
        quiet(tmp_path).validate(sft(bare()), data, **options)
    with pytest.raises(ValueError, match=refused):
        quiet(tmp_path).predict(decode(bare()), [0], **options)


def test_other_settings_of_an_adapter_are_refused_even_where_its_weights_are_not_seen() -> None:
    """Scales of the same weights; and FSDP2 hands over all but the weights."""
    whole = stored(sft())
    decode(adapted(dropout=0.5)).on_load_checkpoint(whole)  # no part of the weights
    for name, value in {"alpha": 8.0, "rank": 3, "rslora": True}.items():
        with pytest.raises(ValueError, match=rf"kbone\.model\.default has .*'{name}'.*{WAY_OUT}"):
            decode(adapted(**{name: value})).on_load_checkpoint(whole)
    settings = {ADAPTERS_KEY: whole[ADAPTERS_KEY]}
    for other in (adapted(targets=["q_proj"]), bare()):
        with pytest.raises(ValueError, match=r"the checkpoint's adapter backbone\.model\.default"):
            decode(other).on_load_checkpoint(settings)
    settings[ADAPTERS_KEY]["backbone.model.default"]["layers"] = [0, 1]  # as older ones have it
    decode(adapted()).on_load_checkpoint(settings)


def test_whole_weights_load_into_a_frozen_model_without_an_adapter() -> None:
    module = sft(small(lora=False))
    checkpoint = stored(module)
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert checkpoint["state_dict"].keys() == names
    decode(bare()).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"lacks 28 weights, such as backbone"):
        decode(adapted()).on_load_checkpoint(checkpoint)


def test_constants_of_frozen_matrices_in_4_bits_stay_out_of_a_checkpoint() -> None:
    """As bitsandbytes adds them; a run goes on from its own checkpoint."""
    module = sft()

    def add_constants(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = torch.ones(1)

    for name, part in module.named_modules():
        if name.endswith(".base_layer"):
            part.register_state_dict_post_hook(add_constants)
    checkpoint = stored(module)
    assert checkpoint["state_dict"].keys() == trained(module).keys()
    module.on_load_checkpoint(checkpoint)


def test_a_value_adapter_belongs_to_the_checkpoint() -> None:
    def rl(alpha: float | None) -> TraceRLModule:
        value = None if alpha is None else ValueObjective(lora=LoRASettings(rank=2, alpha=alpha))
        backbone = adapted()
        decoders = {"one": decoder(backbone)}
        return TraceRLModule(backbone, tokenizer="tiny", decoders=decoders, value=value)

    checkpoint = stored(rl(4.0))
    assert set(checkpoint[ADAPTERS_KEY]) == {"backbone.model.default", f"backbone.model.{VALUE}"}
    rl(4.0).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=rf"adapter backbone\.model\.{VALUE} has"):
        rl(8.0).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="has no use here for"):
        rl(None).on_load_checkpoint(checkpoint)
    rl(None).on_load_checkpoint(stored(sft()))
