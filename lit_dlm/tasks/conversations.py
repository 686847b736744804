"""Rows of your own files: prompts, prompts with answers, and chats.

A row holds ``messages`` (turns with ``role`` and ``content``), ``conversations`` (turns with
``from`` and ``value``, as in OpenHermes), or a prompt and an answer under one of the names below,
which may be lists of turns, as in TRL; ``input`` is put below an ``instruction``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_dlm.tasks.sources import Row

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
CHATS = {"messages": "role and content", "conversations": f"from ({', '.join(_ROLES)}) and value"}
_PROMPT_FIELDS = ("prompt", "instruction", "question")
_ANSWER_FIELDS = ("response", "output", "completion", "answer")

Turns = list[dict[str, str]]


def conversation(
    row: Row, *, needs_answer: bool = True, short: bool = False
) -> tuple[Turns, str | None]:
    """Returns the turns up to the last one of the user, and its answer, if need be a short one."""
    fields = row.fields
    chat = next((name for name in CHATS if name in fields), None)
    if chat is not None:
        return _split(row, chat, needs_answer=needs_answer)
    prompt = next((name for name in _PROMPT_FIELDS if name in fields), "")
    names = reversed(_ANSWER_FIELDS) if short else _ANSWER_FIELDS
    answer = next((name for name in names if name in fields), None)
    wanted = f"'messages', 'conversations', or one of {', '.join(_PROMPT_FIELDS)}"
    if needs_answer:
        wanted += f" and one of {', '.join(_ANSWER_FIELDS)}"
    row.expect(bool(prompt and (answer or not needs_answer)), wanted, sorted(fields))
    if isinstance(fields[prompt], list):
        said = fields.get(answer or "")
        if not isinstance(said, list):
            said = [] if said is None else [{"role": "assistant", "content": str(said)}]
        turns = [*fields[prompt], *said]
        return _split(replace(row, fields={prompt: turns}), prompt, needs_answer=needs_answer)
    text = row.text(prompt)
    row.expect(bool(text.strip()), f"a text that is not empty in field {prompt!r}", text)
    if prompt == "instruction" and fields.get("input"):
        text = f"{text}\n\n{row.text('input')}"
    turns = [{"role": "user", "content": text}]
    if answer is None or (fields[answer] is None and not needs_answer):
        return turns, None
    return turns, str(row.get(answer, (str, int, float), "a text or a number"))


def _split(row: Row, chat: str, *, needs_answer: bool) -> tuple[Turns, str | None]:
    turns: Any = row.fields[chat]
    if chat == "conversations" and isinstance(turns, list):
        turns = [_renamed(turn) for turn in turns]
    least = 2 if needs_answer else 1
    is_chat = isinstance(turns, list) and len(turns) >= least and all(map(_is_turn, turns))
    wanted = f"at least {least} with {CHATS.get(chat, CHATS['messages'])} in field {chat!r}"
    row.expect(is_chat, wanted, row.fields[chat])
    last = turns[-1]
    if last["role"] == "assistant" and len(turns) > 1:
        return turns[:-1], last["content"]
    whose = "assistant" if needs_answer else "user"
    row.expect(last["role"] == whose, f"the {whose}'s as the last of {chat!r}", last["role"])
    return turns, None


def _renamed(turn: Any) -> Any:
    if not isinstance(turn, Mapping) or turn.get("from") not in _ROLES:
        return None
    return {"role": _ROLES[turn["from"]], "content": turn.get("value")}


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and all(
        isinstance(turn.get(key), str) for key in ("role", "content")
    )
