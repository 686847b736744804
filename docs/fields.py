"""What the reference says of the fields of a dataclass: the comments above and behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Takes the comment of a field that has no docstring for one."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called with everything that is assigned or declared, once its package is read."""
        is_field = attr.parent is not None and "dataclass" in attr.parent.labels
        if is_field and attr.docstring is None and (comment := _comment(attr)):
            attr.docstring = griffe.Docstring(comment, parent=attr)


def _comment(field: griffe.Attribute) -> str:
    """The lines of comment directly above a field, then what stands behind it."""
    assert field.lineno
    assert field.endlineno
    assert isinstance(field.filepath, Path)
    lines = field.lines_collection[field.filepath]
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.lstrip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    _, mark, behind = lines[field.endlineno - 1].partition("  # ")
    return " ".join([*above, behind] if mark else above)
