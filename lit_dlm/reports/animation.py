"""An animated GIF of a decode: a monospaced canvas that fills up."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper

from PIL import Image, ImageDraw, ImageFont

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.samples import Sample
from lit_dlm.reports.themes import THEMES, Theme, monospaced_font
from lit_dlm.trajectories.record import Trajectory

MAX_FRAMES = 120
"""A longer decode shows its steps in strides."""
_PICTURE_LINES = 9
"""Lines of text that a drawn picture takes."""
_COLUMNS = 56  # characters in a line
_FONT_SIZE = 18  # pixels
STEP_MILLISECONDS = 250
HOLD_MILLISECONDS = 2500
"""How long the last frame stands."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Place of a response position on the canvas, in character columns and rows."""

    row: int
    column: int
    width: int
    text: str


def write_gif(
    path: Path,
    samples: Sequence[Sample],
    pieces: TokenPieces,
    *,
    theme: str = "light",
) -> None:
    """Writes an animation of one decode, or of several one below the other.

    Special tokens go empty, and picture tokens are shown as the picture. Several decodes run at the
    same pace, so the one with fewer steps stands still sooner.
    """
    frames = animation_frames(samples, pieces, theme=theme)
    palette = _palette(frames)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    steps = max(sample.record.num_steps for sample in samples)
    data = io.BytesIO()
    small[0].save(
        data,
        format="GIF",
        save_all=True,
        append_images=small[1:],
        duration=[STEP_MILLISECONDS * _stride(steps)] * (len(small) - 1) + [HOLD_MILLISECONDS],
        loop=0,
        optimize=True,
    )
    write_atomically(path, data.getvalue())


def animation_frames(
    samples: Sequence[Sample], pieces: TokenPieces, *, theme: str = "light"
) -> list[Image.Image]:
    """The frames of an animation: the start, the canvas after every step, and the end once more.

    RGB pictures of one size, at most :data:`MAX_FRAMES`. What is new is marked; in the last picture
    nothing is.
    """
    painter = _Painter(samples, pieces, THEMES[theme])
    steps = max(sample.record.num_steps for sample in samples)
    stride = _stride(steps)
    shown = [*range(0, steps, stride), steps]
    frames = [painter.frame(step, since=step - stride) for step in shown]
    return [*frames, painter.frame(steps, since=steps)]


def _stride(steps: int) -> int:
    """Steps from one frame to the next; two frames are kept for the end."""
    return max(1, -(-steps // (MAX_FRAMES - 2)))


def lay_out(record: Trajectory, pieces: TokenPieces, *, columns: int) -> list[Cell]:
    """Places the response so that nothing moves while it fills up, one cell per position.

    Every position keeps the room of its final token. Special tokens and positions that stay empty
    get one column and no text.
    """
    tokens = record.tokens.tolist()
    cells, row, column = [], 0, 0
    for token, shown in zip(tokens, pieces.texts(tokens), strict=True):
        text = "" if token == record.mask_id else shown
        body = text.strip("\n")
        before = len(text) - len(text.lstrip("\n"))
        after = len(text) - before - len(body)
        lines = body.expandtabs(4).split("\n")
        width = min(max(1, len(lines[0])), columns) if body or not text else 0
        if before:
            row, column = row + before, 0
        elif column + width > columns:
            row, column = row + 1, 0
        cells.append(Cell(row=row, column=column, width=width, text=lines[0]))
        column += width
        if after or len(lines) > 1:
            row, column = row + after + len(lines) - 1, 0
    return cells


class _Painter:
    """Draws frames of one size."""

    def __init__(self, samples: Sequence[Sample], pieces: TokenPieces, theme: Theme) -> None:
        self.samples = samples
        self.theme = theme
        self.font = ImageFont.truetype(str(monospaced_font()), _FONT_SIZE)
        self.small = ImageFont.truetype(str(monospaced_font()), round(_FONT_SIZE * 0.72))
        self.advance = self.font.getlength("0")
        self.line = round(_FONT_SIZE * 1.55)
        self.margin = _FONT_SIZE
        prompt = "".join(pieces.texts(samples[0].record.prompt_ids.tolist())).strip()
        self.prompt = _wrapped(prompt, _COLUMNS, most=6)
        self.drawn = [pieces.drawn(sample.record) for sample in samples]
        self.cells = [
            [] if drawn else lay_out(sample.record, pieces, columns=_COLUMNS)
            for sample, drawn in zip(samples, self.drawn, strict=True)
        ]
        self.states = [sample.record.all_states() for sample in samples]
        self.special = pieces.is_special
        self.width = round(2 * self.margin + _COLUMNS * self.advance)
        rows = [
            _PICTURE_LINES if drawn else max((cell.row for cell in cells), default=0) + 1
            for cells, drawn in zip(self.cells, self.drawn, strict=True)
        ]
        self.heights = [round(self.line * (1.35 + count)) for count in rows]
        top = self.margin + self.line * len(self.prompt) + self.margin // 2
        gaps = self.margin * len(samples)
        self.height = round(top + sum(self.heights) + gaps)
        self.top = top

    def frame(self, step: int, *, since: int) -> Image.Image:
        image = Image.new("RGB", (self.width, self.height), self.theme.background)
        draw = ImageDraw.Draw(image)
        for number, text in enumerate(self.prompt):
            place = (self.margin, self.margin + number * self.line)
            draw.text(place, text, font=self.font, fill=self.theme.muted)
        top = float(self.top)
        for number, sample in enumerate(self.samples):
            self._panel(draw, number, sample.record, step, since, top)
            if drawn := self.drawn[number]:
                side = self.line * (_PICTURE_LINES - 1)
                picture = drawn[min(step, sample.record.num_steps)].resize(
                    (side, side), Image.Resampling.NEAREST
                )
                image.paste(picture, (self.margin, round(top + 1.35 * self.line)))
            top += self.heights[number] + self.margin
        return image

    def _panel(
        self,
        draw: ImageDraw.ImageDraw,
        number: int,
        record: Trajectory,
        step: int,
        since: int,
        top: float,
    ) -> None:
        theme, done = self.theme, min(step, record.num_steps)
        states = self.states[number]
        state, before = states[done], states[min(max(since, 0), record.num_steps)]
        title = self.samples[number].method or record.uid
        draw.text((self.margin, top), title, font=self.small, fill=theme.accent)
        count = f"step {done}/{record.num_steps}"
        right = self.width - self.margin - self.small.getlength(count)
        draw.text((right, top), count, font=self.small, fill=theme.muted)
        base = top + self.line * 0.85
        rail = (self.margin, base - 3, self.width - self.margin, base - 1)
        draw.rectangle(rail, fill=theme.line)
        share = done / max(record.num_steps, 1)
        end = self.margin + (rail[2] - rail[0]) * share
        draw.rectangle((rail[0], rail[1], end, rail[3]), fill=theme.accent)
        base += self.line * 0.35
        for position, cell in enumerate(self.cells[number]):
            if cell.width == 0:
                continue
            left = self.margin + cell.column * self.advance
            upper = base + cell.row * self.line
            box = (
                left + 1,
                upper + 2,
                left + cell.width * self.advance - 1,
                upper + self.line - 3,
            )
            token = int(state[position])
            if token == record.mask_id:
                draw.rounded_rectangle(box, radius=3, fill=theme.mask)
                continue
            is_new = token != int(before[position]) and done > 0 and step <= record.num_steps
            if self.special(token):
                if is_new:
                    draw.rounded_rectangle(box, radius=3, outline=theme.accent)
                continue
            if is_new:
                draw.rounded_rectangle(box, radius=3, fill=theme.accent)
            ink = theme.accent_text if is_new else theme.text
            text = cell.text[: cell.width] if token == record.tokens[position] else "~"
            draw.text((left, upper + 1), text, font=self.font, fill=ink)


def _wrapped(text: str, columns: int, *, most: int) -> list[str]:
    """Lines of at most ``columns`` characters; the end of a long text is left out."""
    wrapper = TextWrapper(columns, replace_whitespace=False, break_on_hyphens=False)
    lines = [line for part in text.expandtabs(4).split("\n") for line in wrapper.wrap(part) or [""]]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: columns - 1] + "…"]
    return lines


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """Colours of the first, a middle and the last frame."""
    chosen = [frames[0], frames[len(frames) // 2], frames[-1]]
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(chosen)))
    for number, frame in enumerate(chosen):
        sheet.paste(frame, (0, number * height))
    return sheet.quantize(colors=64)
