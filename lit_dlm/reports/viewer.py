"""The trajectory viewer: one HTML file that holds everything and asks for nothing.

Texts of models are hostile: a token may well be ``</script>``. They travel as JSON with every ``<``
escaped, the page shows them by ``textContent`` alone, and its content security policy allows its
own script and style by digest and nothing else, not even a request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.samples import SampleSet
from lit_dlm.reports.template import render
from lit_dlm.reports.viewer_columns import TokenTable, num_proposals, sample_columns

logger = logging.getLogger(__name__)

SCRIPTS = ("columns.js", "colours.js", "canvas.js", "details.js", "samples.js", "page.js")
"""In the order in which they are put into the page."""
MAX_PROPOSALS = 2_000_000
"""Proposals of single steps that a page holds; 4 bytes each. Beyond this they are left out."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ViewedSet:
    """Samples with the texts of their tokens."""

    samples: SampleSet
    pieces: TokenPieces


def viewer_page(sets: Sequence[ViewedSet], *, title: str) -> str:
    """The page: HTML in UTF-8, the same for the same input."""
    data = Markup(json_for_script(page_data(sets, title=title)))
    return render("viewer", scripts=SCRIPTS, title=title, data=data)


def write_viewer(path: Path, sets: Sequence[ViewedSet], *, title: str) -> None:
    """Writes :func:`viewer_page` to a file."""
    write_atomically(path, viewer_page(sets, title=title))


def page_data(sets: Sequence[ViewedSet], *, title: str) -> dict[str, Any]:
    """Everything the page shows, as JSON types; samples as in :mod:`.viewer_columns`."""
    proposals = sum(num_proposals(viewed.samples.samples) for viewed in sets)
    if proposals > MAX_PROPOSALS:
        logger.warning(
            "%d proposals of single steps are too many for one page (%d) and left out; show fewer "
            "samples to see them",
            proposals,
            MAX_PROPOSALS,
        )
    content: dict[str, Any] = {"title": title, "sets": [], "samples": []}
    for number, viewed in enumerate(sets):
        shown = viewed.samples
        table = TokenTable(viewed.pieces, (sample.record for sample in shown.samples))
        content["sets"].append(
            {
                "label": shown.label,
                "source": str(shown.source),
                "available": shown.num_available,
                "tokens": table.as_json(),
                "methods": {
                    name: method_line(method)
                    for name, method in shown.methods.items()
                    if any(sample.method == name for sample in shown.samples)
                },
            }
        )
        content["samples"] += [
            sample_columns(
                sample,
                table,
                method=shown.methods.get(sample.method),
                number=number,
                proposals=proposals <= MAX_PROPOSALS,
            )
            for sample in shown.samples
        ]
    return content


def method_line(method: Any) -> str:
    """A described decoder in one line, such as ``ThresholdPolicy(threshold=0.9), FullWindow``."""
    parts = []
    for plug, settings in (method or {}).items():
        if plug == "settings" or not isinstance(settings, dict) or "name" not in settings:
            continue
        if plug == "sampler" and not settings.get("temperature"):
            continue  # greedy
        values = [
            f"{key}={value}"
            for key, value in settings.items()
            if key not in ("name", "weights", "score_dtype")
            and isinstance(value, (str, int, float))
        ]
        regions = settings.get("regions") or []
        values += [str(region["name"]) for region in regions]
        told = ", ".join(values)
        parts.append(f"{settings['name']}({told})" if told else str(settings["name"]))
    return ", ".join(parts)


def json_for_script(content: Any) -> str:
    """JSON that cannot end the script that holds it: ASCII without ``<``, ``>`` and ``&``."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
