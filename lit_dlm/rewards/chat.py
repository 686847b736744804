"""A language model behind an HTTP endpoint of chat completions (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
import urllib.request
from concurrent.futures import Future
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from lit_dlm.system.options import at_least, one_of

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
_LARGEST = 16 << 20
"""Bytes that an endpoint may send for one reply, headers included."""


class UnavailableError(ValueError):
    """The endpoint did not answer within the deadline."""


class ChatEndpoint:
    """Asks one model for replies.

    Args:
        url: such as ``http://localhost:8000/v1/chat/completions``.
        model: its name at the endpoint.
        timeout_s: seconds to wait for one complete reply.
        deadline_s: seconds for which requests are retried while the endpoint does not answer,
            counted over all threads from its first failure after its last reply; 0 asks once.
        api_key_env: environment variable whose value is sent as the bearer token.
    """

    # Seconds before the second attempt; doubled before each further one, up to 30 s.
    pause_s = 1.0

    def __init__(
        self,
        url: str,
        *,
        model: str,
        timeout_s: float = 60.0,
        deadline_s: float = 600.0,
        api_key_env: str | None = None,
    ) -> None:
        at_least(0, deadline_s=deadline_s)
        one_of("http", "https", url=urlsplit(url).scheme)
        self.headers = {"Content-Type": "application/json"}
        if api_key_env:
            if not (token := os.environ.get(api_key_env)):
                raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
            self.headers["Authorization"] = f"Bearer {token}"
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._silent_since: float | None = None
        self._opener = urllib.request.build_opener(_Bounded)

    def ask(self, instruction: str, question: str | list[dict[str, Any]], **settings: Any) -> str:
        """Returns the reply to a system and a user turn; thread-safe.

        ``settings`` are the protocol's, such as those of sampling.
        """
        turns = [("system", instruction), ("user", question)]
        messages = [{"role": role, "content": content} for role, content in turns]
        body = {"model": self.model, **settings, "messages": messages}
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
                reply = self._read(request)
            except (OSError, HTTPException) as error:
                message = f"judge: {self.url} did not answer: {error}"
                # Retrying helps after timeouts or too many requests, not after other client errors.
                status = getattr(error, "code", 0)
                if 300 <= status < 500 and status not in (408, 429):
                    raise ValueError(message) from error
                # Counted over all threads: with a deadline for each question, a dead server would
                # hold up a run for as many deadlines as there are questions.
                since = self._silent_since = self._silent_since or begin
                if time.monotonic() + pause > since + self.deadline_s:
                    raise UnavailableError(message) from error
                logger.warning("%s; trying again in %g s", message, pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._silent_since = None
                return reply

    def _read(self, request: urllib.request.Request) -> bytes:
        reply = Future[bytes]()

        def fetch() -> None:
            try:
                with self._opener.open(request, timeout=self.timeout_s) as response:
                    # Without a limit this would take as much memory as the headers announce.
                    body = response.read(_LARGEST)
                    if response.length and len(body) < _LARGEST:  # closed before its end
                        raise IncompleteRead(body, response.length)
                    reply.set_result(body)
            except (OSError, HTTPException, ValueError) as error:
                if isinstance(error, HTTPError):
                    error.close()
                reply.set_exception(error)

        # Name resolution has no timeout, so the thread may have to be abandoned.
        threading.Thread(target=fetch, daemon=True).start()
        try:
            return reply.result(self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no whole reply in {self.timeout_s:g} s") from None


class _BoundedStream(io.RawIOBase):
    """Reads whatever an endpoint sends, for a limited time and up to a limited size.

    A socket's timeout applies to each read, so a reply that only trickles in would escape it.
    """

    def __init__(self, stream: io.RawIOBase, seconds: float) -> None:
        self._stream, self._end, self._left = stream, time.monotonic() + seconds, _LARGEST

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any) -> int | None:
        size = self._stream.readinto(buffer)
        self._left -= size or 0
        if self._left < 0:
            raise ValueError(f"judge: a reply has more than {_LARGEST >> 20} MiB")
        if time.monotonic() > self._end:
            raise TimeoutError
        return size


class _BoundedResponse(HTTPResponse):
    def __init__(self, sock: Any, *rest: Any, **options: Any) -> None:
        super().__init__(sock, *rest, **options)
        stream: Any = self.fp
        self.fp = io.BufferedReader(_BoundedStream(stream.detach(), sock.gettimeout()))


class _Bounded(
    urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler
):
    def do_open(self, http_class: Any, *rest: Any, **options: Any) -> HTTPResponse:
        kind: Any = type(http_class.__name__, (http_class,), {"response_class": _BoundedResponse})
        return super().do_open(kind, *rest, **options)

    def redirect_request(self, *_: Any) -> None:
        """Follows no redirect: the token is only for the host that was named."""
