"""What MkDocs does before it reads a page: links out of the docs, and the list of recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lit_dlm.commands.recipes import described
from lit_dlm.config_files import packaged

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sections of the README link from the repository's root; what is no page is named instead."""
    if page.file.src_uri == "recipes.md":
        markdown = markdown.replace("@@RECIPES@@", recipes())
    if "--8<--" in markdown:
        markdown = re.sub(r'^--8<-- "README.md:(\w+)"$', _section, markdown, flags=re.MULTILINE)
    return re.sub(r"(!?)\[([^\]]*)\]\((\.\./[^)]+)\)", r"\2 (`\3`)", markdown).replace(
        "(`../", "(`"
    )


def _section(found: re.Match[str]) -> str:
    """A section of the README as a page of the docs would have it."""
    name = found[1]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = (f"<!-- --8<-- [{word}:{name}] -->" for word in ("start", "end"))
    text = text[text.index(start) + len(start) : text.index(end)]
    text = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)
    return re.sub(r"\[([^\]]+)\]\(((?!https?:|#)[\w/]*(?:configs|examples|CONTRIBUTING)[^)]*)\)",
                  r"\1 (`\2`)", text)  # fmt: skip


def recipes() -> str:
    """The experiments as a table."""
    lines = ["| experiment | what | needs | expected |", "|---|---|---|---|"]
    for path in packaged("exp"):
        name, what, *fields = described(path)
        told = {key: text for key, _, text in (field.partition(": ") for field in fields)}
        cells = (f"`{name.strip()}`", what, told.get("Needs", ""), told.get("Expected", ""))
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)
