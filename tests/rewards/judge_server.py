"""A local judge whose replies follow from the request alone."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Http(ThreadingHTTPServer):
    request_queue_size = 64  # all opinions arrive at once


class JudgeServer:
    """Grades the text it is shown; refuses the first ``num_failures`` requests.

    It closes the first ``num_cut`` in the middle of the reply whose length it has announced. Each
    byte of a reply takes ``pause_s``. Refusals lead to ``location``. What ``is_bad`` gets -1 and
    not 1.
    """

    def __init__(self, is_bad: Callable[[str], bool] = lambda shown: "13" in shown.split()) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.num_failures, self.status = 0, 500
        self.num_cut = 0
        self.body: bytes | None = None
        self.location = ""
        self.pause_s = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.tokens.append(self.headers["Authorization"])
                self.send_error(404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.tokens.append(self.headers["Authorization"])
                if len(outer.requests) <= outer.num_failures:
                    self.send_response(outer.status)
                    self.send_header("Location", outer.location)
                    self.end_headers()
                    return
                content = body["messages"][1]["content"]
                text = content if isinstance(content, str) else content[-1]["text"]
                shown = text.rpartition("to check:\n")[2]
                text = f"Hm, \\boxed{{2}}? No: \\boxed{{{-1 if is_bad(shown) else 1}}}"
                reply = {"choices": [{"message": {"content": text}}]}
                data = outer.body or json.dumps(reply).encode()
                self.send_response(200)
                if len(outer.requests) <= outer.num_cut:
                    self.send_header("Content-Length", str(len(data)))
                    data = data[:20]
                with suppress(OSError):
                    self.end_headers()
                    for part in map(bytes, zip(data)) if outer.pause_s else [data]:
                        self.wfile.write(part)
                        time.sleep(outer.pause_s)

            def log_message(self, *arguments: Any) -> None: ...

        self.server = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/chat/completions"
        serve = self.server.serve_forever
        threading.Thread(target=serve, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
