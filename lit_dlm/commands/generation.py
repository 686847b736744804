"""``lit-dlm generate``: decodes prompts; a terminal shows the canvas, a pipe gets the texts."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import HFBackbone, load_backbone, tokenizer_of
from lit_dlm.backbones.location import ASSETS
from lit_dlm.config.files import compose
from lit_dlm.config.parser import Parser
from lit_dlm.decoding import Decoder, DecodeState, Observer, StepRecord
from lit_dlm.generation import generate
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.system.terminal import PlainConsole, printable
from lit_dlm.toy.word_problems import ITEMS, NAMES

logger = logging.getLogger(__name__)


class LiveCanvas(Observer):
    """Shows the responses of a batch as they are written; waits for the device in every step."""

    requires: frozenset[str] = frozenset()

    def __init__(self, live: Live, tokenizer: PreTrainedTokenizerBase) -> None:
        self._live = live
        self._pieces = TokenPieces(tokenizer)
        self._shown: dict[int, Text] = {}

    def on_start(self, state: DecodeState) -> None:
        self._shown = {}
        self._show(state, state.ids)

    def on_step(self, record: StepRecord) -> None:
        self._show(record.state, record.new_ids)

    def _show(self, state: DecodeState, new_ids: Tensor) -> None:
        # One transfer for each canvas; token by token each would wait for the device.
        before, after = (ids[:, state.start :].tolist() for ids in (state.ids, new_ids))
        for row, old, new in zip(state.rows.tolist(), before, after, strict=True):
            line = Text()
            for was, token in zip(old, new, strict=True):
                if token == state.mask_id:
                    line.append("░", "dim")
                elif not self._pieces.is_special(token):
                    text = printable(self._pieces.text(token))
                    line.append(text, "bold green" if was != token else "")
            self._shown[row] = line
        self._live.update(Text("\n").join(self._shown.values()), refresh=True)


@contextmanager
def live_canvas(console: Console, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[LiveCanvas]]:
    """Yields observers that show decodes on the terminal; none if there is no terminal."""
    if not console.is_terminal:
        yield []
        return
    with Live(console=console, transient=True) as live:
        yield [LiveCanvas(live, tokenizer)]


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = Parser(
        prog="lit-dlm generate",
        description="Decodes prompts: arguments, or one per line of standard input. The decoder is "
        "that of --config, a decode file such as configs/decode/entropy.yaml, and of --policy, "
        "--window, --quota, --sampler, --cache, --layout and --settings. Many prompts are better "
        "given to 'lit-dlm predict', which goes on where it was interrupted.",
    )
    parser.add_argument("prompts", nargs="*", type=str, default=[], help="User turns.")
    parser.add_argument("--response_length", type=PositiveInt, default=128, help="Cells to fill.")
    add_decoding_arguments(parser)
    config = parser.parse_composed(compose(arguments))
    prompts = config.prompts or [line.strip() for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError("prompts: expected some as arguments, or lines on standard input")
    backbone, tokenizer, decoder = built(parser, config)
    console = PlainConsole()
    # A pipe gets texts alone: no observer, so no step waits for the device.
    with live_canvas(console, tokenizer) as observers:
        done = generate(
            backbone,
            prompts,
            decode=decoder,
            tokenizer=tokenizer,
            response_length=config.response_length,
            batch_size=config.batch_size,
            seed=config.seed,
            observers=observers,
            progress=False,  # the canvas is on the terminal
        )
    for number, (prompt, text, steps) in enumerate(
        zip(prompts, done.texts, done.num_steps, strict=True)
    ):
        if number:
            console.print()
        if console.is_terminal:
            console.print(f"{prompt}  ({steps} forwards)", style="dim", highlight=False)
        console.print(text, highlight=False, soft_wrap=True)
    if hint := unknown_words_hint(tokenizer, " ".join(prompts)):
        logger.warning("%s", hint)
    return 0


def unknown_words_hint(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """Says what ``tiny`` is if a prompt has words that it never saw; ``None`` for other models."""
    if Path(tokenizer.name_or_path) != ASSETS / "tiny":
        return None
    known = {token.strip("Ġ") for token in tokenizer.get_vocab()}  # Ġ stands for a space
    # Words that it saw are whole tokens; others fall into letters, which it knows as variables.
    words = [word for word in re.findall(r"[^\W\d_]{2,}", text) if word not in known]
    if not words:
        return None
    return (
        f"tiny never saw {', '.join(map(repr, words[:5]))}: it is a toy of half a million "
        "parameters that knows small Python functions and sums told as stories, with "
        f"{len(NAMES)} names ({', '.join(NAMES)}) and {len(ITEMS)} things ({', '.join(ITEMS)}); "
        "with --response_length 32 it answers 'Tom has 34 pens, finds 7, loses 5. How many pens?'"
    )


def built(parser: Parser, config: Namespace) -> tuple[HFBackbone, PreTrainedTokenizerBase, Decoder]:
    """Builds what :func:`add_decoding_arguments` asks for; the backbone is on its device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected 'cpu', as no CUDA device was found, got 'cuda'")
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    instances, name = parser.instantiate(config), config.backbone
    # A name is loaded with the options beside it; a file has options of its own.
    if isinstance(name, str):
        backbone = load_backbone(name, dtype=config.dtype, device=device, adapter=config.adapter)
    elif config.adapter:
        raise ValueError("adapter: expected backbone.init_args.adapter beside a backbone file")
    else:
        backbone, name = instances.backbone.to(device).eval(), name.init_args.path
    tokenizer = tokenizer_of(backbone, config.tokenizer or name)
    return backbone, tokenizer, built_decoder(instances)


def built_decoder(instances: Namespace) -> Decoder:
    """Returns the decoder of the components that :func:`add_decoder_arguments` asks for."""
    return Decoder(
        **{component: instances[component] for component in signature(Decoder).parameters}
    )


@dataclass(kw_only=True)
class DecodingOptions:
    """Options of all commands that decode texts, besides the decoder.

    Args:
        backbone: Embedded name, folder or hub id, or a backbone file.
        adapter: Low-rank adapter, for a backbone given by its name.
        tokenizer: That of the backbone by default.
        batch_size: Maximum number of prompts at once.
        seed: Base seed of samplers that draw.
        device: A GPU by default, if there is one.
        dtype: Dtype of a backbone given by its name.
    """

    backbone: HFBackbone | str = "tiny"
    adapter: str | None = None
    tokenizer: str | None = None
    batch_size: PositiveInt = 16
    seed: int = 0
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


def add_decoding_arguments(parser: Parser) -> None:
    """Adds the options of a model and a decoder."""
    parser.add_class_arguments(DecodingOptions, None, sub_configs=True)
    add_decoder_arguments(parser)


def add_decoder_arguments(parser: Parser) -> None:
    """Adds the options of a decoder alone."""
    parser.add_argument("--config", action="config", help="Decode file, may be repeated.")
    parser.add_class_arguments(Decoder, None, sub_configs=True)
    parser.set_defaults({"policy": "ConfidencePolicy"})
