"""Names of weights: a family's own against transformers', in both directions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lit_dlm.backbones.families import Layout

HEAD_KEY = "lm_head.weight"
EMBEDDING_KEY = "model.embed_tokens.weight"

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_TOP_NAMES = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
}
_LLADA_BLOCK = re.compile(r"transformer\.blocks\.(\d+)\.(\w+)\.(.+)")
_LLADA_TOP = re.compile(r"transformer\.(\w+)\.(.+)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.((?:\w+\.)?\w+)\.([^.]+)")
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")

LLADA_MODULES = {name: target.rpartition(".")[2] for name, target in _BLOCK_NAMES.items()}
"""LLaDA's names of the modules in a block to transformers': ``ff_out`` to ``down_proj``, ..."""


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """Translates keys of weight files; a leading ``model.`` may be absent in them."""

    layout: Layout
    """Whose names the files use."""
    ignored: tuple[str, ...] = ()
    """Prefixes of keys that are left in the files."""

    def ours(self, key: str) -> str | None:
        """Our name of a key in a file.

        Args:
            key: as in the file.

        Returns:
            The key under transformers' names; ``None`` for what carries no weight of the decoder.
            An unknown key comes back as it is.
        """
        full = key if key.startswith("model.") else f"model.{key}"
        if key.endswith("rotary_emb.inv_freq") or full.startswith(self.ignored or ("\0",)):
            return None
        if self.layout == "hf":
            return full if key.startswith(_DECODER_PARTS) else key
        bare = key.removeprefix("model.")
        if (block := _LLADA_BLOCK.fullmatch(bare)) and block[2] in _BLOCK_NAMES:
            return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
        # ``ff_out`` names two matrices: the head here, the down projection in a block.
        if (top := _LLADA_TOP.fullmatch(bare)) and top[1] in _TOP_NAMES:
            return f"{_TOP_NAMES[top[1]]}.{top[2]}"
        return key

    def original(self, key: str) -> str:
        """The family's own name of one of our keys; the inverse of :meth:`ours`.

        Args:
            key: ``{module}.{parameter}`` under transformers' names.

        Returns:
            The key as a release of the family has it.
        """
        if self.layout == "hf":
            return key
        module, _, parameter = key.rpartition(".")
        for own, target in _TOP_NAMES.items():
            if module == target:
                return f"model.transformer.{own}.{parameter}"
        match = _HF_BLOCK.fullmatch(key)
        names = {target: own for own, target in _BLOCK_NAMES.items()}
        assert match is not None, key
        return f"model.transformer.blocks.{match[1]}.{names[match[2]]}.{match[3]}"
