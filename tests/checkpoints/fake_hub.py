"""A hub on 127.0.0.1: what huggingface_hub asks for, answered from folders, with a count of the bytes that left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Serves ``root/owner/name`` folders; every repository has one commit, the hash of its id."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sent: Counter[str] = Counter()
        """owner/name/file -> bytes of content sent."""
        self.ranges = True
        self.url = ""

    @staticmethod
    def commit(repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()

    def files(self, repository: str) -> dict[str, Path]:
        folder = self.root / repository
        return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def weights_sent(self) -> int:
        return sum(count for name, count in self.sent.items() if name.endswith(".safetensors"))


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        with contextlib.suppress(ConnectionError):  # a client that has read enough leaves
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self.api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.lost()

    def lost(self, code: str = "RepoNotFound") -> None:
        self.answer(404, b"{}", X_Error_Code=code, X_Error_Message="not here")

    def api(self, repository: str, rest: list[str]) -> None:
        files = self.hub.files(repository)
        if not files:
            return self.lost()
        if len(rest) > 1 and rest[1] not in ("main", self.hub.commit(repository)):
            return self.lost("RevisionNotFound")
        if rest[:1] == ["tree"]:
            value: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": self.tag(path)}
                for name, path in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in files.items()]
            value = {"id": repository, "sha": self.hub.commit(repository), "siblings": siblings, "tags": []}
        return self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def tag(self, path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()

    def resolve(self, repository: str, revision: str, name: str) -> None:
        path = self.hub.files(repository).get(name)
        if path is None or revision not in ("main", self.hub.commit(repository)):
            return self.lost("EntryNotFound")
        content = path.read_bytes()
        headers = {
            "X_Repo_Commit": self.hub.commit(repository),
            "ETag": f'"{self.tag(path)}"',
            "Accept_Ranges": "bytes",
        }
        asked = self.headers.get("range")
        status = 200
        if asked and self.hub.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or len(content)) + 1, len(content))
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        if self.command != "HEAD":
            self.hub.sent[f"{repository}/{name}"] += len(content)
        return self.answer(status, content, **headers)


@contextmanager
def serving(root: Path) -> Iterator[FakeHub]:
    """Run a hub over ``root`` while the block lasts."""
    hub = FakeHub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
