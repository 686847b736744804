"""``lit-dlm recipes``: the experiments, as the head comments in ``configs/exp`` describe them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby, pairwise

import yaml

from lit_dlm.config.files import find, load, packaged, variants


def main(arguments: Sequence[str]) -> int:
    """Lists the experiments, or prints one with everything that it takes from other files."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm recipes", description="Lists experiments, or shows one as a whole."
    )
    parser.add_argument("name", nargs="?", help="such as tracelock_tiny, or any configuration file")
    name = parser.parse_args(arguments).name
    if name is None:
        for method, recipes in groupby(packaged("exp"), key=folder):
            print(f"{method}:")  # noqa: T201
            for recipe in recipes:
                for line in described(recipe):
                    print("  " + "  ".join(line))  # noqa: T201
        return 0
    known = f"exp/{name}"
    content = load(known if known in packaged("exp") else name)
    print(yaml.safe_dump(content, sort_keys=False, width=100), end="")  # noqa: T201
    return 0


def folder(name: str) -> str:
    """Returns the method of a packaged experiment, by the folder that it lies in."""
    return find(name).parent.name


def described(name: str) -> list[list[str]]:
    """Name, summary, needs and expected result of an experiment, and of it with its overlays."""
    rows = [[name.removeprefix("exp/").ljust(26), *_head(name)]]
    for words in variants(name):
        files = [word for flag, word in pairwise(words) if flag == "--config"]
        # An overlay tells of itself; of several, the last decides on graders and memory.
        rows.append([f"  {' '.join(words)}".ljust(26), *_head(files[-1])])
    return rows


def _head(name: str) -> list[str]:
    lines = find(name).read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    return [head[0], *(line for line in head[1:] if line.startswith(("Needs:", "Expected:")))]
