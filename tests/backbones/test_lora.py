"""Low-rank adapters in PEFT layout."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, lora
from lit_dlm.backbones.adapter_files import read_adapter_settings
from lit_dlm.backbones.export import export_model, save_adapter
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.training.checkpoint import export_trained
from tests.backbones.folders import IDS, randomise, write
from tests.backbones.reference import HF, LLADA, random_tensors, raw_logits
from tests.shared_data import shared

Maker = Callable[..., HFBackbone]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_adapter(
    base: dict[str, Tensor], names: list[str], *, rank: int, scale: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Under the keys that peft writes for modules of these names; the base plus ``scale B A``."""
    generator = torch.Generator().manual_seed(3)
    tensors, adapted = {}, dict(base)
    for name in names:
        weight = base[f"{name}.weight"]
        a = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        key = f"base_model.model.{name}.lora_{{}}.weight"
        tensors |= {key.format("A"): a, key.format("B"): b}
        adapted[f"{name}.weight"] = weight + scale * b @ a
    return tensors, adapted


def released_llada_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An adapter under LLaDA's own names, as training its remote code leaves it."""
    targets = ["attn_out", "ff_proj", "ff_out", "q_proj"]
    names = [f"model.transformer.blocks.{n}.{target}" for n in (0, 1) for target in targets]
    tensors, adapted = random_adapter(random_tensors(LLADA), names, rank=2, scale=8 / 2)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8.0, "bias": "none"}
    config["target_modules"] = targets
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors, adapted


def test_a_released_llada_adapter_adds_its_products_to_the_right_weights(tmp_path: Path):
    """Computed on LLaDA's own names by the slow decoder."""
    base = random_tensors(LLADA)
    folder = write(tmp_path / "base", LLADA, base)
    _, adapted = released_llada_adapter(tmp_path / "adapter")
    backbone = load_backbone(folder, adapter=tmp_path / "adapter")
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    expected = raw_logits(LLADA, adapted, IDS).float()
    torch.testing.assert_close(backbone(IDS), expected, atol=1e-4, rtol=1e-4)
    export_model(backbone, tmp_path / "merged", layout="original")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(written, adapted)


@pytest.mark.parametrize(("words", "layout"), [(LLADA, "original"), (LLADA, "hf"), (HF, "hf")])
def test_an_adapter_saved_and_loaded_is_the_same(
    tmp_path: Path, words: dict[str, Any], layout: Any
):
    folder = str(write(tmp_path / "base", words, random_tensors(words)))
    backbone = HFBackbone(folder, lora=LoRASettings(rank=3, alpha=5, targets="all")).eval()
    randomise(backbone)
    save_adapter(backbone, tmp_path / "adapter", layout=layout)
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    start = "transformer.blocks.1.ff_out" if layout == "original" else "layers.1.mlp.down_proj"
    assert f"base_model.model.model.{start}.lora_A.weight" in keys
    assert len(keys) == 2 * 7 * 2  # A and B of seven modules in two layers
    again = load_backbone(folder, adapter=tmp_path / "adapter")
    assert torch.equal(again(IDS), backbone(IDS))
    assert not torch.equal(again(IDS), load_backbone(folder)(IDS))
    assert len(again.describe()["adapter_sha256"]) == 64


class OwnCode(PreTrainedModel):
    """Modules under a release's names, and of its methods only what peft looks at."""

    config_class = PretrainedConfig

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(PretrainedConfig())
        for module in {key.rpartition(".")[0] for key in tensors}:
            *path, name = module.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            shape, bias = tensors[f"{module}.weight"].shape, f"{module}.bias" in tensors
            is_norm = len(shape) == 1
            parent.add_module(name, nn.RMSNorm(shape) if is_norm else nn.Linear(*shape[::-1], bias))
        self.load_state_dict(tensors)


class CausalOwnCode(OwnCode):
    """As of a family whose class generates the way transformers' do."""

    def prepare_inputs_for_generation(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all"])
@pytest.mark.parametrize(("words", "own"), [(LLADA, CausalOwnCode), (HF, OwnCode)])
def test_peft_itself_puts_our_adapter_on_the_released_names(
    tmp_path: Path, words: dict[str, Any], own: type[OwnCode], targets: Any
):
    """Every weight of the adapter finds its place: merged by peft, the release gives our logits."""
    tensors = random_tensors(words)
    backbone = HFBackbone(
        str(write(tmp_path / "base", words, tensors)), lora=LoRASettings(rank=2, targets=targets)
    ).eval()
    randomise(backbone)
    export_trained(backbone, "tiny", tmp_path / "adapter", write=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that keys are missing is only warned about
        theirs = PeftModel.from_pretrained(own(tensors), str(tmp_path / "adapter"))
    merged: Any = theirs.merge_and_unload()
    found = HFBackbone(str(write(tmp_path / "merged", words, merged.state_dict()))).eval()
    # Merged weights round once more, before two layers of products.
    torch.testing.assert_close(found(IDS), backbone(IDS), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(backbone(IDS), HFBackbone(str(tmp_path / "base"))(IDS), atol=1e-2)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("attn", ALL[:4]),
        ("all", ALL),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["attn_out", "ff_proj", "ff_out"], ["o_proj", "gate_proj", "down_proj"]),
    ],
)
def test_targets_of_every_family_name_the_same_layers(
    make_backbone: Maker, targets: Any, modules: list[str]
):
    """A new adapter changes nothing until it learns, and learns alone."""
    plain, backbone = make_backbone(decoder="llama"), make_backbone(decoder="llama")
    backbone.add_adapter(LoRASettings(rank=2, targets=targets))
    torch.testing.assert_close(backbone(IDS % 32), plain(IDS % 32))
    backbone(IDS % 32).square().mean().backward()
    found = {name.partition(".lora_")[0] for name, _ in adapter_parameters(backbone.model)}
    parts = {name: "mlp" if name in ALL[4:] else "self_attn" for name in ALL}
    assert found == {
        f"model.layers.{layer}.{parts[name]}.{name}" for layer in range(3) for name in modules
    }
    for name, parameter in backbone.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_true_half_precision_leaves_adapters_as_they_are(
    make_backbone: Maker, precision: Any
) -> None:
    """What Lightning does to a module before it is trained; the base is rounded, as asked."""
    half, backbone = make_backbone().to(torch.bfloat16), make_backbone()
    for model in (half, backbone):
        model.add_adapter(LoRASettings(rank=2))
    assert {p.dtype for _, p in adapter_parameters(half.model)} == {torch.float32}
    randomise(backbone)
    before = {name: p.detach().clone() for name, p in adapter_parameters(backbone.model)}
    HalfPrecision(precision).convert_module(nn.ModuleDict({"backbone": backbone}))
    assert backbone.dtype in (torch.bfloat16, torch.float16)
    after = dict(adapter_parameters(backbone.model))
    assert all(p.dtype == torch.float32 and p.equal(before[name]) for name, p in after.items())
    backbone.denoise(IDS % 32).logits[..., :2].float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in after.values())


@pytest.mark.parametrize(
    "name", ["dream_prm12k", "dream_ling_coder", "llada_prm12k", "llada_ling_coder"]
)
def test_published_tabom_adapters_load_from_their_folder(tmp_path: Path, name: str):
    """The published description over random weights under the keys that peft wrote: W + B A."""
    source = shared("model_configs", f"tabom_{name}", "adapter_config.json")
    assert read_adapter_settings(source.parent) == LoRASettings(
        rank=16, alpha=16, targets=["q_proj", "v_proj"]
    )
    words = LLADA if "llada" in name else HF
    within = "transformer.blocks.{}.{}" if "llada" in name else "layers.{}.self_attn.{}"
    base = random_tensors(words)
    names = [f"model.{within.format(n, part)}" for n in (0, 1) for part in ("q_proj", "v_proj")]
    tensors, adapted = random_adapter(base, names, rank=16, scale=1.0)
    (folder := tmp_path / name).mkdir()
    shutil.copyfile(source, folder / source.name)
    model = str(write(tmp_path / "base", words, base))
    with pytest.raises(ValueError, match=r"expected adapter_model\.safetensors"):
        load_backbone(model, adapter=folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    backbone = load_backbone(model, adapter=folder)
    expected = load_backbone(str(write(tmp_path / "adapted", words, adapted)))(IDS)
    torch.testing.assert_close(backbone(IDS), expected, atol=1e-4, rtol=1e-4)  # merged in float32


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": ["c_attn"]}, r"lora\.targets.*c_attn"),
        ({"target_modules": None}, r"lora\.targets"),
        ({"r": 0}, r"lora\.rank"),
        ({"lora_alpha": 0}, r"lora\.alpha"),
        ({"lora_dropout": 1.0}, r"lora\.dropout"),
    ],
)
def test_what_an_adapter_may_not_ask_is_named(tmp_path: Path, change: dict[str, Any], name: str):
    released_llada_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=name):
        read_adapter_settings(tmp_path / "adapter")


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path):
    base = str(write(tmp_path / "base", LLADA, random_tensors(LLADA)))
    tensors, _ = released_llada_adapter(tmp_path / "adapter")
    (first, _), *others = tensors.items()
    for broken, message in (
        (dict(others), "1 keys are absent"),
        ({**tensors, "base_model.model.other": torch.ones(1)}, "1 unexpected"),
        ({**tensors, first: torch.ones(2, 3)}, r"\(2, 3\), expected"),
    ):
        save_file(broken, tmp_path / "adapter" / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_backbone(base, adapter=tmp_path / "adapter")


def test_contradicting_options_are_named(make_backbone: Maker):
    backbone = make_backbone()
    backbone.add_adapter(LoRASettings())
    with pytest.raises(ValueError, match="one already"):
        backbone.add_adapter(LoRASettings())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The embedded models have equal shapes. A folder of the same name is taken for the same."""
    backbone = HFBackbone("tiny", lora=LoRASettings(rank=2))
    save_adapter(backbone, tmp_path / "adapter")
    export_model(backbone, tmp_path / "tiny")
    for base in ("tiny", str(tmp_path / "tiny")):
        HFBackbone(base, adapter=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"^adapter: .*trained on tiny, expected one of tiny-plan"):
        HFBackbone("tiny-planning", adapter=str(tmp_path / "adapter"))
    export_model(backbone, tmp_path / "renamed")  # which model lies in a folder nobody can know
    HFBackbone(str(tmp_path / "renamed"), adapter=str(tmp_path / "adapter"))
    assert "was trained on tiny, expected one of" in caplog.text


def test_a_side_adapter_counts_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """Forward, gradients, files: another adapter on the same weights touches none of them."""
    torch.manual_seed(0)
    model = HFBackbone("tiny", lora=LoRASettings(rank=2, targets="all"))
    randomise(model)
    before = model.denoise(IDS).logits
    trained = {n for n, value in model.named_parameters() if value.requires_grad}
    model.add_side_adapter("value", LoRASettings(rank=3, alpha=6.0, targets=["q_proj"]))
    side = dict(adapter_parameters(model.model, "value"))
    assert {tuple(value.shape) for value in side.values()} == {(3, 96), (96, 3)}
    still = {n for n, value in model.named_parameters() if value.requires_grad}
    beside = {n for n, _ in model.named_parameters() if ".value." in n}
    assert still == trained | beside
    randomise(model, "value")
    assert model.denoise(IDS).logits.equal(before)
    with model.using_adapter("value"):
        other = model.denoise(IDS).logits
    with model.using_adapter(None):
        bare = model.denoise(IDS).logits
    torch.testing.assert_close(bare, HFBackbone("tiny").denoise(IDS).logits)
    assert not any(torch.allclose(other, one) for one in (bare, before))
    other.nan_to_num(0.0, 0.0, 0.0).sum().backward()
    assert {n for n, v in model.named_parameters() if v.grad is not None} == beside
    save_adapter(model, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("value" in key for key in written)
    export_model(model, tmp_path / "model")
    with torch.no_grad():
        again = HFBackbone(str(tmp_path / "model")).denoise(IDS).logits
    torch.testing.assert_close(again, before, rtol=1e-2, atol=2e-3)  # one rounding more


class OnGPU(Tensor):
    """A tensor that says it is on a GPU, and notes copies to the host."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]
    to_host = 0

    def to(self, *args: Any, **options: Any) -> Tensor:
        type(self).to_host += 1
        return super().to(*args, **options)


@pytest.mark.parametrize(("room", "copies"), [(4, 0), (3, 1)])
def test_merged_weights_come_back_from_a_gpu_with_room_for_a_copy(
    room: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3, 5)
    base = weight.clone().as_subclass(OnGPU)
    monkeypatch.setattr(lora, "base_parameters_adapted", lambda _: {"q_proj": (base, nn.Module())})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room * weight.nbytes, 1 << 40))
    monkeypatch.setattr(OnGPU, "to_host", 0)
    with lora.restored(nn.Module(), {}):
        base.mul_(2.0)
    assert base.as_subclass(Tensor).equal(weight)
    assert OnGPU.to_host == copies
