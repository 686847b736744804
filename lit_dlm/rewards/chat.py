"""A language model behind an HTTP endpoint that speaks the chat-completions protocol.

vLLM, SGLang and llama.cpp servers do. Nothing is sent anywhere unless a configuration names an
endpoint.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

logger = logging.getLogger(__name__)


class ChatEndpoint:
    """Asks one model for replies.

    Args:
        url: the endpoint, such as ``http://localhost:8000/v1/chat/completions``.
        model: name of the model to ask.
        timeout_s: seconds to wait for one reply.
        num_attempts: how often to ask before an endpoint that does not answer is an error.
        pause_s: seconds to wait before the second attempt; twice as long before each further one.

    Raises:
        ValueError: for a URL of another scheme, or no attempt.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        timeout_s: float = 60.0,
        num_attempts: int = 1,
        pause_s: float = 1.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http:// or https://, got {url!r}")
        if num_attempts < 1:
            raise ValueError(f"num_attempts: expected at least 1, got {num_attempts}")
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self.num_attempts = num_attempts
        self.pause_s = pause_s

    def ask(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> str:
        """Asks once; safe to call from several threads.

        Args:
            messages: the conversation, each with ``role`` and ``content``.
            **settings: sampling settings of the protocol: ``temperature``, ``max_tokens``, ...

        Returns:
            The text of the reply.

        Raises:
            ValueError: naming the endpoint, if it cannot be reached, refuses or replies otherwise
                than the protocol says.
        """
        body = {"model": self.model, **settings, "messages": list(messages)}
        reply = self._post(json.dumps(body).encode())
        try:
            return str(json.loads(reply)["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"judge: {self.url} did not reply as chat completions do") from error

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(
            self.url, data=body, headers={"Content-Type": "application/json"}
        )
        for attempt in range(1, self.num_attempts + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return bytes(response.read())
            except (OSError, HTTPException) as error:
                if attempt == self.num_attempts or _is_refusal(error):
                    raise ValueError(f"judge: {self.url} did not answer: {error}") from error
                logger.warning("judge: %s did not answer: %s; trying again", self.url, error)
                time.sleep(self.pause_s * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")


def _is_refusal(error: Exception) -> bool:
    """Whether asking again cannot help: a client error, other than too many requests."""
    return (
        isinstance(error, urllib.error.HTTPError)
        and 400 <= error.code < 500
        and error.code not in (408, 429)
    )
