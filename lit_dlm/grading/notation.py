"""One notation for numbers and formulas, which may be written in many ways."""

from __future__ import annotations

import re

_SPACE = re.compile(r"(?:(?<!\\)\\[ ,;:]|~|\s)+")
_BARE_FRACTION = re.compile(r"\\[dt]?frac *(\d) *(\d)")
_GROUPS = re.compile(r"(?<![\w.,])\d{1,3}(?: +\d{3})+(?![\d/])")
_SLASHED = re.compile(r"(?<![\w.,^/}])(\d{1,9}) +(\d{1,9}) ?/ ?(\d{1,9})(?!\d|/|\.\d)")
_MIXED = re.compile(r"(?<![\w.,^/}])(\d{1,9}) *\\[dt]?frac *\{ *(\d{1,9}) *\} *\{ *(\d{1,9}) *\}")
_REPEATING = re.compile(r"(?<![\w.])(\d{0,9})\.(\d{0,9})\\(?:overline|bar) *\{? *(\d{1,9}) *\}?")
_DOLLARS = re.compile(r"\\(?:text|mbox|mathrm) *\{ *\\?\$ *\}")
_IMAGINARY = re.compile(r"\\sqrt *\{ *- *1 *\}")
_WORDS = re.compile(r"\\(?:text\w*|mbox|mathrm) *\{([^{}]*)\}")


def tidy(text: str) -> str:
    r"""Writes numbers in one way: ``1\ 000`` as 1000, ``2 1/3`` and ``2\frac13`` as fractions.

    Groups of three digits are one number. Other white space between digits stays.
    """
    # The order matters: groups of digits come before mixed numbers, or "1 000 1/2" would be a group
    # and a mixed number, and bare fractions, which have no braces, before those that have.
    text = _SPACE.sub(" ", text.replace("\\!", "")).strip()
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _GROUPS.sub(lambda found: found.group().replace(" ", ""), text)
    text = _SLASHED.sub(r"\1\\frac{\2}{\3}", text)
    text = _MIXED.sub(lambda m: f"\\frac{{{int(m[1]) * int(m[3]) + int(m[2])}}}{{{m[3]}}}", text)
    return _REPEATING.sub(_repeated, text)


def _repeated(found: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` is (16 - 1) / 90."""
    whole, first, again = found.groups()
    top = int(whole + first + again) - int(whole + first or "0")
    return rf"\frac{{{top}}}{{{10 ** len(first) * (10 ** len(again) - 1)}}}"


def normalised(formula: str) -> str:
    """Returns a formula as math-verify reads it: whole numbers and no full stop at its end."""
    text = _IMAGINARY.sub("i", tidy(_DOLLARS.sub("", formula)).replace("°", r"^\circ"))
    return re.sub(r"(?<=\d)\.0+(?!\d)|(?<!\.)\.$", "", text)


def squeezed(text: str) -> str:
    """Leaves out layout and fonts, but not the white space between digits."""
    text = " ".join(_WORDS.sub(r"\1", text).split())
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\\[dt]frac", r"\\frac", text))
