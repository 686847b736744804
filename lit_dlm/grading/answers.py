"""Final answers in running text: finding them, and comparing numbers, text and mathematics."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from lit_dlm.grading import notation
from lit_dlm.grading.bounded import shared_processes
from lit_dlm.grading.verdict import Verdict

_NUMBER = re.compile(
    r"(?<![\d.,/])[-+]?\d{1,400}\s*/\s*0*[1-9]\d{0,399}(?![.,]?\d|\s*/)|"  # no part of a date
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE](?P<power>[-+]?\d+))?"
)
_FRACTION = re.compile(r"([-+]?)\s?\\[dt]?frac\s*\{\s*(-?\d{1,400})\s*\}\s*\{\s*(-?\d{1,400})\s*\}")
# What makes a formula of the one number of an answer: LaTeX that is not of words or layout.
_OPERATION = re.compile(r"\^|\\(?!text|math|mbox|q?quad|left|right|approx|display|degree)[a-zA-Z]")
# What makes one of the first number of a line: an operation, or another number to choose from.
_GOES_ON = re.compile(
    r" *(?:[-+*/^=_,;x]|and|to|\\(?:times|cdot|div|pm)) *[\d({\\$.-]"
    r"|[^\d(]{0,40}\bor\b[^\d(]{0,40}\d"
)
_PERCENT = re.compile(r" *\\?%$")
_BASE = re.compile(r"\d *_ *\{? *(\d+)")
# Of a unit, such as a degree.
_EXPONENT = re.compile(r"\^ *\{? *\\circ *\}?|(?<=[a-zA-Z])(\}?) *\^ *(?:\{[^{}]*\}|\w)")
_BOX = re.compile(r"\\(?P<name>f?box(?:ed)?)(?![a-zA-Z])\s*")
_CHOICE = re.compile(r"[Aa]nswer(?: is|:)[\s:*]*(\(?[A-Z]\)?(?![a-zA-Z]))")
_LETTER = re.compile(r"(?:\\text\s*\{)?\(?([A-Z])\)?[.}]?")
_BRACE = re.compile(r"(?<!\\)[{}]")
# Longer digit strings are not answers; parsing them costs quadratic time.
_MAX_DIGITS = 400
MAX_ANSWER_CHARACTERS = 1000
"""Longer formulas are wrong without a comparison; gold answers of MATH have at most about 150."""
MATH_SECONDS = 5.0  # limit on the wall time of one comparison of formulas


def last_boxed(text: str) -> str | None:
    r"""The content of the last whole ``\boxed{...}``, ``\fbox{...}`` or (in TeX) ``\boxed 5``."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start in closing:
            return text[start + 1 : closing[start]].strip()
        if match["name"][0] == "b" and text[start : start + 1].isalnum():
            return text[start]
    return None


def text_after_marker(text: str) -> str | None:
    """The rest of the line after the last ``####``, stripped."""
    _, marker, rest = text.rpartition("####")
    lines = rest.strip().splitlines() if marker else []
    return lines[0].strip() if lines else None


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of the last number of a short answer such as ``18 \text{ dollars}``.

    Signs and words around it do not matter; ``\frac{a}{b}``, ``a/b`` and ``2 1/3`` are exact.
    """
    plain = notation.tidy(_without_currency(text))
    if fraction := _FRACTION.fullmatch(plain):
        sign, top, bottom = fraction.groups()
        return Fraction(int(f"{sign}1") * int(top), int(bottom)) if int(bottom) else None
    return _last_number(_EXPONENT.sub("", plain))


def _without_currency(text: str) -> str:
    """Removes currency signs; makes typographic minus signs and LaTeX's commas plain ones."""
    return re.sub(r"[$€£]|\\\$", "", text.replace("\N{MINUS SIGN}", "-").replace("{,}", ","))


def _find_numbers(text: str) -> Iterator[str]:
    # As texts: a completion may hold a million, and making fractions of them would take 10 s.
    # A minus directly after a digit or a letter is a subtraction or a hyphen, not a sign.
    text = _FRACTION.sub(r" \1\2/\3", text)
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[,\s]", "", match.group())
        if len(digits) > _MAX_DIGITS or abs(int(match["power"] or 0)) > _MAX_DIGITS:
            continue
        before = text[match.start() - 1] if match.start() else " "
        if digits[0] in "+-" and (before.isalnum() or before in ")]}"):
            digits = digits[1:]
        yield digits


def _last_number(text: str) -> Fraction | None:
    last = deque(_find_numbers(text), maxlen=1)
    return Fraction(last[0]) if last else None


def extract_number(completion: str) -> str | None:
    r"""The final number of a worked solution, as ``18`` or ``1/3``; ``None`` without any.

    That is the one after the last ``####`` or in the last ``\boxed{}``, else the last of the text.
    A formula there (``10^3``), or a choice (``18 or 20``), is returned as it is.
    """
    boxed = _final(last_boxed(completion) or "")
    marked = _final(text_after_marker(completion) or "", is_line=True)
    if boxed is not None and completion.rfind(r"\boxed") > completion.rfind("####"):
        return boxed
    if (final := boxed if marked is None else marked) is not None:
        return final
    value = _last_number(_without_currency(completion))
    return None if value is None else format_number(value)


def _final(text: str, *, is_line: bool = False) -> str | None:
    """Returns the number of an answer that holds one; a formula or a choice as it is.

    Further numbers in the words of a line do not count.
    """
    plain = notation.normalised(text[:MAX_ANSWER_CHARACTERS].replace("**", ""))
    plain = _without_currency(plain)
    plain = _FRACTION.sub(r"\1\2/\3", _EXPONENT.sub("", plain))
    numbers = [*islice(_find_numbers(plain), 2)]
    if not numbers:
        return None
    rest = _NUMBER.split(plain, maxsplit=1)[-1]
    is_formula = bool(_GOES_ON.match(rest)) if is_line else len(numbers) > 1
    if is_formula or _OPERATION.search(plain):
        return text.rstrip(".").strip("$ ")
    return format_number(Fraction(numbers[0]))


def format_number(value: Fraction) -> str:
    """Writes an exact number: ``18``, ``0.5`` if the decimals are finite, else ``1/3``."""
    bottom = value.denominator
    # By integers: floats would end after 17 digits. Of 2**a * 5**b the larger exponent counts, and
    # it is below the number of bits.
    places = next((n for n in range(bottom.bit_length()) if 10**n % bottom == 0), None)
    if not places:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // bottom).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def grade_numeric(completion: str, gold: str) -> Verdict:
    """Grades a worked solution by its final number, exactly (``18.0`` equals ``18``)."""
    truth = parse_number(gold)
    if truth is None:
        raise ValueError(f"the reference answer must hold a number, got {gold!r}")
    answer, expected = extract_number(completion), format_number(truth)
    number = parse_number(answer or "")
    # A formula or a choice, which extraction returned as it is. Its last number may be anything:
    # 3 of 10^3, 20 of "18 or 20".
    if answer is not None and (number is None or format_number(number) != answer):
        return _judged_formula(answer, expected)
    return judged(answer, number == truth, expected=expected, missing="no number in the text")


def judged(answer: str | None, is_right: bool, *, expected: str, missing: str) -> Verdict:
    """Judges an extracted answer; ``missing`` says what a completion without one lacks."""
    if answer is None:
        return Verdict(status="no_answer", detail=missing)
    if is_right:
        return Verdict(status="right", answer=answer)
    return Verdict(status="wrong", answer=answer, detail=f"expected {expected}")


def _stripped(completion: str) -> str | None:
    return completion.strip() or None


def grade_exact(completion: str, gold: str) -> Verdict:
    """Grades a completion that must be the answer itself, apart from white space at its ends."""
    answer, wanted = _stripped(completion), gold.strip()
    return judged(answer, answer == wanted, expected=wanted, missing="the completion is empty")


def extract_choice(completion: str, num_options: int) -> str | None:
    r"""Returns the letter that a solution ends with.

    Looked for in this order: the last ``\boxed{}``, the last "answer is (C)" or "answer: C" (as
    MMLU-Pro's evaluation reads it), a last line, after any ``</think>``, that is only a letter.
    ``None`` if the letter is beyond the number of options.
    """
    boxed = last_boxed(completion)
    stated = _CHOICE.findall(completion)
    lines = completion.rpartition("</think>")[2].strip().splitlines()
    for text in (boxed, stated[-1] if stated else None, lines[-1] if lines else None):
        if text and (letter := _LETTER.fullmatch(text.strip().replace("*", ""))):
            # A letter that is no option ends the search: what stood before it was given up.
            return letter[1] if ord(letter[1]) - ord("A") < num_options else None
    return None


def extract_math(completion: str) -> str | None:
    r"""The final expression of a solution: the last ``\boxed{}``, else the text after ``####``."""
    boxed = last_boxed(completion)
    if boxed:
        return boxed
    marked = text_after_marker(completion)
    return marked.rstrip(".").strip("$ ") or None if marked else None


def grade_math(completion: str, gold: str) -> Verdict:
    r"""Grades a solution by mathematical equality of its final expression.

    Only this expression is passed to math-verify: the whole text could keep it busy for minutes.
    """
    answer = extract_math(completion)
    if answer is None:
        return Verdict(status="no_answer", detail="no boxed answer")
    return _judged_formula(answer, gold)


def _judged_formula(answer: str, gold: str) -> Verdict:
    equal: bool | None = answer == gold
    readings = []
    if len(answer) <= MAX_ANSWER_CHARACTERS:
        readings = [tuple(map(notation.normalised, (gold, answer)))]
        # A gold percentage is answered by its value, by its number and by both.
        if _PERCENT.search(readings[0][0]):
            readings.append(tuple(_PERCENT.sub("", text) for text in readings[0]))
        # math-verify takes 12_5 and 12_7 for equal.
        bases = [{*_BASE.findall(text)} for text in readings[0]]
        if all(bases) and bases[0] != bases[1]:
            readings = []
    # Texts first: most right answers are the data set's to the letter, and comparing formulas takes
    # milliseconds of another process.
    for truth, candidate in readings:
        if not equal:
            equal = notation.squeezed(truth) == notation.squeezed(candidate)
        if not equal:
            question = {"gold": truth, "answer": candidate}
            equal = shared_processes("math").ask(question, seconds=MATH_SECONDS)
        if equal is None:
            return Verdict(status="timeout", answer=answer, detail="the comparison did not end")
    return judged(answer, bool(equal), expected=gold, missing="")


class Grader(NamedTuple):
    """How completions are compared with an answer."""

    extract: Callable[[str], str | None]
    grade: Callable[[str, str], Verdict] | None


GRADERS = {
    "none": Grader(_stripped, None),
    "exact": Grader(_stripped, grade_exact),
    "numeric": Grader(extract_number, grade_numeric),
    "math": Grader(extract_math, grade_math),
}
