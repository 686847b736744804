"""An animated GIF of a decode: a monospaced canvas that fills up."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.plots import THEMES, Theme
from lit_dlm.reports.samples import Sample
from lit_dlm.system.files import write_atomically
from lit_dlm.trajectories.record import Trajectory

MAX_FRAMES = 120  # a longer decode skips steps
_PICTURE_LINES = 9  # lines of text that a drawn picture takes
_PROMPT_LINES = 6
_COLUMNS = 56  # characters in a line
_FONT_SIZE = 18  # pixels
_LINE = round(_FONT_SIZE * 1.55)
_MARGIN = _FONT_SIZE
STEP_MILLISECONDS = 250
HOLD_MILLISECONDS = 2500  # how long the last frame is shown


class TextBox(NamedTuple):
    """Where a response position is drawn, in rows and columns of characters."""

    row: int
    column: int
    width: int
    text: str


def write_gif(
    path: Path, samples: Sequence[Sample], pieces: TokenPieces, *, theme: str = "light"
) -> None:
    """Writes an animation of decodes, one below the other, all at the same pace."""
    frames = animation_frames(samples, pieces, theme=theme)
    # One palette, from the first, a middle and the last frame: with several, colours would flicker.
    chosen = [frames[0], frames[len(frames) // 2], frames[-1]]
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(chosen)))
    for number, frame in enumerate(chosen):
        sheet.paste(frame, (0, number * height))
    palette = sheet.quantize(colors=64)  # text has few colours; more would only make files larger
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    pace = STEP_MILLISECONDS * _stride(samples)
    data = io.BytesIO()
    first.save(
        data,
        format="GIF",
        save_all=True,
        append_images=others,
        duration=[pace] * len(others) + [HOLD_MILLISECONDS],
        loop=0,
        optimize=True,
    )
    write_atomically(path, data.getvalue())


def animation_frames(
    samples: Sequence[Sample], pieces: TokenPieces, *, theme: str = "light"
) -> list[Image.Image]:
    """The start, the canvas after every step with its new tokens marked, and the end unmarked."""
    painter = _Painter(samples, pieces, THEMES[theme])
    steps, stride = max(sample.record.num_steps for sample in samples), _stride(samples)
    frames = [painter.frame(step, since=step - stride) for step in range(0, steps, stride)]
    return [*frames, painter.frame(steps, since=steps - stride), painter.frame(steps, since=steps)]


def _stride(samples: Sequence[Sample]) -> int:
    """Steps from one frame to the next; two frames are reserved for the end."""
    steps = max(sample.record.num_steps for sample in samples)
    return max(1, -(-steps // (MAX_FRAMES - 2)))


def lay_out(record: Trajectory, pieces: TokenPieces, *, columns: int) -> list[TextBox]:
    """Places the response so that nothing moves while it fills up, one box per position.

    Each is as wide as its final token; special tokens and what stays empty get one column, no text.
    """
    tokens = record.tokens.tolist()
    boxes, row, column = [], 0, 0
    for token, shown in zip(tokens, pieces.texts(tokens), strict=True):
        text = "" if token == record.mask_id else shown
        body = text.strip("\n")
        before = len(text) - len(text.lstrip("\n"))
        after = len(text) - before - len(body)
        lines = body.expandtabs(4).split("\n")
        width = min(max(1, len(lines[0])), columns) if body or not text else 0
        if before:  # a token such as "\n#### " begins a line and stands on it
            row, column = row + before, 0
        elif column + width > columns:
            row, column = row + 1, 0
        boxes.append(TextBox(row, column, width, lines[0]))
        column += width
        if after or len(lines) > 1:
            row, column = row + after + len(lines) - 1, 0
    return boxes


class _Painter:
    """Draws frames of one size: the prompt, and a panel for each decode."""

    def __init__(self, samples: Sequence[Sample], pieces: TokenPieces, theme: Theme) -> None:
        self.samples = samples
        self.theme = theme
        self.is_special = pieces.is_special
        # The monospaced font that matplotlib ships.
        font = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
        self.font = ImageFont.truetype(str(font), _FONT_SIZE)
        self.small = ImageFont.truetype(str(font), round(_FONT_SIZE * 0.72))
        self.advance = self.font.getlength("0")
        text = "".join(pieces.texts(samples[0].record.prompt_ids.tolist())).strip()
        lines = [line for part in text.splitlines() for line in wrap(part, _COLUMNS) or [""]]
        if len(lines) > _PROMPT_LINES:
            lines[_PROMPT_LINES - 1 :] = [lines[_PROMPT_LINES - 1][: _COLUMNS - 1] + "…"]
        self.prompt = lines
        records = [sample.record for sample in samples]
        self.states = [record.all_states() for record in records]
        self.drawn = [pieces.drawn(record) for record in records]
        self.boxes = [
            [] if drawn else lay_out(record, pieces, columns=_COLUMNS)
            for record, drawn in zip(records, self.drawn, strict=True)
        ]
        rows = [
            _PICTURE_LINES if drawn else max((box.row for box in boxes), default=0) + 1
            for boxes, drawn in zip(self.boxes, self.drawn, strict=True)
        ]
        self.heights = [round(_LINE * (1.35 + count)) + _MARGIN for count in rows]
        self.top = _MARGIN + _LINE * len(lines) + _MARGIN // 2
        self.size = round(2 * _MARGIN + _COLUMNS * self.advance), self.top + sum(self.heights)

    def frame(self, step: int, *, since: int) -> Image.Image:
        """Draws all decodes after a step; what was written after ``since`` steps is marked."""
        image = Image.new("RGB", self.size, self.theme.background)
        draw = ImageDraw.Draw(image)
        for number, text in enumerate(self.prompt):
            at = (_MARGIN, _MARGIN + number * _LINE)
            draw.text(at, text, font=self.font, fill=self.theme.muted)
        top = self.top
        for number, sample in enumerate(self.samples):
            last = sample.record.num_steps
            # A decode that ended earlier stands still while others go on.
            done, before = min(step, last), min(max(since, 0), last)
            self._draw_head(draw, sample, done, top)
            if drawn := self.drawn[number]:
                side = _LINE * (_PICTURE_LINES - 1)
                picture = drawn[done].resize((side, side), Image.Resampling.NEAREST)
                image.paste(picture, (_MARGIN, round(top + 1.35 * _LINE)))
            self._draw_response(draw, number, done, before, top + 1.2 * _LINE)
            top += self.heights[number]
        return image

    def _draw_head(self, draw: ImageDraw.ImageDraw, sample: Sample, done: int, top: float) -> None:
        theme, total, right = self.theme, sample.record.num_steps, self.size[0] - _MARGIN
        title, count = sample.method or sample.record.uid, f"step {done}/{total}"
        draw.text((_MARGIN, top), title, font=self.small, fill=theme.accent)
        at = right - self.small.getlength(count), top
        draw.text(at, count, font=self.small, fill=theme.muted)
        base = top + _LINE * 0.85
        draw.rectangle((_MARGIN, base - 3, right, base - 1), fill=theme.line)
        end = _MARGIN + (right - _MARGIN) * done / max(total, 1)
        draw.rectangle((_MARGIN, base - 3, end, base - 1), fill=theme.accent)

    def _draw_response(
        self, draw: ImageDraw.ImageDraw, number: int, done: int, before: int, top: float
    ) -> None:
        theme, record, states = self.theme, self.samples[number].record, self.states[number]
        for position, box in enumerate(self.boxes[number]):
            if box.width == 0:
                continue
            left, upper = _MARGIN + box.column * self.advance, top + box.row * _LINE
            right = left + box.width * self.advance
            area = (left + 1, upper + 2, right - 1, upper + _LINE - 3)
            token = int(states[done, position])
            is_new = token != states[before, position]
            if token == record.mask_id:
                draw.rounded_rectangle(area, radius=3, fill=theme.mask)
            elif self.is_special(token):
                if is_new:
                    draw.rounded_rectangle(area, radius=3, outline=theme.accent)
            else:
                if is_new:
                    draw.rounded_rectangle(area, radius=3, fill=theme.accent)
                ink = theme.accent_text if is_new else theme.text
                # The box has the room of the final token; one that will be overwritten may need
                # more, and is only hinted at.
                text = box.text[: box.width] if token == record.tokens[position] else "~"
                draw.text((left, upper + 1), text, font=self.font, fill=ink)
