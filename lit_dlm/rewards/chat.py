"""A language model behind an HTTP endpoint that speaks the chat-completions protocol.

vLLM, SGLang and llama.cpp servers do.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

logger = logging.getLogger(__name__)


_LONGEST_PAUSE_S = 30.0


class UnavailableError(ValueError):
    """The endpoint has not answered for as long as was to be waited."""


class ChatEndpoint:
    """Asks one model for replies.

    Args:
        url: such as ``http://localhost:8000/v1/chat/completions``.
        model: its name there.
        timeout_s: seconds to wait for one reply, all of it.
        deadline_s: seconds for which an endpoint that does not answer is asked again, counted from
            its first failure behind its last reply, over all threads; 0 asks once.
        api_key_env: environment variable whose value is sent as the bearer token.
    """

    pause_s = 1.0
    """Seconds before the second attempt; twice as long before each further one, at most 30."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        timeout_s: float = 60.0,
        deadline_s: float = 0.0,
        api_key_env: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http:// or https://, got {url!r}")
        if deadline_s < 0:
            raise ValueError(f"deadline_s: expected 0 or more, got {deadline_s}")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            self.headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        self._opener = urllib.request.build_opener(_Http, _Https)
        self._silent_since: float | None = None

    def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The reply to a conversation; safe to call from several threads.

        Args:
            messages: each with ``role`` and ``content`` (a text, or parts of texts and pictures).
            **settings: sampling settings of the protocol: ``temperature``, ``max_tokens``, ...
        """
        body = {"model": self.model, **settings, "messages": list(messages)}
        reply = self._post(json.dumps(body).encode())
        try:
            return str(json.loads(reply)["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"judge: {self.url} did not reply as chat completions do") from error

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, data=body, headers=self.headers)
        pause = self.pause_s
        while True:
            begin = time.monotonic()
            try:
                with self._opener.open(request, timeout=self.timeout_s) as response:
                    reply: bytes = response.read()
            except (OSError, HTTPException) as error:
                told = f"judge: {self.url} did not answer: {error}"
                if _is_refusal(error):
                    raise ValueError(told) from error
                since = self._silent_since = self._silent_since or begin
                if time.monotonic() + pause > since + self.deadline_s:
                    raise UnavailableError(told) from error
                logger.warning("%s; trying again in %g s", told, pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._silent_since = None
                return reply


class _Bounded(urllib.request.AbstractHTTPHandler):
    """Opens addresses whose whole replies, headers too, must come within the timeout.

    A timeout of a socket alone counts for each of its reads.
    """

    def do_open(
        self, http_class: Callable[..., HTTPConnection], req: urllib.request.Request, **given: Any
    ) -> HTTPResponse:
        seconds = req.timeout
        assert seconds is not None

        def connection(*args: Any, **kwargs: Any) -> HTTPConnection:
            made = http_class(*args, **kwargs)
            made.response_class = partial(_Reply, seconds=seconds)  # type: ignore[assignment]
            return made

        return super().do_open(connection, req, **given)


class _Http(_Bounded, urllib.request.HTTPHandler):
    pass


class _Https(_Bounded, urllib.request.HTTPSHandler):
    pass


class _Reply(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, seconds))


class _Timed(io.RawIOBase):
    """What a socket receives, up to a moment."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, seconds: float) -> None:
        self.raw, self.sock, self.seconds = raw, sock, seconds
        self.end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.sock.settimeout(max(self.end - time.monotonic(), 1e-3))
        try:
            return self.raw.readinto(buffer)
        except TimeoutError as error:
            raise TimeoutError(f"no whole reply in {self.seconds:g} s") from error

    def close(self) -> None:
        self.raw.close()
        super().close()


def _is_refusal(error: Exception) -> bool:
    """Whether asking again cannot help: a client error, other than too many requests."""
    return (
        isinstance(error, urllib.error.HTTPError)
        and 400 <= error.code < 500
        and error.code not in (408, 429)
    )
