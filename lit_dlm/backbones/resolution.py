"""From the name of a model (embedded, folder or hub id) to its :class:`Architecture` and tokenizer.

No code of a checkpoint is ever run. Options that transformers' decoders cannot express are refused
by name. Special tokens get the ids that the folder's tokenizer has for the family's tokens, since
one id may mean different tokens in related vocabularies (151666 is Dream's mask, but a tool tag in
SDAR's).
"""

from __future__ import annotations

import base64
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import DryRunFileInfo, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lit_dlm.backbones.architecture import (
    FAMILIES,
    PLAIN_DECODERS,
    Architecture,
    Family,
    KeyLayout,
    family_of,
    original_key,
)
from lit_dlm.backbones.base import UNKNOWN_ID, Backbone, BackboneSpec
from lit_dlm.backbones.experts import FIXED, WORDS, Experts, Piece, pieces
from lit_dlm.system.files import fitting, read_json_object
from lit_dlm.system.options import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""Folder of the embedded models."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
INDEX_FILE = "model.safetensors.index.json"
_MOST_GROWTH = 512
_GROWTH = {"NFKC": 11.0, "NFKD": 11.0, "NFC": 3.0, "NFD": 3.0, "ByteLevel": 2.0, "Metaspace": 4.0}
"""Most growth by a step of a tokenizer whose settings do not matter."""
_DESCRIPTION_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def embedded_names() -> list[str]:
    """Names of the models that ship with the package, sorted."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def locate(path_or_id: str, *, weights: bool = True) -> Path:
    """Finds the folder of an embedded name (``tiny``), a local folder or a hub id ``owner/name``.

    A hub id may end in ``@revision``; an existing folder wins over it. Only a hub id may use the
    network, for the weights only if they are wanted.
    """
    # Embedded names first, so that a folder in the working directory does not change what they
    # mean.
    if path_or_id in embedded_names():
        return ASSETS / path_or_id
    folder = Path(path_or_id).expanduser()
    if path_or_id.strip() and folder.is_dir():
        return folder
    if not is_hub_id(path_or_id):
        raise ValueError(
            f"path: {path_or_id!r} is neither an existing folder nor an embedded model "
            f"({', '.join(embedded_names()) or 'none is installed'}) nor a hub id 'owner/name'"
        )
    return Path(_snapshot(path_or_id, allow_patterns=_patterns(weights)))


def _snapshot(hub_id: str, **options: Any) -> Any:
    repo, _, revision = hub_id.partition("@")
    try:
        return snapshot_download(repo, revision=revision or None, **options)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(
            f"{hub_id!r} is no existing folder, and the hub did not deliver it: {reason}"
        ) from error


def is_hub_id(path_or_id: str) -> bool:
    """Whether a name is ``owner/name``, optionally with ``@revision``, and not a local path.

    If a folder ``runs`` exists, ``runs/model`` counts as a mistyped path.
    """
    # A mistyped local path must not be sent to the hub.
    has_form = _HUB_ID.fullmatch(path_or_id) is not None
    return has_form and not Path(path_or_id).expanduser().parent.is_dir()


def unpinned(path_or_id: str) -> str:
    """Returns the name without the ``@revision`` of a hub id."""
    return path_or_id.partition("@")[0] if is_hub_id(path_or_id) else path_or_id


def is_local(path_or_id: str) -> bool:
    """Whether :func:`locate` finds a model without the hub."""
    return path_or_id in embedded_names() or Path(path_or_id).expanduser().exists()


def hub_files(
    hub_id: str, *, weights: bool = True, repo_type: Literal["model", "dataset"] = "model"
) -> list[DryRunFileInfo]:
    """Returns name and size of each file that the hub would deliver, and whether it is cached."""
    patterns = _patterns(weights) if repo_type == "model" else None
    return list(_snapshot(hub_id, repo_type=repo_type, allow_patterns=patterns, dry_run=True))


def in_hub_cache(hub_id: str, *, weights: bool = True) -> bool:
    """Whether a hub model is in the cache, with its weights if wanted; uses no network."""
    try:
        folder = Path(_snapshot(hub_id, local_files_only=True))
        if weights and (folder / INDEX_FILE).is_file():
            weight_files(folder)
    except ValueError:
        return False
    # An adapter's file has another name.
    return not weights or any(path.is_file() for path in folder.glob("*.safetensors"))


def _patterns(weights: bool) -> list[str]:
    return [*_DESCRIPTION_FILES, *(["*.safetensors"] if weights else [])]


def weight_files(folder: Path) -> list[Path]:
    """Returns a model folder's safetensors files: those that an index names, else the only one."""
    path = folder / INDEX_FILE
    if path.is_file():
        with fitting(path):
            names = sorted(set(read_json_object(path)["weight_map"].values()))
            for name in names:
                if Path(name).name != name or not (folder / name).is_file():
                    raise ValueError(f"{path}: expected names of files beside it, got {name!r}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"{folder}: expected {single.name} or {INDEX_FILE} (pickled weights are not read)"
        )
    return [single]


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in a model's folder.

    Custom tokenizer classes named in a checkpoint (Dream, LLaDA) are not needed: a
    ``tokenizer.json`` is complete, and ``vocab.json`` with ``merges.txt`` is read as Qwen2's.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # takes seconds

    folder = locate(path_or_id, weights=False)
    whole, parts = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    if not whole.is_file() and not all(path.is_file() for path in parts):
        raise ValueError(
            f"{path_or_id}: expected tokenizer.json, or vocab.json with merges.txt, in {folder}"
        )
    kind: type[PreTrainedTokenizerBase] = Qwen2Tokenizer
    if whole.is_file():
        kind = PreTrainedTokenizerFast
        with fitting(whole):
            steps = read_json_object(whole)
            # A stranger's tokenizer may turn a word into gigabytes. Steps follow each other, so
            # their growth multiplies; text passes the first two on the way in and the last on the
            # way out.
            for names in (("normalizer", "pre_tokenizer"), ("decoder",)):
                if (growth := math.prod(_growth(steps.get(name)) for name in names)) > _MOST_GROWTH:
                    wanted = f"texts that become at most {_MOST_GROWTH} times as long"
                    raise ValueError(f"{whole}: expected {wanted}, got {growth:.3g} ({names[0]})")
    try:
        with fitting(folder / "tokenizer_config.json" if whole.is_file() else parts[1]):
            tokenizer = kind.from_pretrained(folder, local_files_only=True)
            tokenizer("")  # uses settings that nothing has looked at
    except ValueError:  # another file may be the wrong one
        tokenizer_size(folder)
        if whole.is_file():
            with fitting(whole):
                Tokenizer.from_file(str(whole))
        raise
    return tokenizer


def _growth(step: Any) -> float:
    """Returns how many times as many bytes a step of a tokenizer may make of a text."""
    match step:
        case {"type": "Sequence"}:
            lists = [steps for steps in step.values() if isinstance(steps, list)]
            return math.prod(map(_growth, chain(*lists)))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(len(new.encode()) / len(old.encode()), 1.0)
        case {"type": "Replace", "content": str(new)} | {"type": "Prepend", "prepend": str(new)}:
            return 1.0 + 2 * len(new.encode())  # a pattern may match before and after a character
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            data = base64.b64decode(table)
            texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return max(map(len, texts)) / 3  # of one character, mostly of three bytes
        case {"type": str(kind)}:
            return _GROWTH.get(kind, 1.0)
    return 1.0


def tokenizer_of(
    backbone: Backbone, path_or_id: str, *, option: str = "tokenizer"
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer; raises ``ValueError`` if its ids do not fit the model."""
    tokenizer, spec = load_tokenizer(path_or_id), backbone.spec
    used = set(tokenizer.get_vocab().values())
    # An id beyond the embedding would fail in the middle of a forward, on a GPU without a message.
    highest = max(used)
    fault = ""
    if highest >= backbone.vocab_size:
        fault = f"ids below {backbone.vocab_size}, got {highest}"
    for kind, ids in {"mask": (spec.mask_id,), "eos": spec.eos_ids}.items():
        own = getattr(tokenizer, f"{kind}_token_id")
        # LLaDA's tokenizer does not say which of its added tokens is the mask, and the tokenizer of
        # an autoregressive model has none.
        words = used.difference(tokenizer.added_tokens_decoder)
        strange = words.issuperset(ids) if own is None else own not in ids
        if strange and not fault and UNKNOWN_ID not in ids:
            fault = f"{kind}_token {' or '.join(map(str, ids))}, got {own}"
    if fault:
        raise ValueError(f"{option}: {path_or_id} does not fit the model: expected {fault}")
    return tokenizer


logger = logging.getLogger(__name__)

EXPORT_KEY = "lit_dlm"
"""Key of our own exports in ``config.json``; its value is the :class:`BackboneSpec`."""
RELEASE_KEY = "lit_dlm_original"
"""Key of the family's own configuration in exports of a released model."""
MASK_TOKEN = "<|mask|>"
"""Text of the mask token that is added to an autoregressive model."""

# Values that options must have where they are present: with others, the decoders would compute
# something else.
_HF_OPTIONS = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "quantization_config": None,
}
_NO_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 0)
_HF_SIZES = {
    **{name: name for name in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Options that every configuration under transformers' names must have, by our names."""
_LLADA_OPTIONS = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "block_group_size": 1,
    **dict.fromkeys(("num_experts", "n_experts"), 0),
    **dict.fromkeys(("alibi", "attention_layer_norm", "input_emb_norm"), False),
    **dict.fromkeys(("include_bias", "bias_for_layer_norm"), False),
    **dict.fromkeys(("clip_qkv", "rope_scaling", "quantization_config")),
}


@dataclass(frozen=True, kw_only=True)
class FromAR:
    """How an autoregressive Qwen2, Llama or Qwen3 checkpoint becomes a diffusion model.

    As Dream was made from Qwen2.5 and SDAR from Qwen3: the decoder keeps its weights, attention
    becomes bidirectional, and a mask token ``<|mask|>`` is added after the tokenizer's last token,
    unless there is one already (arXiv:2410.17891 describes the adaptation). The tokenizer's end of
    text joins those of the configuration, and its padding is taken where that names none.
    """

    shift: Literal[0, 1]
    """1 keeps next-token prediction: row ``i - 1`` predicts token ``i`` (Dream); 0 trains row ``i``
    to predict token ``i`` (SDAR). There is no default: the two need different training."""
    attention: Literal["full", "block"] = "full"
    block_size: int | None = None
    """Block length, with block attention."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A translated checkpoint description."""

    architecture: Architecture
    layout: KeyLayout
    """Naming scheme of the weight files."""
    config: Mapping[str, Any]
    """The description itself, untranslated."""
    file_vocab_size: int
    """Rows of the embedding in the weight files; fewer than the architecture's where a mask token
    is added to an autoregressive checkpoint."""
    adds_mask: bool = False
    """Whether the mask token has no row of its own in the files."""
    mask_token: str | None = None
    """Text of the mask token of a model that starts from an autoregressive checkpoint."""

    @property
    def spec(self) -> BackboneSpec:
        return self.architecture.spec()

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
        """Returns the pieces of our tensors that are under each key of the files."""
        return pieces(shapes, lambda key: original_key(key, self.layout))


def resolve(
    path_or_config: str | Path | Mapping[str, Any],
    *,
    spec_overrides: Mapping[str, Any] | None = None,
    from_ar: FromAR | None = None,
    source: str = "",
    added_tokens: Mapping[str, int] | None = None,
) -> Resolved:
    """Translates a checkpoint's description; weights are not touched.

    Args:
        path_or_config: an embedded name, a folder, a hub id, or the contents of a ``config.json``.
        spec_overrides: fields of :class:`BackboneSpec` that win over the files.
        from_ar: how to start from an autoregressive checkpoint; any other one is refused.
        source: of a given mapping, its folder or hub id, for error messages and the family's name.
        added_tokens: for a given mapping, the added tokens of its tokenizer with their ids.
    """
    overrides = dict(spec_overrides or {})
    for name in overrides:
        one_of(*(field.name for field in fields(BackboneSpec)), spec_overrides=name)
    folder = None
    if isinstance(path_or_config, Mapping):
        config: Mapping[str, Any] = path_or_config
    else:
        folder = locate(str(path_or_config), weights=False)
        config, source = read_config(folder), f"{path_or_config}: "
        added_tokens = read_added_tokens(folder)
    with fitting((folder or Path()) / "config.json"):
        tokens = added_tokens or {}
        size = None if folder is None else tokenizer_size(folder)
        if from_ar is not None:
            _expect_autoregressive(config, source)
        model_type, family = config.get("model_type"), None
        if model_type in PLAIN_DECODERS:
            values = {"family": model_type, "decoder": model_type}
            values |= _hf_sizes(config, source, decoder=model_type)
        else:
            values = {"family": family_of(config, source=source, wanted=overrides.get("family"))}
            family = FAMILIES[values["family"]]
            values |= _of_family(config, family, size, source)
        rows, mask_token = values["vocab_size"], None
        if EXPORT_KEY in config:
            values |= config[EXPORT_KEY]
        else:
            described = dict(config)
            if family is None:
                described["eos_token_id"] = _stop_ids(config, folder)
            if from_ar is not None:
                named = {} if folder is None else _named_tokens(folder)
                mask_token = named.get("mask_token", MASK_TOKEN)
                # A new mask comes after the tokenizer's last token; the embedding often has unused
                # rows there, and grows where it has none.
                mask = tokens.get(mask_token, rows if size is None else size)
                described |= _ids_for_ar(described, tokens, named) | {"mask_token_id": mask}
                values |= asdict(from_ar) | {"vocab_size": max(rows, mask + 1)}
            values |= _special_ids(described, tokens, overrides, family=family, source=source)
        return Resolved(
            architecture=Architecture(**{**values, **overrides}),
            layout="hf" if family is None else family.layout,
            config=config,
            file_vocab_size=rows,
            adds_mask=mask_token is not None and tokens.get(mask_token, rows) >= rows,
            mask_token=mask_token,
        )


def _expect_autoregressive(config: Mapping[str, Any], source: str) -> None:
    model_type = config.get("model_type")
    if model_type not in PLAIN_DECODERS or EXPORT_KEY in config:
        raise ValueError(
            f"{source}from_ar: expected an autoregressive {', '.join(PLAIN_DECODERS)} "
            f"checkpoint, got a diffusion model of model_type {model_type!r} in config.json"
        )


def _ids_for_ar(
    config: Mapping[str, Any], tokens: Mapping[str, int], named: Mapping[str, str]
) -> dict[str, Any]:
    """Returns end of text and padding of an autoregressive model, its tokenizer's included."""
    ends = (*config["eos_token_id"], *_listed(tokens.get(named.get("eos_token", ""))))
    pad = config.get("pad_token_id")
    if pad is None:
        pad = tokens.get(named.get("pad_token", ""))
    return {"eos_token_id": tuple(dict.fromkeys(ends)), "pad_token_id": pad}


def _of_family(
    config: Mapping[str, Any], family: Family, tokenizer_size: int | None, source: str
) -> dict[str, Any]:
    """Returns what is known of a release of a family, except its special tokens."""
    _refuse(config, family.options, source)
    sizes = _llada_sizes if family.layout == "llada" else _hf_sizes
    values = {
        "decoder": family.decoder,
        "shift": family.shift,
        "attention": family.attention,
        "edits_tokens": family.edits_tokens,
        **sizes(family.translated(config), source, decoder=family.decoder),
    }
    if family.text_vocab_size is not None:
        words = tokenizer_size or family.text_vocab_size
        values["text_vocab_size"] = words if values["vocab_size"] > words else None
    if family.attention == "block":
        values["block_size"] = config.get(*family.block)
    return values


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with config.json")
    return read_json_object(path)


def _refuse(config: Mapping[str, Any], options: Mapping[str, Any], source: str) -> None:
    for option, expected in options.items():
        if config.get(option) not in (None, expected):
            raise ValueError(
                f"{source}config.json: option {option}={config[option]!r} is not supported, "
                f"expected {expected!r}"
            )


def _need(config: Mapping[str, Any], *options: str, source: str) -> list[Any]:
    for option in options:
        if config.get(option) is None:
            raise ValueError(f"{source}config.json: option {option} is absent")
    return [config[option] for option in options]


def _hf_sizes(config: Mapping[str, Any], source: str, *, decoder: str) -> dict[str, Any]:
    """Reads sizes under transformers' names (Dream, SDAR, LLaDA-V, plain decoders, our exports)."""
    options: dict[str, Any] = _HF_OPTIONS | FIXED.get(decoder, _NO_EXPERTS)
    if decoder == "qwen2":  # Qwen2 has biases of its own
        options["attention_bias"] = False
    if decoder != "llama":
        options["mlp_bias"] = False
    _refuse(config, options, source)
    # Layers with a window of their own would compute something else under a full mask.
    kinds = sorted({"full_attention", *(config.get("layer_types") or ())})
    _refuse({"layer_types": kinds}, {"layer_types": ["full_attention"]}, source)
    needed = _need(config, *_HF_SIZES.values(), source=source)
    theta, scaling = _rotary(config, source, decoder=decoder)
    return {
        **dict(zip(_HF_SIZES, needed, strict=True)),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": config.get("max_position_embeddings", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "initializer_range": config.get("initializer_range", 0.02),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "experts": _experts(config, source, decoder=decoder),
    }


def _rotary(
    config: Mapping[str, Any], source: str, *, decoder: str
) -> tuple[float, dict[str, Any] | None]:
    """Returns the base of the rotary frequencies, and their further settings if any."""
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        # The default of transformers' classes, for older files that say nothing.
        is_plain = config.get("model_type") in PLAIN_DECODERS
        theta = 10000.0 if is_plain else _need(config, "rope_theta", source=source)[0]
    if "type" in scaling:  # the older spelling
        scaling.setdefault("rope_type", scaling.pop("type"))
    part = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if scaling.get("rope_type", "default") == "default":
        scaling = {}
    if decoder == "glm4_moe":
        scaling["partial_rotary_factor"] = part or 0.5  # the family's and transformers' default
    return float(theta), scaling or None


def _experts(config: Mapping[str, Any], source: str, *, decoder: str) -> Experts | None:
    """Returns a decoder's experts, if it has any; all of transformers' options are required."""
    words = WORDS.get(decoder)
    if words is None:
        return None
    needed = _need(config, *words.values(), source=source)
    return Experts(**dict(zip(words, needed, strict=True)))


def _llada_sizes(config: Mapping[str, Any], source: str, *, decoder: str) -> dict[str, Any]:
    """Reads sizes under LLaDA's names (arXiv:2502.09992, released configuration class)."""
    _refuse(config, _LLADA_OPTIONS, source)
    width, heads, layers, tied = _need(
        config, "d_model", "n_heads", "n_layers", "weight_tying", source=source
    )
    # The embedding matrix may be padded beyond the vocabulary; logits have its height.
    rows = config.get("embedding_size") or _need(config, "vocab_size", source=source)[0]
    # The ratio counts only where no width is given.
    inner = config.get("mlp_hidden_size")
    if inner is None:
        inner = int(_need(config, "mlp_ratio", source=source)[0] * width)
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    return {
        "decoder": "qwen2" if config.get("include_qkv_bias") else decoder,
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rope_theta": float(config.get("rope_theta", 10000.0)),
        "max_positions": config.get("max_sequence_length", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "initializer_range": config.get("init_std") or 0.02,
        "tie_embeddings": bool(tied),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "logit_scale": width**-0.5 if config.get("scale_logits") else 1.0,
    }


# -- special tokens ------------------------------------------------------------------------------


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Returns the added tokens of a folder's tokenizer files, if there are any, with their ids.

    Reads ``tokenizer_config.json``, ``added_tokens.json`` and ``tokenizer.json``; the later file
    wins. No tokenizer is built.
    """
    ids: dict[str, int] = {}
    with fitting(path := folder / "tokenizer_config.json"):
        described = _read_if_there(path).get("added_tokens_decoder", {})
        ids |= {entry["content"]: int(number) for number, entry in described.items()}
    with fitting(path := folder / "added_tokens.json"):
        ids |= {text: index(number) for text, number in _read_if_there(path).items()}
    with fitting(path := folder / "tokenizer.json"):
        listed = _read_if_there(path).get("added_tokens", [])
        ids |= {entry["content"]: index(entry["id"]) for entry in listed}
    return ids


def tokenizer_size(folder: Path) -> int | None:
    """Returns a folder's largest token id plus one; ``None`` without a vocabulary file."""
    added = read_added_tokens(folder).values()
    with fitting(path := folder / "tokenizer.json"):
        vocabulary = _read_if_there(path).get("model", {}).get("vocab")
    if vocabulary is None:
        vocabulary = _read_if_there(path := folder / "vocab.json") or None
    if vocabulary is None:
        return None
    with fitting(path):
        # Unigram models list pairs in the order of their ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return index(max([*ids, *added])) + 1


def _named_tokens(folder: Path) -> dict[str, str]:
    """Returns ``eos_token``, ``pad_token`` and ``mask_token`` as far as a folder names them."""
    named = _read_if_there(folder / "tokenizer_config.json")
    wanted = {name: named.get(name) for name in ("eos_token", "pad_token", "mask_token")}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in wanted.items()}
    return {name: str(text) for name, text in texts.items() if text}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _listed(value: Any) -> tuple[int, ...]:
    """Returns the ids of an option, which may be absent, one id or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _stop_ids(config: Mapping[str, Any], folder: Path | None) -> tuple[int, ...]:
    """Returns the end-of-text ids; ``generation_config.json`` alone may say where samplers stop."""
    # Both files count: releases add the end of turn in one of them only.
    named = _listed(config.get("eos_token_id"))
    if folder is not None:
        with fitting(path := folder / "generation_config.json"):
            named += tuple(map(index, _listed(_read_if_there(path).get("eos_token_id"))))
    return tuple(dict.fromkeys(named))


def _special_ids(
    config: Mapping[str, Any],
    tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    *,
    family: Family | None,
    source: str,
) -> dict[str, Any]:
    """Returns ``mask_id``, ``pad_id``, ``eos_ids`` and ``bos_id``.

    They come from the family's tokens in the tokenizer, else from the configuration. A mask or end
    of text that neither names is ``UNKNOWN_ID``, with a warning.
    """
    eos, bos = _listed(config.get("eos_token_id")), config.get("bos_token_id")
    if family is not None:
        eos = tuple(tokens[text] for text in family.eos_tokens if text in tokens) or eos
        # SDAR's configurations name an end of text as the start of text.
        bos = None if family.bos_token is None else tokens.get(family.bos_token, bos)
    # Only the mask and an end of text are needed to decode; a missing one is told here and refused
    # where it is used.
    pad = config.get("pad_token_id")
    ids = {
        "mask_id": _mask_id(config.get("mask_token_id"), tokens, overrides, family, source),
        "eos_ids": eos or (UNKNOWN_ID,),
        # Padding is hidden from attention, so any id will do.
        "pad_id": (eos[0] if eos else 0) if pad is None else pad,
        "bos_id": bos,
    }
    for field in ("mask_id", "eos_ids"):
        if ids[field] in (UNKNOWN_ID, (UNKNOWN_ID,)) and field not in overrides:
            logger.warning(
                "%sthe files name no %s; decoding needs it as spec_overrides.%s",
                *(source, field, field),
            )
    return ids


def _mask_id(
    named: int | None,
    tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    family: Family | None,
    source: str,
) -> int:
    """Returns the id of the mask token, on which tokenizer and configuration must agree."""
    if "mask_id" in overrides:
        return UNKNOWN_ID if named is None else named
    if family is None:
        if named is None:
            raise ValueError(
                f"{source}config.json names no mask_token_id: this is an autoregressive "
                "checkpoint; start from it with from_ar, or give the id of its mask token as "
                "spec_overrides.mask_id"
            )
        return named
    written = [tokens[text] for text in family.mask_tokens if text in tokens]
    # The end of turn shows whether the tokenizer is a released one; small models may have any.
    is_kin = written or family.eos_tokens[1] in tokens
    if is_kin and named not in (None, *written):
        raise ValueError(
            f"{source}mask_token_id is {named} in config.json, but {family.mask_tokens[0]!r} is "
            f"{written or 'absent'} in the tokenizer; set spec_overrides.mask_id to the right one"
        )
    return next(iter(written), UNKNOWN_ID) if named is None else named
