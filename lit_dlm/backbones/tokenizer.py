"""Tokenizers of embedded models, local folders and hub ids, without remote code."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from lit_dlm.backbones.location import locate


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that lies beside a model.

    Custom tokenizer classes named in a checkpoint (Dream, LLaDA) are not needed: a
    ``tokenizer.json`` says everything, and ``vocab.json`` with ``merges.txt`` is the Qwen2 kind.

    Args:
        path_or_id: an embedded name, a local folder, or a hub id.

    Returns:
        A fast tokenizer.

    Raises:
        ValueError: nothing of that name exists, or the folder has no tokenizer files.
    """
    folder = locate(path_or_id, weights=False)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    raise ValueError(
        f"{path_or_id}: expected tokenizer.json, or vocab.json with merges.txt, in {folder}"
    )
