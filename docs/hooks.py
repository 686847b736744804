"""What MkDocs does before it reads a page: links out of the docs and to the glossary, recipes."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lit_dlm.commands.recipes import described, folder
from lit_dlm.config.files import compose, packaged, variants

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
GLOSSARY = "concepts/glossary.md"
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#]+)[^)]*\)")
_PICTURE = re.compile(
    r'<picture><source media="[^"]+" srcset="(?P<dark>[^"]+)"><img\s+src="(?P<light>[^"]+)"'
    r'\s+alt="(?P<alt>[^"]+)"(?P<size> width="\d+")?></picture>'
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what is made from other files; names instead of links what is no page."""
    if page.file.src_uri == "reference/recipes.md":
        markdown = markdown.replace("@@RECIPES@@", recipes())
    if page.file.src_uri == "index.md":
        markdown = markdown.replace('--8<-- "README.md:intro"', intro())
    markdown = _PICTURE.sub(_themed, markdown)
    folder = DOCS / Path(page.file.src_uri).parent
    markdown = _LINK.sub(lambda link: _named_if_outside(link, folder), markdown)
    if page.file.src_uri == GLOSSARY:
        return markdown
    return _explained(markdown, "../" * page.file.src_uri.count("/") + GLOSSARY)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx's roles, of which mkdocstrings knows nothing."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>(?:~[\w.]+\.)?", "<code>", html)


def _named_if_outside(link: re.Match[str], folder: Path) -> str:
    """Names the path of a link out of the docs, since the site does not hold what is there."""
    target = (folder / link["target"]).resolve()
    if target.is_relative_to(DOCS):
        return link[0]
    path = str(target.relative_to(ROOT))
    return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"


def _themed(picture: re.Match[str]) -> str:
    """Both versions of a picture, of which the theme's style sheet hides one."""
    size = f"{{{picture['size']} }}" if picture["size"] else ""
    return "".join(
        f"![{picture['alt']}]({picture[kind]}#only-{kind}){size}" for kind in ("light", "dark")
    )


TERMS = (
    *("acceptance network", "adapter", "advantage", "backbone", "canvas", "commit policy"),
    *("embedded model", "end-of-text gate", "forward", "lockstep score", "masking"),
    *("outcome policy", "pass@k", "projector", "quota", "right shift", "RL step", "rollout"),
    *("rollout proxy", "shard", "stall rule", "threshold", "trace", "trajectory", "twin"),
    "value model",
)
"""What a reader may not know and has one meaning; a first column of the glossary names each."""
_TERM_OF = {form.lower(): term for term in TERMS for form in (term, f"{term}s", f"{term[:-1]}ies")}
_FORMS = "|".join(sorted(map(re.escape, _TERM_OF), key=len, reverse=True))
_TERM = re.compile(rf"(?<![\w-])(?:{_FORMS})(?![\w-])", re.IGNORECASE)
_PROSE = re.compile(
    r"^(?P<fence> *```).*?^(?P=fence)|^(?:\||#|:::|    )[^\n]*|<[^>]*>|`[^`]*`"
    rf"|!?\[(?P<text>[^\]]*)\]\([^)]*\)|(?P<term>{_TERM.pattern})",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
"""What is no prose (code, tables, headings), a link, or a term."""


def _explained(markdown: str, glossary: str) -> str:
    """Links a term where it first stands to the glossary; the link's title says what it is."""
    meanings, explained = _meanings(), set[str]()

    def linked(found: re.Match[str]) -> str:
        new = {_TERM_OF[one.lower()] for one in _TERM.findall(found["text"] or found["term"] or "")}
        new -= explained
        explained.update(new)
        if not (new and found["term"]):
            return found[0]
        section, meaning = meanings[new.pop()]
        return f'[{found[0]}]({glossary}#{section} "{meaning}")'

    return _PROSE.sub(linked, markdown)


@cache
def _meanings() -> dict[str, tuple[str, str]]:
    """Section of the glossary and meaning of what its first columns name."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for line in (DOCS / GLOSSARY).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").lower().replace(" ", "-")
        elif line.startswith("| "):
            names, meaning = line.removeprefix("| ").split(" | ")[:2]
            named, told = names.split(", "), re.sub(r'[`*"]', "", meaning).split("; ")
            for number, name in enumerate(named):
                own = told[number] if len(named) == len(told) else "; ".join(told)
                found.setdefault(name, (section, own))
    return found


def intro() -> str:
    """The start of the README as a page of the docs would have it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- --8<-- [")[1]
    text = text.partition("-->")[2].replace("```\n$", "```console\n$")
    return re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)


def recipes() -> str:
    """The experiments as a table for each method; below one, what follows it on a command line."""
    lines = []
    for method, names in groupby(packaged("exp"), key=folder):
        lines += [
            f"\n## {method}\n",
            "| experiment | model | what | needs | expected |",
            "|---|---|---|---|---|",
        ]
        for one in names:
            commands = (["--config", one, *words] for words in ([], *variants(one)))
            lines += map(_row, described(one), commands)
    return "\n".join(lines)


def _row(described: list[str], command: list[str]) -> str:
    name, what, *fields = described
    told = {key: text for key, _, text in (field.partition(": ") for field in fields)}
    needs = told.get("Needs", "")
    # recipes.js filters by this attribute, and by the model of the next cell.
    experiment = f'`{name.strip()}`{{ data-hardware="{_hardware(needs)}" }}'
    cells = (experiment, _model(command), what, needs, told.get("Expected", ""))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _hardware(needs: str) -> str:
    if found := re.search(r"one GPU with \d+ GB", needs):
        return found[0]
    return "several GPUs" if "GPUs" in needs else "CPU"


def _model(command: list[str]) -> str:
    """The name of the model that a command works on, without its owner or folder."""
    document = compose(command).document
    path = document["model"]["init_args"]["backbone"]["init_args"].get("path", "from scratch")
    *folders, name = path.replace("${run_dir}", document["run_dir"]).split("/")
    return folders[1] if folders[:1] == ["runs"] else name  # the run that made it
