"""An OpenAI-compatible server in front of the policy: what any agent is given as its base_url.

    agent ── http://127.0.0.1:PORT/s/SESSION/v1 ──┐            POST chat/completions, responses, messages (Anthropic's)
    agent ── http://127.0.0.1:PORT/v1 and a key ──┤            GET models, tools; POST tools, step (the environment's)
    agent in a sandbox ── socket ── relay ────────┴─> Gateway ─> Session ─> engine

There is one session per episode, with a random path and a random key; it ends with the episode. The server listens on
the loopback address alone. Every limit is the session's own, so that an agent can only hold itself up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, UserError
from agentrl.interop import answers, dialects
from agentrl.interop.branches import TooLong
from agentrl.interop.dialects import Dialect, Unsupported
from agentrl.interop.session import LARGE, WAITING, Over, OverBudget, Session
from agentrl.interop.streams import Sending, TurnStream

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY = 8 << 20
"""Bytes of the largest request."""
BODY_S = 60.0
"""Seconds within which a request's body must arrive."""
MODEL = "policy"
"""The name under which the policy is listed; any other name means it too."""
SERVED = ("chat/completions", "responses", "messages", "models", "tools", "step")
NEEDS = "an agent needs starlette and uvicorn: pip install 'agentrl[agents]'"


class Gateway:
    """The server and its sessions."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        """By path."""
        self._keys: dict[str, Session] = {}
        self.peers: dict[int, Session] = {}
        """Which relay each of the relays' own connections belongs to, by its local port."""
        self.port = 0
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a free port of the loopback address; nothing happens when it listens already."""
        async with self._starting:
            if self._serving is not None:
                return
            try:
                import uvicorn
            except ImportError as error:
                raise UserError(NEEDS) from error

            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            self.port = listener.getsockname()[1]

            class Server(uvicorn.Server):
                """The run handles signals itself."""

                @contextlib.contextmanager
                def capture_signals(self) -> Iterator[None]:
                    yield

            config = uvicorn.Config(
                self.app(),
                log_level="critical",
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=False,
                http="h11",  # the limit below is its own; another parser would take headers without end
                ws="none",
                proxy_headers=False,  # a header must not say where a request came from
                timeout_keep_alive=600,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=1 << 16,
            )
            self._server = Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            while not self._server.started:
                if self._serving.done():
                    await self._serving
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End every session and stop listening."""
        for session in tuple(self.sessions.values()):
            self.end(session)
        if self._serving is not None and self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving}, timeout=5.0)
            self._serving.cancel()

    def open(self, session: Session) -> Session:
        """Let a session be reached."""
        self.sessions[session.id] = self._keys[session.key] = session
        return session

    def end(self, session: Session) -> None:
        """End a session: its path and its key lead nowhere from now on."""
        self.sessions.pop(session.id, None)
        self._keys.pop(session.key, None)
        for port in [port for port, owner in self.peers.items() if owner is session]:
            del self.peers[port]
        session.end()

    # Requests ----------------------------------------------------------------------------------------------------

    def app(self) -> Any:
        """Return the server as an ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = []
        for prefix in ("/s/{session}/v1", "/v1", "/s/{session}"):
            routes += [
                Route(f"{prefix}/chat/completions", _Turns(self, "chat"), methods=["POST"]),
                Route(f"{prefix}/responses", _Turns(self, "responses"), methods=["POST"]),
                Route(f"{prefix}/messages", _Turns(self, "messages"), methods=["POST"]),
                Route(f"{prefix}/models", self._models, methods=["GET"]),
                Route(f"{prefix}/tools", self._tools, methods=["GET"]),
                Route(f"{prefix}/tools", self._tool, methods=["POST"]),
                Route(f"{prefix}/step", self._step, methods=["POST"]),
            ]
        for path in ("/s/{session}/{rest:path}", "/{rest:path}"):
            routes.append(Route(path, self._nothing, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]))
        # Other methods come here too: what is not served counts for its session, whatever it is.
        app = Starlette(routes=routes, exception_handlers={404: self._nothing, 405: self._nothing})
        app.router.redirect_slashes = False
        return app

    def _session(self, request: Request) -> Session | None:
        """Return the session that a request belongs to by its path, its key and the relay that it came through."""
        header = request.headers.get("authorization", "")
        key = header[7:].strip() if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        by_key = self._keys.get(key)
        path = request.path_params.get("session")
        session = by_key if path is None else self.sessions.get(path)
        if session is None or (by_key is not None and by_key is not session):
            return None
        relayed = self.peers.get(request.client.port) if request.client else None
        if relayed is not (session if session.bound else None):
            return None
        if session.over.is_set():
            return None
        session.request()
        return session

    def _unknown(self, request: Request, dialect: Dialect = "chat") -> Response:
        """Answer a request without a session; one that came through a relay counts for that relay's own."""
        owner = self.peers.get(request.client.port) if request.client else None
        if owner is not None:
            owner.refuse()
        return _error(dialect, 401, "there is no such session, or it has ended", close=True)

    async def _nothing(self, request: Request, error: Exception | None = None) -> Response:
        """Answer a request for a path that the gateway does not have."""
        session = self._session(request)
        if session is None:
            return self._unknown(request)
        session.refuse()
        text = f"{request.method} {request.url.path[-100:]} is not served here: only {', '.join(SERVED)}"
        return _error("chat", 404, text)

    async def _guarded(
        self, request: Request, dialect: Dialect, serve: Callable[[Session, bytes], Any], out: Sending | None = None
    ) -> Response | None:
        """Serve one request of a session: whatever is wrong with it is answered, and counted for the session alone."""
        session = self._session(request)
        if session is None:
            return self._unknown(request, dialect)
        if session.waiting >= WAITING:
            session.refuse()
            return _error(dialect, 429, f"more than {WAITING} requests are waiting", close=True)
        session.waiting += 1
        body = b""
        place = ExitStack()
        if out is not None:
            out.leave = place.close  # a turn that is over needs no place, however slowly it is read
        try:
            await session.places.acquire()
            place.callback(session.places.release)
            if session.over.is_set():
                raise Over
            body = await _body(request)
            return await self._unless_gone(request, session, serve(session, body))  # type: ignore[no-any-return]
        except (Unsupported, TooLong, _Refused) as error:
            session.refuse(len(body))
            status = error.status if isinstance(error, _Refused) else 400
            code = "context_length_exceeded" if isinstance(error, TooLong) else "unsupported"
            return _error(dialect, status, str(error), code=code, close=status != 400)
        except OverBudget as error:
            session.refuse()
            return _error(dialect, 403, str(error), code="budget")
        except (Over, asyncio.CancelledError):
            session.counts["given_up"] += 1
            return _error(dialect, 410, "the session has ended", close=True)
        except ValueError as error:
            if isinstance(error, AgentRLError):
                return self._failed(session, dialect, error)
            session.refuse()
            return _error(dialect, 400, str(error)[:500])
        except Exception as error:
            return self._failed(session, dialect, error)
        finally:
            place.close()
            session.waiting -= 1

    def _failed(self, session: Session, dialect: Dialect, error: Exception) -> Response:
        """Hand a failure of the system to the episode, which is tried again; the agent only learns that it is over."""
        if not session.trouble.done():
            session.trouble.set_exception(error)
        return _error(dialect, 500, "the session has ended", close=True)

    async def _unless_gone(self, request: Request, session: Session, work: Any) -> Any:
        """Await the answer; when the client hangs up or the session ends, give the turn up in the engine too."""
        task = asyncio.ensure_future(work)
        session.running.add(task)
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            return await task
        finally:
            gone.cancel()
            session.running.discard(task)

    async def _turn(self, session: Session, dialect: Dialect, body: bytes, out: Sending) -> Response | None:
        """Answer a request for a turn; None when it was sent as a stream."""
        from starlette.responses import JSONResponse

        def read() -> dialects.Asked:
            return dialects.read(dialect, dialects.decode(body), session.memory, len(body))

        asked = await asyncio.to_thread(read) if len(body) > LARGE else read()
        headers = {"agentrl-overridden": ", ".join(asked.overridden)} if asked.overridden else {}
        if not asked.stream:
            return JSONResponse(answers.write(asked, await session.answer(asked)), headers=headers)
        out.headers, stream = headers, TurnStream()
        await out.forward(asked, stream, session.answer(asked, stream))
        return None

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        if self._session(request) is None:
            return self._unknown(request)
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentrl"}
        return JSONResponse({"object": "list", "data": [entry], "has_more": False, "first_id": MODEL, "last_id": MODEL})

    async def _tools(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        session = self._session(request)
        if session is None:
            return self._unknown(request)
        return JSONResponse({"tools": list(session.tools), "messages": list(session.opening)})

    async def _tool(self, request: Request) -> Response | None:
        """Run a tool of the environment."""
        from starlette.responses import JSONResponse

        async def run(session: Session, body: bytes) -> Response:
            data = dialects.decode(body)
            name = data.get("name")
            if session.run_tool is None or not isinstance(name, str):
                raise Unsupported('a call is {"name": "...", "arguments": {...}}')
            content, wrong = await session.run_tool(name, data.get("arguments"))
            return JSONResponse({"content": content, "error": wrong})

        return await self._guarded(request, "chat", run)

    async def _step(self, request: Request) -> Response | None:
        """Carry out a turn of the policy as the built-in loop would."""
        from starlette.responses import JSONResponse

        async def run(session: Session, body: bytes) -> Response:
            messages, done = await session.step(dialects.turn(dialects.decode(body)))
            return JSONResponse({"messages": messages, "done": done})

        return await self._guarded(request, "chat", run)


class _Turns:
    """What answers requests for turns in a dialect: with a response, or with events as they come."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self.gateway, self.dialect = gateway, dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.requests import Request

        request, out = Request(scope, receive, send), Sending(send)

        def serve(session: Session, body: bytes) -> Any:
            return self.gateway._turn(session, self.dialect, body, out)

        response = await self.gateway._guarded(request, self.dialect, serve, out)
        if response is not None and out.begun:
            await out.fail(json.loads(bytes(response.body))["error"])
        elif response is not None:
            await response(scope, receive, send)


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _body(request: Request) -> bytes:
    """Read the body; no more of it than a request may have, and no longer than it may take."""
    try:
        length = int(request.headers.get("content-length") or 0)
    except ValueError as error:
        raise _Refused(400, "content-length is not a number") from error
    if length > MAX_BODY:
        raise _Refused(413, f"the request has {length} bytes; at most {MAX_BODY} are taken")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise _Refused(413, f"the request has more than {MAX_BODY} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise _Refused(408, f"the request did not arrive within {BODY_S:g} s") from error
    except _Refused:
        raise
    except Exception as error:  # starlette's ClientDisconnect
        raise Over from error
    return b"".join(parts)


async def _hung_up(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(dialect: Dialect, status: int, text: str, *, code: str = "refused", close: bool = False) -> Response:
    """Return an error as the dialect writes it."""
    from starlette.responses import JSONResponse

    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "api_error" if status >= 500 else "invalid_request_error"
    )
    error = {"type": kind, "message": text}
    body = {"type": "error", "error": error} if dialect == "messages" else {"error": {**error, "code": code}}
    return JSONResponse(body, status_code=status, headers={"connection": "close"} if close else {})
