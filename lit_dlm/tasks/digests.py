"""Digests of the public test problems that training must never meet.

One text file a task, in ``lit_dlm/assets/test_digests``: sorted hexadecimal digests of the
canonical problem, one a line. They let the exclusion work where the files themselves are absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files

DIGEST_BYTES = 6
"""Among 4,000 problems, a random other one is excluded with a chance of about 1e-11."""


def short_digest(canonical: str) -> str:
    """Digests a problem.

    Args:
        canonical: the problem in its one canonical form.

    Returns:
        12 hexadecimal digits.
    """
    return hashlib.blake2b(canonical.encode(), digest_size=DIGEST_BYTES).hexdigest()


@lru_cache(maxsize=8)
def shipped_digests(task: str) -> frozenset[str]:
    """Reads the shipped digests of a task.

    Args:
        task: name of the task.

    Returns:
        The digests of all public test problems.
    """
    path = files("lit_dlm") / "assets" / "test_digests" / f"{task}.txt"
    return frozenset(path.read_text(encoding="ascii").split())


def digest_lines(problems: Iterable[str]) -> str:
    """Writes the content of a digest file.

    Args:
        problems: canonical problems, repeats allowed.

    Returns:
        Sorted distinct digests, one a line.
    """
    return "".join(f"{digest}\n" for digest in sorted({short_digest(p) for p in problems}))
