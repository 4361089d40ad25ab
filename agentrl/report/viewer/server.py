"""The viewer's server: a few read-only addresses over the files of runs, for this machine alone.

    browser ──GET──> Guard (host, method, headers) ──> page and assets (static/)
                                                  └──> /api/... : JSON from runs.py and queries.py, in threads
                     <──events── one line whenever a run has written something

Everything that a model or a tool wrote goes out as JSON and is shown as text. The page may load nothing from elsewhere
and run no script but its own. A request that names another host is refused: a page elsewhere could otherwise read this
one by giving its own name this machine's address.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import AgentRLError
from agentrl.report.viewer import queries
from agentrl.report.viewer.runs import RunView, find, shared

T = TypeVar("T")
STATIC = Path(__file__).parent / "static"
ASSETS = {
    "app.js": "text/javascript",
    "views.js": "text/javascript",
    "charts.js": "text/javascript",
    "style.css": "text/css",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "vendor/htm-preact.umd.js": "text/javascript",
}
"""The files that are served: these, and no others."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
BEAT_S = 1.0
"""Least seconds between two looks at a run's files."""
SHARE = 0.007
"""Share of the machine that answers to updates may take, so that the whole server stays under a hundredth: where an
update costs much, the next one waits."""
LONGEST_S = 60.0
"""Most seconds that an update waits for it."""
PATIENCE_S = 0.5
"""How long opening a run may take before its page is shown; the rest of a long one comes in afterwards."""


class Runs:
    """The runs of some folders, opened as they are asked for."""

    def __init__(self, paths: Sequence[Path], *, cache: Path | None = None) -> None:
        self.paths, self._cache = list(paths), cache
        self._views: dict[Path, RunView] = {}
        self.spent = 0.0
        """Processor seconds that answers took."""
        self._lock = threading.Lock()

    def timed(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and count what it costs."""
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self.spent += time.thread_time() - began

    def all(self) -> list[RunView]:
        """Return the runs that are there now; new ones appear by themselves."""
        for name, path in find(self.paths).items():
            if path not in self._views:
                self._views[path] = RunView(path, name, cache=self._cache, patience=PATIENCE_S)
        return [view for view in self._views.values() if view.path.is_dir()]

    def get(self, name: str) -> RunView:
        """Return one run."""
        for view in self._views.values():
            if view.name == name:
                return view
        for view in self.all():
            if view.name == name:
                return view
        raise KeyError(name)

    def close(self) -> None:
        """Close every run."""
        for view in self._views.values():
            view.close()


class Guard:
    """Refuses what a browser on this machine would not send, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.hosts:
            await Response("this address is not served here\n", status_code=421)(scope, receive, guarded)
        elif scope["method"] not in ("GET", "HEAD"):
            await Response("read only\n", status_code=405)(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def app(runs: Runs, *, hosts: Sequence[str] = (), redteam: Path | None = None) -> ASGIApp:
    """Return the whole server. `hosts` are names it may be called by, besides those of this machine itself."""

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return Response("not found\n", status_code=404)
        return FileResponse(STATIC / name, media_type=f"{ASSETS[name]}; charset=utf-8")

    def answer(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                value = await run_in_threadpool(runs.timed, function, request)
            except KeyError as error:
                return _json({"error": f"there is no {error.args[0]}"}, 404)
            except AgentRLError as error:
                return _json({"error": str(error)}, 400)
            return _json(value) if value is not None else _json({"error": "it is no longer there"}, 404)

        return endpoint

    def run(request: Request) -> RunView:
        return runs.get(request.path_params["run"])

    def listing(request: Request) -> Any:
        return {"runs": [view.summary() for view in runs.all()], "redteam": redteam is not None}

    def overview(request: Request) -> Any:
        names = [name for name in request.query_params.get("curves", "").split(",") if name]
        return run(request).overview(names)

    def rows(request: Request) -> Any:
        filters = {name: request.query_params.get(name, "") for name in queries.FILTERS}
        page = request.query_params.get("page", "0")
        number = int(page) if page.isdigit() else 0
        return queries.browse(run(request).index, filters, sort=request.query_params.get("sort", ""), page=number)

    def one(request: Request) -> Any:
        return run(request).trajectory(request.path_params["key"], full=request.query_params.get("full") == "1")

    def common(request: Request) -> Any:
        return shared(run(request), runs.get(request.path_params["other"]))

    def attacks(request: Request) -> Any:
        return json.loads(redteam.read_text(encoding="utf-8")) if redteam else None

    async def events(request: Request) -> Response:
        try:
            view = await run_in_threadpool(runs.get, request.path_params["run"])
        except KeyError as error:
            return _json({"error": f"there is no {error.args[0]}"}, 404)
        return StreamingResponse(_changes(runs, view, request), media_type="text/event-stream")

    base = "/api/run/{run}"
    routes = [
        Route("/", page),
        Route("/static/{name:path}", asset),
        Route("/api/runs", answer(listing)),
        Route("/api/redteam", answer(attacks)),
        Route(f"{base}/overview", answer(overview)),
        Route(f"{base}/curriculum", answer(lambda request: queries.curriculum(run(request).index))),
        Route(f"{base}/facets", answer(lambda request: queries.facets(run(request).index))),
        Route(f"{base}/rows", answer(rows)),
        Route(f"{base}/one/{{key}}", answer(one)),
        Route(f"{base}/task", answer(lambda r: queries.of_task(run(r).index, r.query_params.get("task", "")))),
        Route(f"{base}/shared/{{other}}", answer(common)),
        Route(f"{base}/events", events),
    ]
    own = frozenset({"127.0.0.1", "localhost", "[::1]", *(host.lower() for host in hosts)})
    return Guard(Starlette(routes=routes), own)


async def _changes(runs: Runs, view: RunView, request: Request) -> AsyncIterator[bytes]:
    """Yield an event when the run has written something, and a comment now and then to keep the line open.

    What an event makes pages ask for costs processor time, which a trainer may need: the next one comes when all of it
    is no more than SHARE of the machine's. Opening a long run does not wait.
    """
    before, told, spoke, spent = None, -math.inf, time.monotonic(), runs.spent
    while not await request.is_disconnected():
        now = time.monotonic()
        rest = min(LONGEST_S, (runs.spent - spent) / (SHARE * (os.cpu_count() or 1)))
        stamp = await run_in_threadpool(view.stamp)
        opening = before is None or stamp[-1] != before[-1]
        if stamp != before and (opening or now >= told + rest):
            told, spent = now, runs.spent
            if before is not None:
                await run_in_threadpool(runs.timed, view.index.grow, PATIENCE_S)
            before, spoke = await run_in_threadpool(view.stamp), now
            yield f"data: {json.dumps(stamp)}\n\n".encode()
        elif now - spoke > 15:
            spoke = now
            yield b": still there\n\n"
        await asyncio.sleep(BEAT_S)


def _json(value: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def _finite(value: Any) -> Any:
    """Return a value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
