"""Folders of strangers: each is a model, or one line that names the file which is wrong."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_dlm.backbones import HFBackbone, tokenizer_of
from lit_dlm.backbones.export import save_adapter
from lit_dlm.backbones.location import ASSETS
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.rewards import RewardModel
from lit_dlm.system.files import write_folder
from lit_dlm.tracelock.scorer import AcceptanceScorer
from lit_dlm.vision.base import VisionSettings
from tests.backbones.folders import SPARSE, VARIANTS, weights_of, write
from tests.rewards.classifiers import save_classifier

ABSENT: Any = object()
HUGE = 10**12
DEEP = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
NO_OBJECT = [b"", b"{", b"[1]", b"5", b'"x"', b"null", b'{"a": "\xff"}', b"[" * 10_000, DEEP]
NO_SIZE = ["96", 0, -1, 1.5, HUGE, 10**400, float("nan"), True, [], {}]
NO_NUMBER = ["x", -1.0, float("nan"), float("inf"), [], {}]
NO_ID = ["x", -7, 1.5, HUGE, {}, [[]]]
INDEX = "model.safetensors.index.json"


def rows(kind: str, file: str, key: str, values: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Changes of one value in a JSON file; ``key`` is a path such as ``rope_parameters.factor``."""
    for value in values:
        yield kind, file, {key: value}


def table() -> Iterator[tuple[Any, ...]]:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for content in NO_OBJECT:
            yield "tiny", file, content
    for content in NO_OBJECT:
        yield "ar", "generation_config.json", content
        yield "tiny", "added_tokens.json", content
        yield "shards", INDEX, content
        yield "adapter", "adapter_config.json", content
        yield "qwen2", "vocab.json", content
    # config.json
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    for key in (*sizes, "num_attention_heads", "num_key_value_heads"):
        yield from rows("tiny", "config.json", key, NO_SIZE)
    for key in ("d_model", "n_heads", "n_kv_heads", "n_layers"):
        yield from rows("llada", "config.json", key, NO_SIZE)
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        yield from rows("sdar_moe", "config.json", key, NO_SIZE)
        yield from rows("llada2", "config.json", key, NO_SIZE)
    for key in ("n_group", "topk_group"):
        yield from rows("llada2", "config.json", key, NO_SIZE)
    for key in ("num_hidden_layers", "num_attention_heads", "model_type", "hidden_size"):
        yield from rows("tiny", "config.json", key, [ABSENT])
        yield from rows("dream", "config.json", key, [ABSENT])
    yield from rows("llada", "config.json", "mlp_hidden_size", ["x", 0, 2.5, {}])
    yield from rows("dream", "config.json", "rope_theta", [ABSENT, *NO_NUMBER, 0])
    yield from rows("dream", "config.json", "rope_scaling", ["x", 5, [1], {"rope_type": "x"}])
    yield from rows("dream", "config.json", "rope_scaling", [{"rope_type": [], "factor": 2}])
    for kind in ("linear", "yarn", "longrope", "llama3"):
        for more in ({}, {"factor": "x"}, {"factor": float("nan")}):
            yield from rows("dream", "config.json", "rope_scaling", [{"rope_type": kind, **more}])
    yield from rows("dream", "config.json", "rms_norm_eps", NO_NUMBER)
    yield from rows("dream", "config.json", "attention_dropout", ["x", 2, -1, [1]])
    yield from rows("dream", "config.json", "max_position_embeddings", ["x", 0, -1, 1.5, []])
    yield from rows("dream", "config.json", "layer_types", [5, "x", [[]], [1]])
    for key in ("mask_token_id", "eos_token_id", "pad_token_id"):
        yield from rows("dream", "config.json", key, NO_ID)
    yield from rows("sdar", "config.json", "block_size", ["4", 0, -1, 1.5, []])
    yield from rows("dream", "config.json", "model_type", [5, [], {}, "\x1b]0;x\x07"])
    yield from rows(
        "tiny", "config.json", "lit_dlm", [5, "x", [1], {"\x1b]0;x\x07": 1}, {"a\nb": 1}]
    )
    yield from rows("dream", "config.json", "lit_dlm_original", [5, "x", [1]])
    for key in ("mask_id", "eos_ids", "forbidden_ids", "pad_id"):
        yield from rows("tiny", "config.json", f"lit_dlm.{key}", ["x", [[]], {"a": 1}, 10**9])
    yield from rows("tiny", "config.json", "lit_dlm.logit_scale", NO_NUMBER)
    yield from rows("tiny", "config.json", "lit_dlm.family", [5, []])
    # what stands beside it
    yield from rows("ar", "generation_config.json", "eos_token_id", ["x", 1.5, {}, [[]]])
    for entry in ([], "x", {"7": 5}, {"7": {}}, {"x": {"content": "y"}}, {"7": {"content": []}}):
        yield from rows("tiny", "tokenizer_config.json", "added_tokens_decoder", [entry])
    yield from rows("tiny", "tokenizer_config.json", "model_max_length", ["x", [], {}])
    yield from rows("tiny", "tokenizer_config.json", "padding_side", ["up", 5, []])
    yield from rows("tiny", "tokenizer_config.json", "eos_token", [5, [], {}, {"x": 1}])
    yield from rows(
        "tiny", "tokenizer_config.json", "extra_special_tokens", [5, "x", [5], {"x": 5}]
    )
    yield from rows("tiny", "added_tokens.json", "x", ["y", 1.5, [], {}, None])
    for content in (b"{}", b'{"model": 5}', b'{"model": {"vocab": 5}}', b'{"added_tokens": 5}'):
        yield "tiny", "tokenizer.json", content
    yield from rows("tiny", "tokenizer.json", "model", [ABSENT, None, 5, [], {}, {"type": "x"}])
    yield from rows("tiny", "tokenizer.json", "model.vocab", [None, 5, [], {"a": "b"}, {"a": -1}])
    yield from rows("tiny", "tokenizer.json", "added_tokens", [5, "x", [5], [{}], [{"id": "x"}]])
    yield from rows("tiny", "tokenizer.json", "pre_tokenizer", [5, {}, {"type": "x"}])
    yield "qwen2", "merges.txt", b"\xff"
    yield "qwen2", "merges.txt", b"a b c\n"
    yield "qwen2", "vocab.json", b'{"a": "b"}'
    yield "qwen2", "vocab.json", b'{"a": 1.5}'
    # weights
    yield from rows("shards", INDEX, "weight_map", [ABSENT, 5, [], "x", {"a": 5}, {"a": []}])
    for name in ("none.safetensors", "../model.safetensors", "/etc/passwd", "", ".", "..", "a\0"):
        yield from rows("shards", INDEX, "weight_map", [{"a": name}])
    for content in (b"", b"\0", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}", b"x" * 100):
        yield "tiny", "model.safetensors", content
        yield "adapter", "adapter_model.safetensors", content
        yield "policy", "model.safetensors", content
        yield "projector", "projector.safetensors", content
    # what transformers and Pillow read
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for content in NO_OBJECT:
            yield "reward", file, content
    yield from rows("reward", "config.json", "hidden_size", ["16", 0, -1, [], {}])
    yield "reward", "model.safetensors", b"x" * 100
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"  # Ghostscript would run it
    for content in (b"", b"x" * 100, b"\x89PNG\r\n\x1a\n" + bytes(40), script):
        yield "pictures", "codebook.png", content
    # adapters, policies, projectors
    yield from rows("adapter", "adapter_config.json", "r", ["x", 0, -1, 1.5, HUGE, 10**6, [], None])
    yield from rows("adapter", "adapter_config.json", "lora_alpha", ["x", 0, -1, [], None])
    yield from rows("adapter", "adapter_config.json", "lora_dropout", ["x", 2, -1, []])
    yield from rows("adapter", "adapter_config.json", "target_modules", [5, "x", [5], [[]], {}, []])
    yield from rows("adapter", "adapter_config.json", "target_parameters", [5, "x", [5], [[]]])
    yield from rows("adapter", "adapter_config.json", "base_model_name_or_path", [5, [1], {"a": 1}])
    for content in NO_OBJECT:
        yield "policy", "config.json", content
        yield "projector", "projector.json", content
    for key in ("format", "version", "head", "settings", "projector", "backbone", "training"):
        yield from rows("policy", "config.json", key, [ABSENT, 5, "x", [1]])
    for key in ("width", "num_layers", "num_heads", "ffn_width"):
        yield from rows("policy", "config.json", f"head.{key}", NO_SIZE)
    yield from rows("policy", "config.json", "settings.hidden_layers", [5, "x", [], ["x"], {}])
    yield from rows("policy", "config.json", "settings.layout", [5, "x", []])
    yield from rows("policy", "config.json", "settings.features", [5, "x", [], {"x": 1}])
    for key in ("hidden_size", "num_snapshots", "hidden_rank", "delta_rank"):
        yield from rows("policy", "config.json", f"projector.{key}", NO_SIZE)
        values = ["96", 0, -1, HUGE, [], {}] if key == "num_snapshots" else NO_SIZE
        yield from rows("projector", "projector.json", f"config.{key}", values)
    yield from rows("projector", "projector.json", "config", [ABSENT, 5, "x", [1], {"x": 1}])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as they should be, by kind."""
    place = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    for kind, name in (("dream", "dream"), ("llada", "plain"), ("sdar", "sdar")):
        write(place / kind, VARIANTS[name], weights_of(VARIANTS[name]))
    for kind in ("llada2", "sdar_moe"):
        write(place / kind, SPARSE[kind], weights_of(SPARSE[kind]))
    dream = VARIANTS["dream"]
    write(place / "shards", dream, weights_of(dream), shards=2)
    write(place / "ar", {**dream, "model_type": "qwen2"}, weights_of(dream))
    shutil.copytree(ASSETS / "tiny", place / "tiny", ignore=shutil.ignore_patterns("*policy"))
    shutil.copytree(ASSETS / "tiny" / "outcome_policy", place / "policy")
    save_adapter(HFBackbone("tiny", lora=LoRASettings(rank=2)), place / "adapter")
    Projector(ProjectorConfig(hidden_size=8, hidden_rank=4, delta_rank=2)).save(place / "projector")
    save_classifier(place / "reward")
    shutil.copytree(ASSETS / "tiny-pictures", place / "pictures")
    (place / "qwen2").mkdir()
    (place / "qwen2" / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (place / "qwen2" / "merges.txt").write_text("#version: 0.2\na b\n")
    return place


def load(kind: str, folder: Path) -> None:
    if kind == "policy":
        AcceptanceScorer.load(folder)
    elif kind == "projector":
        Projector.load(folder)
    elif kind == "adapter":
        HFBackbone("tiny", adapter=str(folder))
    elif kind == "reward":
        assert RewardModel(str(folder)).model.config.num_labels == 1
    elif kind == "pictures":
        HFBackbone(str(folder), vision=VisionSettings())
    elif kind == "qwen2":
        load_tokenizer(str(folder))
    else:
        backbone = HFBackbone(str(folder))
        if kind == "tiny":
            tokenizer_of(backbone, str(folder))


KINDS = ("tiny", "dream", "llada", "sdar", "llada2", "sdar_moe", "shards", "ar", "qwen2")
WEIGHTS = {"policy": "model.safetensors", "projector": "projector.safetensors"}


def test_the_folders_are_sound(sound: Path):
    for kind in (*KINDS, "adapter", "policy", "projector", "reward", "pictures"):
        load(kind, sound / kind)


def change(path: Path, change: bytes | dict[str, Any], kind: str) -> None:
    if isinstance(change, bytes):
        path.write_bytes(change)
        return
    content = json.loads(path.read_bytes()) if path.exists() else {}
    for key, value in change.items():
        *parents, last = key.split(".")
        inner = content
        for parent in parents:
            inner = inner[parent]
        if value is ABSENT:
            del inner[last]
        else:
            inner[last] = value
    if kind in WEIGHTS:  # under a digest that is right
        tensors = load_file(path.parent / WEIGHTS[kind])
        write_folder(path.parent, content, tensors, config=path.name, weights=WEIGHTS[kind])
    else:
        path.write_text(json.dumps(content))


TABLE = [pytest.param(*row, id=f"{number}-{row[0]}-{row[1]}") for number, row in enumerate(table())]


@pytest.mark.parametrize(("kind", "file", "what"), TABLE)
def test_a_wrong_file_is_named_in_one_line(
    kind: str, file: str, what: bytes | dict[str, Any], sound: Path, tmp_path: Path
):
    folder = tmp_path / kind
    shutil.copytree(sound / kind, folder)
    change(folder / file, what, kind)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the file is the match
        load(kind, folder)
    told = str(refused.value)
    assert file in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *((kind, "config.json") for kind in ("tiny", "policy")),
        *(("tiny", name) for name in ("tokenizer.json", "model.safetensors")),
        ("shards", INDEX),
        ("shards", "model-00001-of-00002.safetensors"),
        ("adapter", "adapter_config.json"),
        ("adapter", "adapter_model.safetensors"),
        ("policy", "model.safetensors"),
    ],
)
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(kind: str, file: str, what: str, sound: Path, tmp_path: Path):
    """A pipe has no writer here, so reading it would hang; nor does the device end."""
    folder = tmp_path / kind
    shutil.copytree(sound / kind, folder)
    path = folder / file
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=re.escape(file)):
        load(kind, folder)


def test_the_cause_of_a_wrong_file_is_kept(sound: Path, tmp_path: Path):
    folder = tmp_path / "ar"
    shutil.copytree(sound / "ar", folder)
    change(folder / "config.json", {"rope_scaling": 5}, "ar")
    with pytest.raises(ValueError, match=r"config\.json.*TypeError: 'int' object") as refused:
        load("ar", folder)
    assert isinstance(refused.value.__cause__, TypeError)
