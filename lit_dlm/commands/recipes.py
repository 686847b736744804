"""``lit-dlm recipes``: the experiments, as the head comments in ``configs/exp`` describe them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import yaml

from lit_dlm.config.files import find, load, packaged


def main(arguments: Sequence[str]) -> int:
    """Lists the experiments, or prints one with everything that it takes from other files."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm recipes", description="Lists experiments, or shows one as a whole."
    )
    parser.add_argument("name", nargs="?", help="such as tracelock_tiny, or any configuration file")
    name = parser.parse_args(arguments).name
    if name is None:
        for recipe in packaged("exp"):
            print("  ".join(described(recipe)))  # noqa: T201
        return 0
    known = f"exp/{name}"
    content = load(known if known in packaged("exp") else name)
    print(yaml.safe_dump(content, sort_keys=False, width=100), end="")  # noqa: T201
    return 0


def described(name: str) -> list[str]:
    """Name, summary, needs and expected result of a packaged experiment, from its head comment."""
    lines = find(name).read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    fields = [line for line in head[1:] if line.startswith(("Needs:", "Expected:"))]
    return [name.removeprefix("exp/").ljust(28), head[0], *fields]
