"""``lit-dlm chat``: a conversation with a model whose answers are shown while they are unmasked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jsonargparse.typing import PositiveInt
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import HFBackbone
from lit_dlm.commands.generation import (
    add_decoder_arguments,
    add_decoding_arguments,
    built,
    built_decoder,
    live_canvas,
    unknown_words_hint,
)
from lit_dlm.config.files import compose
from lit_dlm.config.parser import Parser
from lit_dlm.decoding import Decoder
from lit_dlm.decoding.caches import NoCache
from lit_dlm.generation import generate
from lit_dlm.system.terminal import PlainConsole

HELP = """\
/policy NAME    decode as configs/decode/NAME says (or another file), such as threshold_09
/cache NAME     reuse forwards as configs/decode/cache/NAME says (prefix, dual, block), or none
/length N       cells of an answer
/new            forget the conversation
/help, /quit"""


@dataclass
class Chat:
    """A conversation and how its answers are decoded; every turn has its own noise."""

    backbone: HFBackbone
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    response_length: int
    seed: int
    console: Console
    messages: list[dict[str, str]] = field(default_factory=list)
    num_turns: int = 0

    def turn(self, line: str) -> bool:
        """Executes a command or answers a message; returns whether the conversation continues."""
        if not line.startswith("/"):
            self._answer(line)
            return True
        command, _, value = line[1:].partition(" ")
        try:
            return self._obey(command, value.strip())
        except ValueError as error:
            self._say(" ".join(str(error).split()), "red")
        except SystemExit:  # the parser has printed why
            pass
        return True

    def _obey(self, command: str, value: str) -> bool:
        decoder = self.decoder
        if command == "policy" and value:
            decoder = _decoder("--config", _file(value, "decode"))
            # Policies and caches are chosen apart: a file without a cache leaves the one in use.
            if not decoder.cache.keeps:
                decoder = decoder.replace(cache=self.decoder.cache)  # keep the previous one
        elif command == "cache" and value == "none":
            decoder = decoder.replace(cache=NoCache())
        elif command == "cache" and value:
            cache = _decoder("--cache", _file(value, "decode/cache")).cache
            decoder = decoder.replace(cache=cache)
        elif command == "length" and value.isdigit() and int(value):
            self.response_length = int(value)
        elif command == "new":
            self.messages = []
        elif command in ("quit", "exit"):
            return False
        else:
            known = command in ("help", "policy", "cache", "length")
            self._say(HELP if known else f"unknown command '/{command}'\n{HELP}")
            return True
        # Before it replaces the decoder that works: a mistake leaves the chat as it was.
        decoder.on(self.backbone.spec).check(self.backbone)
        self.decoder = decoder
        self._say(
            f"{type(decoder.policy).__name__}, {type(decoder.cache).__name__}, "
            f"{self.response_length} cells, {len(self.messages)} messages before"
        )
        return True

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        # Counted also where the answer fails: the number is the seed's, and it is drawn anew.
        self.num_turns += 1
        begun = time.perf_counter()
        try:
            with live_canvas(self.console, self.tokenizer) as observers:
                done = generate(
                    self.backbone,
                    [self.messages],
                    decode=self.decoder,
                    tokenizer=self.tokenizer,
                    response_length=self.response_length,
                    seed=self.seed,
                    uids=[str(self.num_turns)],
                    observers=observers,
                )
        except (ValueError, KeyboardInterrupt) as error:
            self.messages.pop()  # so that the message can be sent again
            self._say(" ".join(str(error).split()) or "interrupted", "red")
            return
        seconds = time.perf_counter() - begun
        self.messages.append({"role": "assistant", "content": done.texts[0]})
        self.console.print(done.texts[0], highlight=False, soft_wrap=True)
        steps, tokens = done.num_steps[0], len(done.ids[0])
        self._say(
            f"{tokens} tokens in {steps} steps ({tokens / steps:.1f} a step), "
            f"{tokens / seconds:.1f} tokens/s"
        )
        if hint := unknown_words_hint(self.tokenizer, text):
            self._say(hint, "yellow")

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = Parser(
        prog="lit-dlm chat",
        description="Chats with a model. Answers are shown while they are unmasked, then their "
        "steps and tokens per second; /help lists what changes the decoder on the way.",
    )
    parser.add_argument("--response_length", type=PositiveInt, default=128, help="Cells to fill.")
    add_decoding_arguments(parser)
    config = parser.parse_composed(compose(arguments))
    console = PlainConsole()
    chat = Chat(*built(parser, config), config.response_length, config.seed, console)
    for line in _lines(console):
        if line and not chat.turn(line):
            break
    return 0


def _lines(console: Console) -> Iterator[str]:
    if not (console.is_terminal and sys.stdin.isatty()):
        yield from map(str.strip, sys.stdin)
        return
    console.print(HELP, style="dim", highlight=False)
    while True:
        try:
            yield console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return


def _file(name: str, folder: str) -> str:
    return name if "/" in name or name.endswith(".yaml") else f"{folder}/{name}.yaml"


def _decoder(*options: str) -> Decoder:
    parser = Parser(prog="lit-dlm chat")
    add_decoder_arguments(parser)
    return built_decoder(parser.instantiate(parser.parse_composed(compose(options))))
