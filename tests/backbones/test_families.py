"""Translation of published configurations and keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.families import FAMILIES, KeyMap
from lit_dlm.backbones.resolution import read_added_tokens, read_config, resolve
from tests.backbones.conftest import SHARED
from tests.backbones.releases import DREAM, LLADA


def translated(config: dict[str, Any], **options: Any) -> Architecture:
    return resolve(config, **options).architecture


def test_dream_is_a_shifted_qwen2():
    architecture = translated(DREAM)
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


def test_llada_is_an_unshifted_llama():
    architecture = translated(LLADA)
    assert architecture == Architecture(
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


def test_the_released_sdar_4b_configuration_translates():
    folder = SHARED / "model_configs" / "sdar_4b_chat"
    if not folder.is_dir():
        pytest.skip(f"no configuration at {folder}")
    resolved = resolve(read_config(folder))
    architecture = resolved.architecture
    assert (architecture.decoder, architecture.family) == ("qwen3", "sdar")
    assert (architecture.hidden_size, architecture.head_dim) == (2560, 128)
    assert (architecture.attention, architecture.block_size) == ("block", 4)
    assert architecture.spec().mask_id == 151669
    assert architecture.shift == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {resolved.keys.ours(key) for key in index} == expected_keys(architecture)


def expected_keys(architecture: Architecture) -> set[str]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return set(AutoModelForCausalLM.from_config(architecture.hf_config()).state_dict())


def test_every_llada_key_finds_its_place():
    resolved = resolve({**LLADA, "include_qkv_bias": True, "n_layers": 2})
    blocks = ["attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out"]
    blocks += ["ff_proj", "up_proj", "ff_out"]
    keys = [f"blocks.{n}.{name}.weight" for n in (0, 1) for name in blocks]
    keys += [f"blocks.{n}.{name}_proj.bias" for n in (0, 1) for name in "qkv"]
    keys += ["wte.weight", "ln_f.weight", "ff_out.weight"]
    renamed = {resolved.keys.ours(f"model.transformer.{key}") for key in keys}
    assert renamed == expected_keys(resolved.architecture)


def test_ff_out_names_the_head_at_the_top_and_the_down_projection_in_a_block():
    rename = resolve(LLADA).keys.ours
    assert rename("model.transformer.ff_out.weight") == "lm_head.weight"
    down = rename("model.transformer.blocks.7.ff_out.weight")
    assert down == "model.layers.7.mlp.down_proj.weight"
    gate = rename("model.transformer.blocks.7.ff_proj.weight")
    assert gate == "model.layers.7.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_type", "sequential"),
        ("alibi", True),
        ("attention_layer_norm", True),
        ("block_group_size", 2),
        ("layer_norm_type", "gemma_rms"),
        ("include_bias", True),
        ("input_emb_norm", True),
        ("activation_type", "swiglu"),
        ("rope", False),
    ],
)
def test_unsupported_llada_options_are_refused_by_name(option: str, value: object):
    with pytest.raises(ValueError, match=f"option {option}={value!r} is not supported"):
        resolve({**LLADA, option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_sliding_window", True), ("hidden_act", "gelu"), ("attention_bias", True)],
)
def test_unsupported_decoder_options_are_refused_by_name(option: str, value: object):
    with pytest.raises(ValueError, match=f"option {option}={value!r} is not supported"):
        resolve({**DREAM, option: value})


@pytest.mark.parametrize("model_type", ["llada_moe", "sdar_moe", "gpt2", None])
def test_unknown_model_types_are_refused_by_name(model_type: str | None):
    with pytest.raises(ValueError, match=f"model_type {model_type!r} is not supported"):
        resolve({**DREAM, "model_type": model_type})


@pytest.mark.parametrize("option", ["hidden_size", "rope_theta", "num_hidden_layers"])
def test_an_absent_size_is_named(option: str):
    config = {key: value for key, value in DREAM.items() if key != option}
    with pytest.raises(ValueError, match=f"option {option} is absent"):
        resolve(config)


def test_rope_scaling_keeps_theta_and_the_newer_spelling():
    scaled = translated({**DREAM, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled.hf_config().rope_parameters == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 1e6,
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mask_token_id": 151665}, "mask_id"),
        ({"pad_token_id": 7}, "pad_id"),
        ({"eos_token_id": [151643, 9]}, "eos_ids"),
    ],
)
def test_ids_that_contradict_the_released_vocabulary_stop(change: dict[str, Any], field: str):
    with pytest.raises(ValueError, match=f"{field} is .* set spec_overrides.{field}"):
        resolve({**DREAM, **change})


def test_a_tokenizer_with_another_mask_token_stops():
    with pytest.raises(ValueError, match="mask_id is 151669"):
        resolve(DREAM, added_tokens={"<|mask|>": 151669})


def test_an_override_wins_over_table_and_files():
    config = {**DREAM, "mask_token_id": 151665}
    assert translated(config, spec_overrides={"mask_id": 151665}).mask_id == 151665
    assert translated(DREAM, spec_overrides={"positions": "arange"}).positions == "arange"


def test_an_unknown_override_is_named():
    with pytest.raises(ValueError, match="spec_overrides: unknown field 'mask_token'"):
        resolve(DREAM, spec_overrides={"mask_token": 1})


def test_diffucoder_pads_with_either_of_its_ids():
    diffucoder = translated(DREAM, source="apple/DiffuCoder-7B-cpGRPO: ")
    assert diffucoder.family == "diffucoder"
    assert translated({**DREAM, "pad_token_id": 151667}).pad_id == 151667


def test_plain_decoders_need_a_mask_id():
    config = {**DREAM, "model_type": "qwen2"}
    del config["mask_token_id"]
    with pytest.raises(
        ValueError, match=r"start from it with from_ar, or .*spec_overrides\.mask_id"
    ):
        resolve(config)
    adapted = translated(config, spec_overrides={"mask_id": 151666})
    assert (adapted.family, adapted.mask_id, adapted.shift) == ("qwen2", 151666, 0)


@pytest.mark.parametrize(
    ("folder", "family"), [("dream", "dream"), ("sdar", "sdar"), ("llada", "llada")]
)
def test_the_table_agrees_with_the_released_tokenizers(folder: str, family: str):
    path = SHARED / "tokenizers" / folder
    if not path.is_dir():
        pytest.skip(f"no tokenizer at {path}")
    added = read_added_tokens(path)
    ids = FAMILIES[family].ids
    assert {added[token] for token in ids.mask_tokens if token in added} == {ids.mask}
    assert tuple(added[token] for token in ids.eos_tokens) == ids.eos


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_broken_configuration_names_the_file(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "source", "family"),
    [
        (DREAM, "Dream-org/Dream-Coder-v0-Instruct-7B: ", "dream"),
        ({**DREAM, "model_type": "sdar", "mask_token_id": 151669}, "JetLM/SDAR-8B: ", "sdar"),
        ({**DREAM, "model_type": "sdar", "mask_token_id": 151669}, "x/TraDo-8B/: ", "trado"),
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
    config = {
        **{key: value for key, value in DREAM.items() if not key.endswith("token_id")},
        "model_type": model_type,
        "vocab_size": 126464,
        "num_key_value_heads": 28,
        "mm_vision_tower": "google/siglip2-so400m-patch14-384",
    }
    resolved = resolve(config)
    architecture = resolved.architecture
    assert (architecture.family, architecture.decoder) == ("llada_v", "llama")
    assert (architecture.shift, architecture.mask_id) == (0, 126336)
    assert architecture.eos_ids == (126081, 126348)
    assert resolved.keys.ours("model.vision_tower.x.weight") is None
    assert resolved.keys.ours("model.layers.3.mlp.up_proj.weight") == (
        "model.layers.3.mlp.up_proj.weight"
    )


def test_a_family_may_be_asked_for_within_its_model_type():
    assert translated(DREAM, spec_overrides={"family": "diffucoder"}).family == "diffucoder"
    with pytest.raises(ValueError, match="model_type 'Dream' is not of family 'llada'"):
        resolve(DREAM, spec_overrides={"family": "llada"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "option layer_types="),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2}}, "rope_type='mrope' is not"),
        ({"quantization_config": {"bits": 4}}, "option quantization_config="),
        ({"num_experts": 8}, "option num_experts=8 is not supported"),
    ],
)
def test_other_unsupported_options_are_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        resolve({**DREAM, **change})


def test_dropout_of_the_release_is_mentioned_not_used(caplog: pytest.LogCaptureFixture):
    resolve({**LLADA, "residual_dropout": 0.1})
    assert "option residual_dropout=0.1 takes no effect here" in caplog.text


def test_a_folder_resolves_without_weights_and_names_itself(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DREAM))
    resolved = resolve(tmp_path)
    assert resolved.spec.mask_id == 151666
    assert resolved.config == DREAM
    (tmp_path / "config.json").write_text(json.dumps({**DREAM, "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=f"{tmp_path}: config.json: option hidden_act='gelu'"):
        resolve(tmp_path)


@pytest.mark.parametrize("layout", ["hf", "llada"])
def test_keys_go_there_and_back(layout: str):
    keys = KeyMap(layout=layout)  # type: ignore[arg-type]
    ours = [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.12.input_layernorm.weight",
        "model.layers.12.post_attention_layernorm.weight",
        "model.layers.12.self_attn.q_proj.bias",
        "model.layers.12.self_attn.o_proj.weight",
        "model.layers.12.mlp.gate_proj.weight",
        "model.layers.12.mlp.down_proj.weight",
    ]
    originals = [keys.original(key) for key in ours]
    assert [keys.ours(key) for key in originals] == ours
    assert [keys.ours(key.removeprefix("model.")) for key in originals] == ours
    assert all(key.startswith("model.transformer.") for key in originals) == (layout == "llada")
    assert keys.ours("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert keys.ours("somewhere.else") == "somewhere.else"
