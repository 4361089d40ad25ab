"""A local OpenAI-compatible server for tests: a function answers each request, well or badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl import envs
from agentrl.evaluation import Problem
from agentrl.types import ToolCall

Body = dict[str, Any]


@dataclass
class Reply:
    """What the server sends."""

    content: Any
    """JSON data, or bytes as they are."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    repeat: int = 1
    """How often bytes are sent, one after another."""


@dataclass
class Endpoint:
    """A running server."""

    url: str
    seen: list[Body] = field(default_factory=list)
    """The bodies of its requests, in order."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Their headers."""


@contextmanager
def serve(answer: Callable[[Body], Reply]) -> Iterator[Endpoint]:
    """Run a server whose answers the function gives."""
    endpoint = Endpoint("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(Reply({"data": []}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.seen.append(body)
            endpoint.headers.append(dict(self.headers))
            self.reply(answer(body))

        def reply(self, reply: Reply) -> None:
            time.sleep(reply.delay_s)
            raw = reply.content if isinstance(reply.content, bytes) else json.dumps(reply.content).encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(raw) * reply.repeat), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for _ in range(reply.repeat):
                    self.wfile.write(raw)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()


def said(content: Any, *, calls: Any = None, finish: str = "stop", usage: Any = None) -> Reply:
    """Make an ordinary answer, or one with strange parts."""
    message = {"role": "assistant", "content": content, **({} if calls is None else {"tool_calls": calls})}
    body: Body = {"choices": [{"message": message, "finish_reason": finish}]}
    return Reply(body | {"usage": {"prompt_tokens": 100, "completion_tokens": 10} if usage is None else usage})


def call(name: Any, arguments: Any, identifier: Any = "a") -> Body:
    """Make a tool call; arguments that are no text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": text}}


def expert(problems: Sequence[Problem], solved: Callable[[int], bool] = lambda number: True) -> Callable[[Body], Reply]:
    """Play the environment's expert on the tasks that `solved` picks by their numbers, and say "no" to the others."""
    known = {problem.task.prompt: (number, problem) for number, problem in enumerate(problems)}

    def answer(body: Body) -> Reply:
        prompt = next(m["content"] for m in body["messages"] if m["role"] == "user")
        if prompt not in known:
            return said("yes")
        number, problem = known[prompt]
        if not solved(number):
            return said("no")
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        action = envs.load(problem.env)().expert(problem.task)[turn]
        if isinstance(action, ToolCall):
            return said("", calls=[call(action.name, dict(action.arguments))])
        return said(action)

    return answer
