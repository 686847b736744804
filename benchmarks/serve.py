"""Tokens a second of concurrent clients of a server, against `generate` in one batch.

Server, clients and `generate` share a process and a model, and run in turns; as in `lit-dlm serve`,
the main thread decodes. The prompts are the same, and so must be the answers. Clients send all
requests at once, so the first decodes a step or two alone. CPU seconds count the clients', too.

    python benchmarks/serve.py
    python benchmarks/serve.py --response_length 64 --json
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import measurement
import openai
from transformers import PreTrainedTokenizerBase

import lit_dlm
from lit_dlm.backbones import HFBackbone, load_backbone, tokenizer_of
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.serve.api import Server, application
from lit_dlm.serve.engine import Engine
from lit_dlm.toy import WordProblems


@dataclass
class Clients:
    """Clients of a server that is there for their requests alone."""

    backbone: HFBackbone
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    prompts: Sequence[str]
    response_length: int

    def __call__(self) -> tuple[list[str | None], float, float]:
        """Returns the answers, and the wall and CPU seconds until the last of them."""
        number = len(self.prompts)
        engine = Engine(
            self.backbone, self.tokenizer, self.decoder, num_slots=number, max_waiting=0
        )
        length = self.response_length
        app = application(engine, "model", response_length=length, seed=0, api_key=None)
        server = Server(app, engine, welcome="")
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

        def timed() -> tuple[list[str | None], float, float]:
            begun = time.perf_counter(), time.process_time()
            try:
                texts = asyncio.run(ask(url, self.prompts))
                return texts, time.perf_counter() - begun[0], time.process_time() - begun[1]
            finally:
                engine.close()

        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(timed)
            server.run_until_closed(listening)
            return answers.result()


async def ask(url: str, prompts: Sequence[str]) -> list[str | None]:
    """Returns the answers to prompts that are sent at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=9) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="model", messages=[{"role": "user", "content": prompt}], seed=0
                )
                for prompt in prompts
            )
        )
    return [answer.choices[0].message.content for answer in answers]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints figures, or one JSON object."""
    args = measurement.options(
        __doc__,
        arguments,
        model=("tiny", "embedded name, folder or hub id"),
        clients=16,
        response_length=128,
        repeats=5,
    )
    backbone = load_backbone(args.model)
    tokenizer = tokenizer_of(backbone, args.model)
    decoder = Decoder(policy=ConfidencePolicy())
    prompts = [one.text for one in WordProblems("test", num_examples=args.clients).examples()]
    clients = Clients(backbone, tokenizer, decoder, prompts, args.response_length)
    wall: dict[str, list[float]] = {"batch": [], "clients": []}
    cpu: dict[str, list[float]] = {"batch": [], "clients": []}
    for repetition in range(args.repeats + 1):  # the first one warms up
        begun = time.perf_counter(), time.process_time()
        done = lit_dlm.generate(
            backbone,
            prompts,
            decode=decoder,
            tokenizer=tokenizer,
            response_length=args.response_length,
            batch_size=args.clients,
        )
        seconds = time.perf_counter() - begun[0], time.process_time() - begun[1]
        texts, *others = clients()
        if repetition:
            for name, (one, two) in {"batch": seconds, "clients": others}.items():
                wall[name].append(one)
                cpu[name].append(two)
    middle = {name: statistics.median(values) for name, values in wall.items()}
    num_tokens = args.clients * args.response_length
    report = {
        "batch_tokens_per_second": num_tokens / middle["batch"],
        "clients_tokens_per_second": num_tokens / middle["clients"],
        "ratio": middle["batch"] / middle["clients"],
        "ratio_of_cpu_seconds": statistics.median(cpu["batch"]) / statistics.median(cpu["clients"]),
        "equal_percent": 100
        * sum(a == b for a, b in zip(texts, done.texts, strict=True))
        / len(texts),
    }
    measurement.tell({**report, **vars(args)} if args.json else report, as_json=args.json)


if __name__ == "__main__":
    main()
