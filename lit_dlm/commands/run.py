"""``lit-dlm fit``, ``validate`` and ``predict``: names are looked up before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_dlm.config.files import Composed, compose, resolved


def main(arguments: Sequence[str]) -> int:
    """Runs the command that comes first; returns 1 if a class or a file refused its input."""
    # Files and names are checked before torch is imported: a misspelt one is told at once.
    composed = _composed(arguments)
    from lit_dlm.commands import trainer

    return trainer.main(arguments, composed)


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration that a command would run with, and builds nothing."""
    composed = _composed(arguments)
    from lit_dlm.commands import trainer

    return trainer.parsed(arguments, composed)


def _composed(arguments: Sequence[str]) -> Composed:
    composed = compose(arguments[1:], "base")
    # A class may also be given by flag, which the parser sees later.
    flags = [flag.partition("=")[0] for flag in composed.left]
    given = {*composed.document, *(flag.removeprefix("--").split(".")[0] for flag in flags)}
    absent = " and ".join(part for part in ("model", "data") if part not in given)
    if absent and not any(flag.endswith("help") for flag in flags):
        give = "give --config FILE ('lit-dlm recipes' lists the shipped ones)"
        raise ValueError(f"{absent}: expected a class, got none; {give}")
    return composed._replace(values=resolved(composed.document))
