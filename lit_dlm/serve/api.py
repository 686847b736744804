"""OpenAI's interface to an engine, for its clients and for all that speak like them."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from secrets import compare_digest
from types import FrameType
from typing import Any, Literal, Self, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import StarletteHTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from lit_dlm.decoding.api import DecodePrompt, cut_at
from lit_dlm.generation import Prompt, token_ids
from lit_dlm.serve.engine import Ended, Engine, Row, Settings, UnavailableError
from lit_dlm.tensors.sampling import sample_seed

logger = logging.getLogger(__name__)
_MOST_BYTES = 4 * 2**20  # of a request
_HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_CODES = {401: "invalid_api_key", 404: "not_found", 503: "unavailable"}


class Part(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part]

    def turn(self) -> dict[str, str]:
        given = self.content
        text = given if isinstance(given, str) else "".join(part.text for part in given)
        return {"role": self.role, "content": text}


class Body(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    """What both kinds of requests have; OpenAI's other options are refused unless they are off."""

    model: str
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    trajectory: bool = False  # how every token was written, too

    @model_validator(mode="after")
    def _refuse_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value and name not in _HARMLESS:
                raise ValueError(f"{name}: this server does not have it")
        return self


class Chat(Body):
    """A request for the next turn of a chat."""

    messages: list[Message] = Field(min_length=1)


class Completion(Body):
    """A request to go on after texts or token ids, to which no template is applied."""

    prompt: str | list[int] | list[str] | list[list[int]]


class Reply:
    """The answer to one request, whole or in pieces."""

    def __init__(
        self, kind: str, body: Body, prompts: Sequence[list[int]], settings: Settings, seed: int
    ) -> None:
        self._kind, self._body, self._prompts, self._seed = kind, body, prompts, seed
        self._stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._id, self._created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self._told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._num_tokens = self._num_steps = 0
        self._loop = asyncio.get_running_loop()
        # Named as in ``generate``, so that a seed gives what it gives there.
        self.rows = [
            Row(
                prompt=DecodePrompt(str(number), ids, sample_seed(seed, str(number))),
                settings=settings,
                tell=partial(self._hear, number),
                is_streamed=body.stream,
                is_recorded=body.trajectory,
            )
            for number, ids in enumerate(ids for ids in prompts for _ in range(body.n))
        ]

    def _hear(self, number: int, event: str | Ended | UnavailableError) -> None:
        self._loop.call_soon_threadsafe(self._told.put_nowait, (number, event))

    async def _events(self) -> AsyncIterator[tuple[int, str | Ended]]:
        """Yields what rows are told until all have ended; who leaves earlier gives them up."""
        begun, num_left = time.monotonic(), len(self.rows)
        try:
            while num_left:
                number, event = await self._told.get()
                if isinstance(event, UnavailableError):
                    raise event
                num_left -= isinstance(event, Ended)
                yield number, event
        finally:
            for row in self.rows:
                row.is_gone = True
            what = self._kind, self._num_tokens, self._num_steps, time.monotonic() - begun
            end = f", {num_left} responses given up" if num_left else ""
            logger.info("%s: %d tokens in %d steps, %.2f s%s", *what, end)

    async def whole(self) -> dict[str, Any]:
        ends = {number: self._ending(end) async for number, end in self._events()}
        choices = [self._choice(number, *ends[number]) for number in sorted(ends)]
        return self._page(choices, **self._usage())

    async def pieces(self) -> AsyncIterator[str]:
        """Yields server-sent events: texts as they become final, no part of them twice."""
        sent: dict[int, str] = {}
        try:
            async for number, event in self._events():
                text, end = self._ending(event)
                before = sent.get(number, "")
                if end or (len(text) > len(before) and text.startswith(before)):
                    choice = self._choice(number, text[len(before) :], end, number not in sent)
                    sent[number] = text
                    yield _data(self._page([choice]))
            if (self._body.stream_options or {}).get("include_usage"):
                yield _data(self._page([], **self._usage()))
            yield "data: [DONE]\n\n"
        except UnavailableError as error:  # the status was sent already
            yield _data(_problem(503, str(error)))

    def _ending(self, event: str | Ended) -> tuple[str, dict[str, Any]]:
        """Returns the text that a client may have by now, and what is said of its end, if it is."""
        if isinstance(event, str):
            return _settled(event, self._stops), {}
        done, result, place = event.rows.responses, event.rows.result, event.place
        tokens, num_steps = result.ids[place, result.start :], int(result.num_steps[place])
        self._num_tokens += done.num_tokens[place]
        self._num_steps += num_steps
        text = cut_at(done.texts[place], self._stops)
        is_full = done.num_tokens[place] == len(tokens) or result.status[place] == "step_limit"
        reason = "length" if is_full and text == done.texts[place] else "stop"
        end: dict[str, Any] = {"finish_reason": reason, "steps": num_steps}
        if self._body.trajectory:
            # JSON has no NaN: nothing was drawn, or written.
            log_probs, steps = (
                [x if x == x else None for x in row] for row in event.writes.T.tolist()
            )
            end["trajectory"] = {"tokens": tokens.tolist(), "log_probs": log_probs, "steps": steps}
        return text, end

    def _choice(
        self, number: int, text: str, end: dict[str, Any], is_first: bool = True
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self._kind == "chat.completion":
            role = {"role": "assistant"} if is_first else {}
            said = {"delta" if self._body.stream else "message": {**role, "content": text}}
        return {"index": number, "finish_reason": None, "logprobs": None, **said, **end}

    def _page(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = self._kind + ".chunk" * (self._body.stream and self._kind == "chat.completion")
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}
        return {**head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        given, made = sum(map(len, self._prompts)), self._num_tokens
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return {"usage": usage, "forwards": self._num_steps, "seed": self._seed}


def _settled(text: str, stops: Sequence[str]) -> str:
    """Returns what later tokens cannot change of the text of the first ones."""
    if (cut := cut_at(text, stops)) != text:
        return cut
    # A stop may have begun, and so may a character of several tokens.
    held = max(map(len, stops), default=1) - 1
    return text[: max(len(text) - held, 0)].rstrip("\ufffd")


def _data(page: dict[str, Any]) -> str:
    return f"data: {json.dumps(page)}\n\n"


def _problem(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    problem = {"message": message, "type": kind, "param": None, "code": _CODES.get(status)}
    return {"error": problem}


async def _refuse(_: Request, error: Exception) -> Response:
    """Answers with OpenAI's error object."""
    status, message = 500, "the server has failed; its log says why"
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, ValueError | UnavailableError):
        status, message = 400 if isinstance(error, ValueError) else 503, str(error)
    return JSONResponse(_problem(status, " ".join(message.split())), status)


B = TypeVar("B", bound=Body)


async def _read(request: Request, kind: type[B]) -> B:
    # Web pages cannot send this type to other servers unasked.
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Content-Type: expected application/json")
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > _MOST_BYTES:
            raise HTTPException(413, f"body: expected at most {_MOST_BYTES} bytes")
    try:
        return kind.model_validate_json(bytes(read))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":  # one of ours
            raise first["ctx"]["error"] from None
        where = ".".join(map(str, first["loc"])) or "body"
        has_value = first["type"] not in ("missing", "json_invalid")
        got = f", got {first['input']!r:.80}" if has_value else ""
        raise ValueError(f"{where}: {first['msg']}{got}") from None


class Meter(Collector):
    """What Prometheus reads of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for name in ("requests", "tokens", "forwards"):
            number = getattr(self._engine, f"num_{name}")
            yield CounterMetricFamily(f"lit_dlm_{name}", f"All {name} so far", value=number)
        for name in ("waiting", "running"):
            rows = getattr(self._engine, name)
            yield GaugeMetricFamily(f"lit_dlm_{name}", f"Responses {name}", value=len(rows))


def application(
    engine: Engine, model: str, *, response_length: int, seed: int, api_key: str | None
) -> FastAPI:
    """Returns the application that answers for a model; ``seed`` is for requests without one."""
    seeds, registry = Random(seed), CollectorRegistry()
    registry.register(Meter(engine))

    def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        is_right = not api_key or compare_digest(given, f"Bearer {api_key}".encode())
        if not is_right and request.url.path != "/health":
            raise HTTPException(401, "Authorization: expected 'Bearer' and the key of this server")

    app = FastAPI(openapi_url=None, dependencies=[Depends(authorise)])
    # Whoever has left hears nothing, but the log would have a traceback.
    for kind in (StarletteHTTPException, ValueError, UnavailableError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _refuse)

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):  # no turn of a chat
            return list(engine.tokenizer(prompt)["input_ids"])
        return token_ids(0, prompt, engine.tokenizer) if prompt else []

    async def answer(
        request: Request, kind: str, body: Body, prompts: Sequence[Prompt]
    ) -> Response:
        if body.model != model:
            raise HTTPException(404, f"model: expected {model!r}, got {body.model!r}")
        if (number := len(prompts) * body.n) > engine.size:
            raise ValueError(f"n: expected at most {engine.size} responses, got {number}")
        length = body.max_completion_tokens or body.max_tokens or response_length
        settings = Settings(length, body.temperature, body.top_p)
        # In threads: a long text or a template may take seconds.
        encoded = [await asyncio.to_thread(encode, prompt) for prompt in prompts]
        for ids in encoded:
            engine.check(ids, settings)
        seed = seeds.getrandbits(32) if body.seed is None else body.seed
        reply = Reply(kind, body, encoded, settings, seed)
        engine.put(reply.rows)
        if body.stream:
            return StreamingResponse(reply.pieces(), media_type="text/event-stream")
        # After the body, all that is received is that the client has gone.
        done, gone = map(asyncio.ensure_future, (reply.whole(), request.receive()))
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        has_ended = done.done()
        for task in (done, gone):
            task.cancel()
        return JSONResponse(done.result()) if has_ended else Response(status_code=499)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _read(request, Chat)
        return await answer(request, "chat.completion", body, [[m.turn() for m in body.messages]])

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await _read(request, Completion)
        given: Any = body.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            given = [given]
        return await answer(request, "text_completion", body, given)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        one = {"id": model, "object": "model", "created": 0, "owned_by": "lit-dlm"}
        return {"object": "list", "data": [one]}

    @app.get("/health")
    def health() -> dict[str, str]:
        if engine.is_closed:
            raise UnavailableError("the server ends")
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


class Server(uvicorn.Server):
    """Listens for an engine; a first signal lets running answers end, a second one does not."""

    def __init__(self, app: FastAPI, engine: Engine, welcome: str) -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._engine, self._welcome = engine, welcome

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(self._welcome)
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = self._engine.is_closed
        self._engine.close()

    def run_until_closed(self, listening: socket.socket) -> None:
        """Listens in a thread; decodes in this one, whose allocator keeps the memory of a step."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
        with ThreadPoolExecutor(1) as threads:
            listener = threads.submit(self.run, [listening])
            listener.add_done_callback(lambda _: self._engine.close())
            try:
                self._engine.run()
            finally:
                self.should_exit = True
            listener.result()  # raises why it could not listen
