"""``lit-dlm new``: starts a policy, task, reward or training method of your own."""

from __future__ import annotations

import argparse
import keyword
import logging
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

logger = logging.getLogger(__name__)

KINDS = ("policy", "task", "reward", "method")


def main(arguments: Sequence[str]) -> int:
    """Writes ``NAME.py``, ``NAME.yaml`` and ``test_NAME.py``; never overwrites a file."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm new",
        description="Writes a class to fill in, a configuration that names it, and a test that "
        "fails until it is filled in.",
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", help="of the module, such as sure_prefix")
    parser.add_argument("--folder", type=Path, default=Path(), help="the working folder by default")
    options = parser.parse_args(arguments)
    name, folder = options.name, options.folder
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        parser.error(f"name: expected a module name such as sure_prefix, got {name!r}")
    words = {"name": name, "Name": "".join(part.capitalize() for part in name.split("_"))}
    source = files("lit_dlm") / "assets" / "new"
    kind = options.kind
    made = {
        folder / f"{name}.py": f"{kind}.py",
        folder / f"{name}.yaml": f"{kind}.yaml",
        folder / f"test_{name}.py": f"test_{kind}.py",
    }
    # All three before any is written: half a scaffold would be in the way of a second try.
    if there := [str(path) for path in made if path.exists()]:
        raise ValueError(f"{', '.join(there)}: exists already; give another name or --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in made.items():
        text = (source / f"{template}.txt").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        logger.info("%s", path)
    logger.info(
        "Fill in %s.py until 'pytest %s' passes; then use it in that folder, with the command at "
        "the top of %s.yaml.",
        *(folder / name, folder / f"test_{name}.py", folder / name),
    )
    return 0
