"""Writing trained models as folders that decoding loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.location import locate

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files of a tokenizer folder that an export carries along."""


def copy_tokenizer(tokenizer: str, folder: Path) -> None:
    """Puts a tokenizer's files beside exported weights.

    Copied, not saved again: transformers would add how it was loaded.

    Args:
        tokenizer: folder, embedded name or hub id.
        folder: target, which exists.
    """
    source = locate(tokenizer, weights=False)
    for path in sorted(source.iterdir()):
        if path.name in TOKENIZER_FILES and source.resolve() != folder.resolve():
            shutil.copyfile(path, folder / path.name)


def export_trained(backbone: HFBackbone, tokenizer: str, folder: Path, *, write: bool) -> None:
    """Writes what was trained: the adapter where there is one, else the whole model.

    Args:
        backbone: the model. With sharded weights every process must call this.
        tokenizer: folder, embedded name or hub id of the tokenizer, which goes with whole models.
        folder: created when absent.
        write: whether this process copies the tokenizer.
    """
    if backbone.adapter is not None:
        backbone.save_adapter(folder)
        return
    backbone.export(folder)
    if write:
        copy_tokenizer(tokenizer, folder)
