"""Rows of your own files: prompts, prompts with answers, and chats.

A row holds ``messages`` (turns with ``role`` and ``content``), ``conversations`` (turns with
``from`` and ``value``, as in OpenHermes), or a prompt and an answer under one of the names below,
which may be lists of turns, as in TRL; ``input`` is put below an ``instruction``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lit_dlm.tasks.sources import Row

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
CHATS = {"messages": "role and content", "conversations": f"from ({', '.join(_ROLES)}) and value"}
_PROMPT_FIELDS = ("prompt", "instruction", "question")
# From whole responses to bare answers: training wants the text, grading what it is compared with.
_ANSWER_FIELDS = ("response", "output", "completion", "answer")

Turns = list[dict[str, str]]


def conversation(
    row: Row, *, needs_answer: bool = True, short: bool = False
) -> tuple[Turns, str | None]:
    """Returns the turns up to the last one of the user, and its answer, if need be a short one."""
    if (chat := _first(CHATS, row)) is not None:
        return _split(row, chat, row.fields[chat], needs_answer=needs_answer)
    prompt = _first(_PROMPT_FIELDS, row)
    answer = _first(reversed(_ANSWER_FIELDS) if short else _ANSWER_FIELDS, row)
    wanted = f"'messages', 'conversations', or one of {', '.join(_PROMPT_FIELDS)}"
    if needs_answer:
        wanted += f" and one of {', '.join(_ANSWER_FIELDS)}"
    is_complete = prompt is not None and (answer is not None or not needs_answer)
    row.expect(is_complete, wanted, sorted(row.fields))
    assert prompt is not None
    if isinstance(row.fields[prompt], list):
        turns = row.fields[prompt] + _answer_turns(row.fields.get(answer or ""))
        return _split(row, prompt, turns, needs_answer=needs_answer)
    text = row.text(prompt)
    row.expect(bool(text.strip()), f"a text that is not empty in field {prompt!r}", text)
    if prompt == "instruction" and row.fields.get("input"):
        text = f"{text}\n\n{row.text('input')}"
    turns = [{"role": "user", "content": text}]
    # Files of prompts often have the field of an answer in every row, and null where there is none.
    if answer is None or (row.fields[answer] is None and not needs_answer):
        return turns, None
    return turns, str(row.get(answer, (str, int, float), "a text or a number"))


def _first(names: Iterable[str], row: Row) -> str | None:
    return next((name for name in names if name in row.fields), None)


def _answer_turns(answer: Any) -> list[Any]:
    """Turns behind those of a prompt: TRL has a list of them, others a text or a number."""
    if isinstance(answer, list):
        return answer
    return [] if answer is None else [{"role": "assistant", "content": str(answer)}]


def _split(row: Row, chat: str, given: Any, *, needs_answer: bool) -> tuple[Turns, str | None]:
    turns = given
    if chat == "conversations" and isinstance(given, list):
        turns = [_renamed(turn) for turn in given]
    least = 2 if needs_answer else 1
    is_chat = isinstance(turns, list) and len(turns) >= least and all(map(_is_turn, turns))
    wanted = f"at least {least} with {CHATS.get(chat, CHATS['messages'])} in field {chat!r}"
    row.expect(is_chat, wanted, given)
    last = turns[-1]
    # An answer that the row has anyway does no harm where only the prompt is wanted.
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
