"""Tokens a second of concurrent clients of a server, against `generate` in one batch.

Server, clients and `generate` share one process, a model and its threads, and run in turns. The
prompts are the same, and so must be the answers. Clients send all requests at once, so the first
decodes a step or two alone. CPU seconds count what the clients do, too.

    python benchmarks/serve.py
    python benchmarks/serve.py --response_length 64 --json
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import measurement
import openai

import lit_dlm
from lit_dlm.backbones import load_backbone, tokenizer_of
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.serve.api import Server, application
from lit_dlm.serve.engine import Engine
from lit_dlm.toy import WordProblems


@contextmanager
def serving(engine: Engine, model: str, response_length: int) -> Iterator[str]:
    """Serves in threads of this process; yields where."""
    app = application(engine, model, response_length=response_length, seed=0, api_key=None)
    server = Server(app, engine, welcome="")
    listening = socket.create_server(("127.0.0.1", 0))
    thread = Thread(target=server.run_until_closed, args=(listening,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        engine.close()
        thread.join()


async def ask(
    url: str, model: str, prompts: Sequence[str]
) -> list[openai.types.chat.ChatCompletion]:
    """Returns the answers to prompts that are sent at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": prompt}], seed=0
                )
                for prompt in prompts
            )
        )


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
    engine = Engine(backbone, tokenizer, decoder, num_slots=args.clients, max_waiting=0)

    def batch() -> lit_dlm.Generations:
        return lit_dlm.generate(
            backbone,
            prompts,
            decode=decoder,
            tokenizer=tokenizer,
            response_length=args.response_length,
            batch_size=args.clients,
        )

    with serving(engine, args.model, args.response_length) as url:
        runs = {"batch": batch, "clients": lambda: asyncio.run(ask(url, args.model, prompts))}
        texts = [
            answer.choices[0].message.content
            for answer in asyncio.run(ask(url, args.model, prompts))
        ]
        done = batch()
        wall = measurement.in_turns(runs, args.repeats, time.perf_counter)
        cpu = measurement.in_turns(runs, args.repeats, measurement.clock)
    num_tokens = args.clients * args.response_length
    report = {
        "batch_tokens_per_second": num_tokens / wall["batch"],
        "clients_tokens_per_second": num_tokens / wall["clients"],
        "ratio": wall["batch"] / wall["clients"],
        "ratio_of_cpu_seconds": cpu["batch"] / cpu["clients"],
        "equal_percent": 100
        * sum(a == b for a, b in zip(texts, done.texts, strict=True))
        / len(texts),
    }
    measurement.tell({**report, **vars(args)} if args.json else report, as_json=args.json)


if __name__ == "__main__":
    main()
