"""A local imitation of the hub's API, as far as pushing to it and loading from it needs."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_COMMIT = "0" * 40


class HubServer:
    """Keeps what is committed, in memory: ``files`` of each repository by their paths."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = self.headers["Content-Length"]
                body = self.rfile.read(int(size)) if size else _chunks(self.rfile)
                self.answer(outer.changed(self.path, body))

            def do_GET(self) -> None:
                repo = re.fullmatch(r"/api/models/(.+?)/(revision|tree)/\w+.*", self.path)
                file = re.fullmatch(r"/(.+?/.+?)/resolve/\w+/(.+)", self.path)
                files = outer.files.get((repo or file or [""] * 2)[1])
                if files is None:
                    self.send_error(404)
                elif file:
                    self.answer(files[file[2]])
                else:
                    assert repo
                    self.answer(_listed(repo[1], repo[2] == "tree", files))

            def do_HEAD(self) -> None:
                self.do_GET()

            def answer(self, found: Any) -> None:
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", _COMMIT)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = self.server.serve_forever
        threading.Thread(target=serve, args=(0.01,), daemon=True).start()

    def changed(self, path: str, body: bytes) -> dict[str, Any]:
        """What a request that writes is answered."""
        if path.endswith("/create"):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.files[name] = {}
            # Newer clients name the kind.
            self.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return {"url": f"{self.url}/{name}"}
        if "/preupload/" in path:
            named = [one["path"] for one in json.loads(body)["files"]]
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": one, **kind} for one in named]}
        if "/commit/" in path:
            repo = path.split("/api/models/")[1].split("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[repo][value["path"]] = base64.b64decode(value["content"])
            return {"commitOid": _COMMIT, "commitUrl": f"{self.url}/{repo}/commit/{_COMMIT}"}
        return {}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _listed(name: str, is_tree: bool, files: dict[str, bytes]) -> Any:
    """What a repository holds: its information, or the tree of its files."""
    if not is_tree:
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "sha": _COMMIT, "siblings": siblings}
    return [
        {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }
        for path, data in files.items()
    ]


def _chunks(stream: Any) -> bytes:
    """A body that comes in chunks, each behind its size."""
    found = b""
    while size := int(stream.readline(), 16):
        found += stream.read(size)
        stream.readline()
    return found
