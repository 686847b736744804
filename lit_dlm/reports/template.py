"""Self-contained HTML pages from Jinja2 templates: no request, script and style by digest only."""

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


def render(name: str, *, scripts: Sequence[str], images: bool = False, **context: Any) -> str:
    """Fills ``assets/{name}/page.html`` with ``style.css`` and the scripts beside it.

    With ``images`` the page may show pictures that it holds itself.
    """
    folder = ASSETS / name
    script = "\n".join((folder / part).read_text(encoding="utf-8") for part in scripts)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    style = (folder / "style.css").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        *(["img-src data:"] if images else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return fill(
        f"{name}/page.html",
        policy=Markup("; ".join(policy)),
        style=Markup(style),
        script=Markup(script),
        **context,
    )


def fill(path: str, **context: Any) -> str:
    """Fills a template below ``assets``; in HTML texts are escaped, whatever a model wrote."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"data_uri": _data_uri, "cell": _cell}
    return environment.get_template(path).render(**context)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _cell(text: str) -> str:
    """A text inside a table cell of Markdown."""
    line = " ".join(text.split())[:160]
    return re.sub(r"[\\`*_\[\]<>|]", r"\\\g<0>", line)
