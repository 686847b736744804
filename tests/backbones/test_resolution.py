"""Translation of published configurations, keys and ids of special tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_dlm.backbones.architecture import Architecture, original_key, whole_key
from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.backbones.resolution import read_config, resolve
from tests.backbones.reference import HF, LLADA as REDUCED_LLADA
from tests.shared_data import shared
from tests.twins import RELEASES

DREAM = dict(RELEASES["Dream-org/Dream-v0-Instruct-7B"].config)
LLADA = dict(RELEASES["GSAI-ML/LLaDA-8B-Instruct"].config)
SDAR = dict(RELEASES["JetLM/SDAR-4B-Chat"].config)
RELEASED = {"dream": DREAM, "sdar": SDAR, "llada": LLADA}
DREAM_TOKENS = {
    "<|endoftext|>": 151643, "<|im_end|>": 151645, "<|beginoftext|>": 151665, "<|mask|>": 151666
}  # fmt: skip
LLADA_TOKENS = {
    "<|startoftext|>": 126080, "<|endoftext|>": 126081, "<|mdm_mask|>": 126336, "<|eot_id|>": 126348
}  # fmt: skip


def translated(config: dict[str, Any], **options: Any) -> Architecture:
    return resolve(config, **options).architecture


def without(config: dict[str, Any], *options: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in options}


def test_dream_is_a_shifted_qwen2():
    architecture = translated(DREAM, added_tokens=DREAM_TOKENS)
    assert architecture == Architecture(
        decoder="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        rope_theta=1e6,
        max_positions=131072,
        family="dream",
        mask_id=151666,
        pad_id=151643,
        eos_ids=(151643, 151645),
        bos_id=151665,
        shift=1,
    )
    config = architecture.hf_config()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert set(config.layer_types) == {"full_attention"}
    scaled = translated({**DREAM, "rope_scaling": {"type": "linear", "factor": 2.0}})  # the older
    expected = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert scaled.hf_config().rope_parameters == expected


def test_llada_is_an_unshifted_llama():
    assert translated(LLADA, added_tokens=LLADA_TOKENS) == Architecture(
        decoder="llama",
        vocab_size=126464,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        rope_theta=5e5,
        max_positions=4096,
        rms_norm_eps=1e-5,
        family="llada",
        mask_id=126336,
        pad_id=126081,
        eos_ids=(126081, 126348),
        bos_id=126080,
    )


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"include_qkv_bias": True}, "decoder", "qwen2"),
        ({"n_kv_heads": None}, "num_kv_heads", 32),
        ({"n_kv_heads": None, "multi_query_attention": True}, "num_kv_heads", 1),
        ({"n_kv_heads": 8}, "num_kv_heads", 8),
        ({"mlp_hidden_size": None}, "intermediate_size", 16384),  # 4 * 4096
        ({"embedding_size": None, "vocab_size": 126400}, "vocab_size", 126400),
        ({"vocab_size": 126349}, "vocab_size", 126464),  # the matrix is higher
        ({"scale_logits": True}, "logit_scale", 1 / 64),  # 4096 ** -0.5
        ({"weight_tying": True}, "tie_embeddings", True),
        ({"attention_dropout": 0.1}, "attention_dropout", 0.1),
        ({"model_type": "mmada", "embedding_size": 134656}, "family", "mmada"),
    ],
)
def test_llada_options_translate(change: dict[str, Any], field: str, value: object):
    assert getattr(translated({**LLADA, **change}), field) == value


@pytest.mark.parametrize("layout", ["hf", "llada"])
def test_keys_have_the_names_of_their_files(layout: Any):
    config = translated({**LLADA, "include_qkv_bias": True, "n_layers": 2}).hf_config()
    with torch.device("meta"):
        ours = set(AutoModelForCausalLM.from_config(config).state_dict())
    originals = {original_key(key, layout) for key in ours}
    assert len(originals) == len(ours)
    assert {whole_key(key.removeprefix("model.")) for key in originals} == originals
    assert all(key.startswith("model.transformer.") for key in originals) == (layout == "llada")
    assert whole_key("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert whole_key("model.vision_tower.x.weight") is None
    assert whole_key("somewhere.else") == "somewhere.else"
    assert original_key("lm_head.weight", "llada") == "model.transformer.ff_out.weight"
    adapter = "layers.3.self_attn.q_proj.lora_A.weight"
    assert original_key(f"model.{adapter}", "nemotron") == f"encoder.{adapter}"
    for name, ours in (("ff_out", "down_proj"), ("ff_proj", "gate_proj")):
        for end in ("weight", "lora_A.weight"):
            key = f"model.transformer.blocks.7.{name}.{end}"
            assert original_key(f"model.layers.7.mlp.{ours}.{end}", "llada") == key


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        (LLADA, "block_type", "sequential"),
        (LLADA, "alibi", True),
        (LLADA, "attention_layer_norm", True),
        (LLADA, "block_group_size", 2),
        (LLADA, "layer_norm_type", "gemma_rms"),
        (LLADA, "include_bias", True),
        (LLADA, "input_emb_norm", True),
        (LLADA, "activation_type", "swiglu"),
        (LLADA, "rope", False),
        (DREAM, "use_sliding_window", True),
        (DREAM, "hidden_act", "gelu"),
        (DREAM, "attention_bias", True),
        (DREAM, "layer_types", ["sliding_attention"]),
        (DREAM, "model_type", "llada_moe"),
        (DREAM, "model_type", None),
        (DREAM, "hidden_size", None),
        (DREAM, "rope_theta", None),
    ],
)
def test_what_the_decoders_lack_is_refused_by_name(config: Any, option: str, value: Any):
    with pytest.raises(ValueError, match=option):
        resolve({**config, option: value})


def test_plain_decoders_need_a_mask_id():
    config = without({**DREAM, "model_type": "qwen2"}, "mask_token_id")
    with pytest.raises(ValueError, match=r"from_ar, or .*spec_overrides\.mask_id"):
        resolve(config)
    adapted = translated(config, spec_overrides={"mask_id": 151666})
    assert (adapted.family, adapted.mask_id, adapted.shift) == ("qwen2", 151666, 0)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_broken_configuration_names_the_file(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


# -- families ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "source", "family"),
    [
        (DREAM, "Dream-org/Dream-Coder-v0-Instruct-7B: ", "dream"),
        (DREAM, "apple/DiffuCoder-7B-cpGRPO: ", "diffucoder"),
        (SDAR, "JetLM/SDAR-8B: ", "sdar"),
        (SDAR, "x/TraDo-8B/: ", "trado"),
        (LLADA, "GSAI-ML/LLaDA-1.5: ", "llada"),
        (LLADA, "Gen-Verse/MMaDA-8B-Base: ", "mmada"),
        ({**LLADA, "model_type": "mmada"}, "anything: ", "mmada"),
        (LLADA, "mmada/LLaDA: ", "llada"),  # only the last part of a path counts
    ],
)
def test_families_that_share_a_model_type_are_told_by_name(
    config: dict[str, Any], source: str, family: str
):
    assert translated(config, source=source).family == family


@pytest.mark.parametrize("model_type", ["llava_llada", "llada"])
def test_llada_v_is_a_llama_under_transformers_names(model_type: str):
    """Its classes call the text part llada as well, which its option names tell apart."""
    config = {**RELEASES["GSAI-ML/LLaDA-V"].config, "model_type": model_type}
    resolved = resolve(config, added_tokens=LLADA_TOKENS)
    assert (resolved.spec.family, resolved.layout) == ("llada_v", "hf")
    assert (resolved.architecture.decoder, resolved.spec.shift) == ("llama", 0)
    assert (resolved.spec.mask_id, resolved.spec.eos_ids) == (126336, (126081, 126348))


# -- special tokens ------------------------------------------------------------------------------


def folder_of(tmp_path: Path, config: dict[str, Any], tokenizer: str) -> Path:
    """A model folder without weights, with the files of a released tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = shared("tokenizers", tokenizer)
    for name in ("added_tokens.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", RELEASED)
def test_released_tokenizers_give_the_ids(tmp_path: Path, name: str):
    """Whatever the configuration leaves out."""
    config = without(RELEASED[name], "mask_token_id", "eos_token_id", "pad_token_id")
    spec = resolve(folder_of(tmp_path, config, name)).spec
    assert (spec.mask_id, spec.eos_ids, spec.bos_id) == {
        "dream": (151666, (151643, 151645), 151665),
        "sdar": (151669, (151643, 151645), None),
        "llada": (126336, (126081, 126348), 126080),
    }[name]
    assert (spec.pad_id, spec.forbidden_ids) == (spec.eos_ids[0], (spec.mask_id,))


@pytest.mark.parametrize(("config", "tokenizer"), [(DREAM, "sdar"), (SDAR, "dream")])
def test_the_tokenizer_of_a_sister_vocabulary_is_noticed(
    tmp_path: Path, config: dict[str, Any], tokenizer: str
):
    """Dream's mask id is a tool tag there, and the other way round it is no token at all."""
    folder = folder_of(tmp_path, config, tokenizer)
    with pytest.raises(ValueError, match=r"spec_overrides\.mask_id"):
        resolve(folder)
    assert resolve(folder, spec_overrides={"mask_id": 151669}).spec.mask_id == 151669


def test_a_mask_that_moved_is_noticed_but_a_reduced_vocabulary_is_its_own():
    for tokens in ({"<|mask|>": 151669}, {"<|im_end|>": 151645}):
        with pytest.raises(ValueError, match="mask_token_id is 151666"):
            resolve(DREAM, added_tokens=tokens)
    assert translated(DREAM, added_tokens={"<|mask|>": 151666, "<|im_end|>": 7}).eos_ids == (7,)
    spec = resolve(REDUCED_LLADA).spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (3, (1,), 0)
    config = without(REDUCED_LLADA, "mask_token_id")
    assert translated(config, added_tokens={"<|mdm_mask|>": 9}).mask_id == 9


def test_overrides_win():
    for field, value in (("mask_id", 151665), ("positions", "arange"), ("family", "diffucoder")):
        assert getattr(translated(DREAM, spec_overrides={field: value}), field) == value
    assert translated({**DREAM, "pad_token_id": 151667}).pad_id == 151667
    with pytest.raises(ValueError, match=r"spec_overrides: .*'mask_id'.* got 'mask_token'"):
        resolve(DREAM, spec_overrides={"mask_token": 1})
    with pytest.raises(ValueError, match=r"model_type 'Dream' .* 'llada'"):
        resolve(DREAM, spec_overrides={"family": "llada"})


def test_what_nothing_names_is_unknown_and_said(caplog: pytest.LogCaptureFixture):
    config = without(HF, "mask_token_id", "pad_token_id", "eos_token_id")
    spec = resolve(config).spec
    assert (spec.mask_id, spec.eos_ids, spec.forbidden_ids) == (UNKNOWN_ID, (UNKNOWN_ID,), ())
    assert spec.pad_id == 0
    assert "the files name no mask_id; decoding needs it as spec_overrides.mask_id" in caplog.text
    caplog.clear()
    resolve(config, spec_overrides={"mask_id": 3, "eos_ids": [1]})
    assert not caplog.text
