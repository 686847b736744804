"""Compares mathematical answers with math-verify, one JSON line in, one out, until end of input.

A process of its own because a comparison can hang in ways that only killing ends; math-verify's
own time limits rely on ``SIGALRM``, which works in main threads only, so they are switched off.
Runs as a script under ``python -I``, and so may import installed packages but nothing of ours.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

_MEMORY_BYTES = 3 << 30


def main() -> None:
    """Answers ``{"gold": text, "answer": text}`` with ``{"equal": bool}``; both texts are LaTeX."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        gold = parse(f"\\boxed{{{request['gold']}}}", parsing_timeout=None)
        answer = parse(f"\\boxed{{{request['answer']}}}", parsing_timeout=None)
        equal = bool(gold) and bool(answer) and verify(gold, answer, timeout_seconds=None)
        sys.stdout.write(json.dumps({"equal": bool(equal)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
