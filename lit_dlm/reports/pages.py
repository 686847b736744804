"""Pages from templates: styles, scripts and data in one file that requests nothing.

A page may hold texts of models, which nobody trusts: templates escape them, and the page's content
security policy allows its own script and style by digest and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

ASSETS = Path(__file__).resolve().parent / "assets"


def render(name: str, *, scripts: Sequence[str], **context: Any) -> str:
    """Fills ``assets/{name}/page.html`` with the styles and the scripts beside it."""
    # One function, so that the parts share names with each other and with nothing else on the page.
    script = _text(*(f"{name}/{part}" for part in scripts))
    return fill(
        f"{name}/page.html",
        style=Markup(_text("base.css", f"{name}/style.css")),
        script=Markup(f'(() => {{\n"use strict";\n{script}\n}})();'),
        **context,
    )


def fill(path: str, **context: Any) -> str:
    """Fills a template in ``assets``; HTML templates escape all texts, whatever a model wrote."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"digest": _digest, "data_uri": data_uri, "cell": _cell}
    # Jinja's filter ``tojson`` escapes < and > in scripts, where no other escaping is possible.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(path).render(**context)


def _text(*assets: str) -> str:
    return "\n".join((ASSETS / path).read_text(encoding="utf-8") for path in assets)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_uri(png: bytes) -> str:
    """Returns a picture as the source of an ``img``."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _cell(text: str) -> str:
    """Cuts a text to 160 characters and escapes it for a cell of a Markdown table."""
    line = " ".join(text.split())[:160]
    return re.sub(r"[\\`*_\[\]<>|]", r"\\\g<0>", line)
