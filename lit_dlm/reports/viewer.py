"""The trajectory viewer: one HTML file that holds everything and requests nothing.

Texts of models are not trusted: a token may well be ``</script>``. They are embedded as JSON with
every ``<`` escaped, the page shows them by ``textContent`` alone, and its content security policy
allows its own script and style by digest and nothing else, not even a request.

Long columns are base64 of little-endian arrays, decoded by the page when it first shows a sample:

===========  ===========  =============================================================
key          type         content
===========  ===========  =============================================================
``prompt``   token        prompt tokens
``tokens``   token        response after the last step
``commit``   u16          step of the last write, 65535 where no step wrote
``signals``  f16 each     values per response position, NaN where there is none
``seen``     token        proposal at every masked position of every step, by step
``sure``     u8           probability of that proposal in 1/254, 255 where unknown
``frames``   u8 each      drawn picture, square RGB, at the start and after each step
===========  ===========  =============================================================

``token`` is u16 or u32 and indexes the page's table of tokens, which holds only what occurs.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_dlm.reports.pages import render
from lit_dlm.reports.parts import parts_of
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.samples import Sample, SampleSet
from lit_dlm.system.files import write_atomically
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)

SCRIPTS = ("columns.js", "colours.js", "canvas.js", "details.js", "samples.js", "page.js")
"""In the order in which they are put into the page."""
MAX_PROPOSALS = 2_000_000
"""Most proposals of single steps in a page, 4 bytes each; if there are more, all are left out."""
MAX_SIDE = 64  # pixels on each side of a drawn picture in the page; larger ones are scaled down
NEVER = 0xFFFF  # commit step of a position that no step wrote
COMMIT_SIGNALS = {
    "confidence": "commit_prob",
    "margin": "commit_margin",
    "policy_score": "commit_score",
    "log_prob": "commit_log_prob",
    "value": "commit_value",
    "advantage": "commit_advantage",
}
META_SIGNALS = ("value", "advantage", "token_rewards")
"""Entries of a record's ``meta`` that hold a number (or null) per response position, from the first
on; a shorter list leaves the others without one."""


class ViewedSet(NamedTuple):
    """Samples with the texts of their tokens."""

    samples: SampleSet
    pieces: TokenPieces


def write_viewer(path: Path, sets: Sequence[ViewedSet], *, title: str) -> None:
    """Writes the page, which is the same for the same input."""
    write_atomically(path, viewer_page(sets, title=title))


def viewer_page(sets: Sequence[ViewedSet], *, title: str) -> str:
    """Returns the page as HTML."""
    data = page_data(sets, title=title)
    return render("viewer", scripts=SCRIPTS, title=title, data=data)


def page_data(sets: Sequence[ViewedSet], *, title: str) -> dict[str, Any]:
    """Everything the page shows, as JSON types."""
    signals = [one.record.signals for viewed in sets for one in viewed.samples.samples]
    proposals = sum(len(one.get("step_proposal", ())) for one in signals)
    if proposals > MAX_PROPOSALS:
        message = "%d proposals of single steps are too many for one page (%d) and left out; "
        message += "show fewer samples to see them"
        logger.warning(message, proposals, MAX_PROPOSALS)
    content: dict[str, Any] = {"title": title, "sets": [], "samples": []}
    for number, (shown, pieces) in enumerate(sets):
        table = TokenTable(pieces, (sample.record for sample in shown.samples))
        used = {sample.method for sample in shown.samples}
        content["sets"].append(
            {
                "label": shown.label,
                "source": str(shown.source),
                "available": shown.num_available,
                "tokens": table.as_json(),
                "methods": {k: decoder_line(v) for k, v in shown.methods.items() if k in used},
            }
        )
        for sample in shown.samples:
            # Proposals are most of a page; all sets have them or none, so that sets compare.
            columns = sample_columns(sample, table, shown.methods.get(sample.method))
            if proposals <= MAX_PROPOSALS:
                columns |= proposal_columns(sample.record, table)
            content["samples"].append({"set": number, **columns})
    return content


def decoder_line(decoder: Any) -> str:
    """A described decoder in one line, such as ``ThresholdPolicy(threshold=0.9), FullWindow``."""
    components = {k: v for k, v in (decoder or {}).items() if isinstance(v, dict) and "name" in v}
    if not components.get("sampler", {}).get("temperature"):
        components.pop("sampler", None)  # greedy, as most are
    return ", ".join(_component_line(v) for k, v in components.items() if k != "settings")


def _component_line(settings: dict[str, Any]) -> str:
    # Digests of weights and dtypes of scores tell decoders apart, but a reader nothing.
    shown = [k for k in settings if k not in ("name", "weights", "score_dtype")]
    kinds = (str, int, float)
    values = [f"{k}={settings[k]}" for k in shown if isinstance(settings[k], kinds)]
    values += [str(region["name"]) for region in settings.get("regions") or []]
    return str(settings["name"]) + (f"({', '.join(values)})" if values else "")


class TokenTable:
    """The tokens that occur in a set of samples, with their texts."""

    def __init__(self, pieces: TokenPieces, records: Iterable[Trajectory]) -> None:
        self.pieces = pieces
        used: list[NDArray[Any]] = [np.zeros(0, dtype=np.int32)]
        for record in records:
            used += [record.prompt_ids, record.tokens, np.array([record.mask_id], dtype=np.int32)]
            if record.superseded is not None:
                used.append(record.superseded[:, 2])
            if "step_proposal" in record.signals:
                used.append(record.signals["step_proposal"])
        self.ids = np.unique(np.concatenate(used))
        # A vocabulary may need three bytes for each id; what occurs in some samples fits into two.
        self._dtype = "<u2" if len(self.ids) <= NEVER else "<u4"

    def encode(self, ids: NDArray[Any]) -> str:
        return _packed(np.searchsorted(self.ids, ids), self._dtype)

    def index(self, token: int) -> int:
        return int(np.searchsorted(self.ids, token))

    def as_json(self) -> dict[str, Any]:
        ids = self.ids.tolist()
        return {
            "ids": ids,
            "texts": [self.pieces.text(token) for token in ids],
            "special": [row for row, token in enumerate(ids) if self.pieces.is_special(token)],
            "partial": [row for row, token in enumerate(ids) if self.pieces.is_partial(token)],
            "wide": self._dtype == "<u4",
        }


def sample_columns(
    sample: Sample, table: TokenTable, method: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A sample as a JSON object; keys with empty values are left out."""
    record = sample.record
    signals = position_signals(record).items()
    given = [] if record.given is None else np.flatnonzero(record.given).tolist()
    early = [] if record.superseded is None else record.superseded.tolist()
    content: dict[str, Any] = {
        "uid": record.uid,
        **{name: value for name, value in vars(sample).items() if name != "record"},
        "reward": record.meta.get("reward"),
        "status": record.status,
        "steps": record.num_steps,
        "mask": table.index(record.mask_id),
        "prompt": table.encode(record.prompt_ids),
        "tokens": table.encode(record.tokens),
        "commit": _packed(np.where(record.commit_step < 0, NEVER, record.commit_step), "<u2"),
        "joined": table.pieces.joined(record.tokens.tolist()),
        "prompt_joined": table.pieces.joined(record.prompt_ids.tolist()),
        "signals": {name: _packed(values, "<f2") for name, values in signals},
        "regions": parts_of(record, method),
        "given": given,
        "early": [[step, position, table.index(token)] for step, position, token in early],
        "frames": _frames(table.pieces, record),
    }
    # A page of a thousand samples would be mostly keys; the script takes an absent one for empty.
    return {key: value for key, value in content.items() if value not in ("", None, [], {})}


def proposal_columns(record: Trajectory, table: TokenTable) -> dict[str, Any]:
    """What was proposed at every step, if that was recorded."""
    if "step_proposal" not in record.signals:
        return {}
    content = {"seen": table.encode(record.signals["step_proposal"])}
    if "step_prob" in record.signals:
        prob = record.signals["step_prob"].astype(np.float32)
        scaled = np.where(np.isnan(prob), 255, np.rint(np.clip(prob, 0, 1) * 254))
        content["sure"] = _packed(scaled, "u1")
    return content


def _frames(pieces: TokenPieces, record: Trajectory) -> list[str]:
    from PIL import Image  # imported here, as the rest of the page does not need it

    drawn = pieces.drawn(record)
    side = min(drawn[0].width, MAX_SIDE) if drawn else 0
    small = (one.resize((side, side), Image.Resampling.BOX) for one in drawn)
    return [_packed(np.array(one), "u1") for one in small]


def position_signals(record: Trajectory) -> dict[str, NDArray[np.float32]]:
    """What was recorded about every response position: ``(G,)`` float32, NaN without a value.

    ``entropy`` is in nats, before the step that wrote; ``margin`` is the lead over the best
    candidate that was passed over, in the policy's own score.
    """
    signals = {
        name: record.signals[source].astype(np.float32)
        for name, source in COMMIT_SIGNALS.items()
        if source in record.signals
    }
    if (entropy := record.commit_entropy(fill=math.nan)) is not None:
        signals["entropy"] = entropy
    for name in META_SIGNALS:
        if name in record.meta:
            values = record.meta[name]
            signals[name] = np.full(record.num_generated, np.nan, dtype=np.float32)
            # Whoever wrote the record decided what stands in its meta; a longer list fits nowhere.
            try:
                signals[name][: len(values)] = [math.nan if one is None else one for one in values]
            except (TypeError, ValueError):
                raise ValueError(
                    f"trajectory {record.uid!r}: meta '{name}' must be a list of up to "
                    f"{record.num_generated} numbers or nulls, got {values!r:.80}"
                ) from None
    return signals


def _packed(values: Any, dtype: str) -> str:
    # Shorter than the numbers as JSON, and read at once where a sample is shown: of a thousand
    # samples in a page, most never are.
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()
