"""Templates of prompts: Jinja texts, shipped by name, from a file, or written out.

Those of releases ship in ``lit_dlm/assets/templates.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


@cache
def shipped_templates(kind: Literal["prompt", "chat"]) -> dict[str, str]:
    """The templates of releases by name: of user turns, or of what stands around the turns."""
    path = files("lit_dlm") / "assets" / "templates.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))[kind])


def template_text(given: str, *, kind: Literal["prompt", "chat"], option: str = "template") -> str:
    """The text of a shipped name, a file, or the text itself (which holds ``{{`` or ``{%``)."""
    shipped = shipped_templates(kind)
    if given in shipped:
        return shipped[given]
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise ValueError(
        f"{option}: expected a file, a text with fields such as {{{{ question }}}}, or one of "
        f"{', '.join(shipped)}, got {given!r}"
    )


class PromptTemplate:
    """Makes the user turn of a problem, and the start of its answer where the template has one.

    Args:
        given: the task's option, see :func:`template_text`.
        default: the task's own template.
    """

    def __init__(self, given: str | None, *, default: str = "{{ question }}") -> None:
        self.given = None if given is None else template_text(given, kind="prompt")
        """The text given in place of the default, if any: recorded with results."""
        # As for chat templates in transformers: a template reads its fields and does nothing else.
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True
        )
        try:
            self._template = environment.from_string(self.given or default)
        except TemplateError as error:
            raise ValueError(f"template: {error} in {given!r}") from None

    def render(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """``text`` and ``answer_start`` of a :class:`~lit_dlm.tasks.base.PromptExample`."""
        try:
            filled = self._template.make_module(dict(fields))
        except TemplateError as error:
            raise ValueError(f"template: {error} (there are: {', '.join(fields)})") from None
        return {"text": str(filled), "answer_start": str(getattr(filled, "answer_start", ""))}
