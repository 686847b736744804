"""Chat templates: programs in Jinja, often a stranger's, that are run within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lit_dlm.grading.bounded import shared_processes

SECONDS = 10.0
"""Most time for the text of one chat."""


def apply_chat_template(tokenizer: Any, turns: Sequence[Mapping[str, str]], **options: Any) -> Any:
    """Does what the method of transformers' tokenizers does, but limits time and memory.

    A template that is not our own is rendered in another process. A tokenizer of another class
    than transformers' applies its own.
    """
    has_template = hasattr(tokenizer, "get_chat_template")
    origin = getattr(tokenizer, "name_or_path", "") or "tokenizer"
    if has_template and tokenizer.chat_template is None:
        hint = "put a chat_template.jinja into its folder, or give model.chat_template"
        raise ValueError(f"{origin}: expected a tokenizer with a chat template, got none; {hint}")
    if not has_template or (template := tokenizer.get_chat_template()) in _own_templates():
        return tokenizer.apply_chat_template(turns, **options)
    names = ("add_generation_prompt", "continue_final_message")
    values = {**tokenizer.special_tokens_map, **{name: options.pop(name, False) for name in names}}
    answer = shared_processes("template").ask(
        {"template": template, "turns": turns, "values": values}, seconds=SECONDS
    )
    if answer is None:
        answer = {"problem": f"it did not end within {SECONDS:.0f} s and 1 GiB of memory"}
    if "problem" in answer:
        raise ValueError(f"{origin}: the chat template cannot be used: {answer['problem']}")
    text = [{"role": "user", "content": answer["text"]}]
    return tokenizer.apply_chat_template(
        text, chat_template="{{ messages[0]['content'] }}", **options
    )


@cache
def _own_templates() -> frozenset[str]:
    paths = Path(__file__).parents[1].glob("assets/*/chat_template.jinja")
    return frozenset(path.read_text(encoding="utf-8") for path in paths)
