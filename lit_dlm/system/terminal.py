"""Safe display of texts from models, data sets and files: terminals obey some characters."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from typing import Any

from rich.console import Console
from rich.text import Text

# Control characters except line breaks and tabs; what changes the direction of text or breaks
# lines; halves of characters (surrogates); invisible characters.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Returns the text, with characters that would be obeyed written as ``\x1b`` or ``\u202e``."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainConsole(Console):
    """A console that shows strings as they are: no markup, no escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


class PlainRecord(logging.LogRecord):
    """A log record of printable text, whichever library wrote it and whose handler shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Made here, as each handler's own formatter would print the exception as it is.
        if self.exc_info:  # formatters take the text that is there
            self.exc_text = printable(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:  # noqa: N802 - the name in logging
        return printable(super().getMessage())


class StderrHandler(logging.StreamHandler[Any]):
    """Writes to what is ``sys.stderr`` by then: above a progress bar, which takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_plainly() -> None:
    """Shows log records and tracebacks of this process as printable text."""
    logging.setLogRecordFactory(PlainRecord)
    sys.excepthook = show_traceback
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[StderrHandler()])


def show_traceback(*raised: Any) -> None:
    """Prints a traceback as printable text; a ``sys.excepthook``."""
    sys.stderr.write(printable("".join(traceback.format_exception(*raised))))
