"""A server that takes one session at a time is waited for; one that stays full is infrastructure trouble."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentrl.envs.play import play, stage
from agentrl.errors import InfraError
from agentrl.interop import openenv

FULL = json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}})


async def episodes(count: int, *, never: bool = False) -> list[float | None]:
    """Play several episodes at once on a server with one place."""
    from websockets.asyncio.server import serve
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    taken = 0

    async def answer(socket: Any) -> None:
        nonlocal taken
        if taken or never:
            await socket.send(FULL)
            await socket.close()
            return
        taken += 1
        try:
            async for raw in socket:
                done = json.loads(raw)["type"] == "step"
                data = {"observation": {"text": "go"}, "reward": float(done), "done": done}
                await socket.send(json.dumps({"type": "observation", "data": data}))
        finally:
            taken -= 1

    def schema(connection: Any, request: Any) -> Any:
        content = json.dumps({"action": {"title": "Move", "properties": {}}}).encode()
        headers = Headers({"Content-Length": str(len(content))})
        return Response(200, "OK", headers, content) if request.path == "/schema" else None

    async with serve(answer, "127.0.0.1", 0, process_request=schema) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        options = openenv._checked({"url": f"http://127.0.0.1:{port}"})
        kind = await openenv._looked_at(options)
        async with stage("process", limit=2) as where:
            from agentrl.types import ToolCall

            plays = [play(kind(), kind().task("train", 1, n), [ToolCall(name="act")], where) for n in range(count)]
            return [played.score for played in await asyncio.gather(*plays)]


def test_episodes_take_turns_on_a_server_with_one_place() -> None:
    """None is lost, and none is scored for having had to wait."""
    assert asyncio.run(episodes(4)) == [1.0] * 4


def test_a_server_that_stays_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "FULL_S", 0.5)
    with pytest.raises(InfraError, match="the OpenEnv server http://127.0.0.1"):
        asyncio.run(episodes(1, never=True))
