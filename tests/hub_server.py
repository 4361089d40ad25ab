"""A local server that speaks what Hugging Face's clients ask of the hub for one data set: information and files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40


@contextmanager
def hub(repository: str, files: Mapping[str, bytes], asked: list[str]) -> Iterator[str]:
    """Serve the files of a data set `owner/name`; `asked` gets every request. Other names are not found."""
    information = {
        "_id": "1",
        "id": repository,
        "author": repository.split("/")[0],
        "sha": COMMIT,
        "lastModified": "2026-01-01T00:00:00.000Z",
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [{"rfilename": name} for name in files],
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            kind = self.headers.get("Content-Type", "")
            wanted = json.loads(raw)["paths"] if "json" in kind else parse_qs(raw).get("paths", [])
            path = urlsplit(self.path).path
            asked.append(f"POST {path}")
            if path == f"/api/datasets/{repository}/paths-info/{COMMIT}":
                self.send(json.dumps([entry for entry in tree() if entry["path"] in wanted]).encode())
            else:
                self.missing()

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            base = f"/api/datasets/{repository}"
            if path in (base, f"{base}/revision/main", f"{base}/revision/{COMMIT}"):
                return self.send(json.dumps(information).encode(), body=body)
            if path.startswith(f"{base}/tree/"):
                under = path.removeprefix(f"{base}/tree/").partition("/")[2]
                return self.send(json.dumps(children(under)).encode(), body=body)
            for revision in ("main", COMMIT):
                name = path.removeprefix(f"/datasets/{repository}/resolve/{revision}/")
                if name in files:
                    return self.send(files[name], body=body, kind="application/octet-stream")
            self.missing(body=body)

        def missing(self, *, body: bool = True) -> None:
            known = f"/{repository}" in self.path
            code = "EntryNotFound" if known else "RepoNotFound"
            self.send(b'{"error": "not found"}', status=404, body=body, more={"X-Error-Code": code})

        def send(
            self,
            raw: bytes,
            *,
            status: int = 200,
            body: bool = True,
            kind: str = "application/json",
            more: Mapping[str, str] | None = None,
        ) -> None:
            self.send_response(status)
            digest = hashlib.sha256(raw).hexdigest()
            headers = {"Content-Type": kind, "Content-Length": str(len(raw)), "X-Repo-Commit": COMMIT}
            for name, value in {**headers, "ETag": f'"{digest}"', **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    def tree() -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
            for name, raw in files.items()
        ]

    def children(under: str) -> list[dict[str, Any]]:
        """List the files and folders right below a folder."""
        prefix = f"{under}/" if under else ""
        below = [entry for entry in tree() if entry["path"].startswith(prefix)]
        direct = [entry for entry in below if "/" not in entry["path"].removeprefix(prefix)]
        names = {entry["path"].removeprefix(prefix).split("/")[0] for entry in below if entry not in direct}
        return direct + [{"type": "directory", "path": prefix + name, "oid": COMMIT} for name in sorted(names)]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
