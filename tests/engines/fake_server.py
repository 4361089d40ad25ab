"""A stand-in for an SGLang server that holds real tensors, says what it holds, and ends when it is told to.

A real one takes half a minute to start, and cannot be made to end between two given buckets.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from typing import Any

import torch
from aiohttp import web

from agentrl.engines.sglang.weight_check import _as_served, cpu_hash


class FakeServer:
    """Runs in a thread of its own until `close`."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, dies_at: int = 0) -> None:
        """`dies_at`: the bucket at which it breaks every connection and listens no more; 0 for never."""
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.calls: list[str] = []
        self.version = "0"
        self.running = True
        """Whether it samples."""
        self.named = True
        """Whether it says what a tensor is."""
        self.sampled: list[dict[str, torch.Tensor]] = []
        """What it held at each turn that it sampled."""
        self._dies_at, self._buckets = dies_at, 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        started.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        """Listen no more."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        known = {name.removeprefix("_do").replace("__", "/") for name in dir(self) if name.startswith("_do_")}
        if request.method == "OPTIONS":
            return web.json_response({}, status=405 if path in known or path in PLAIN else 404)
        self.calls.append(path)
        if path in PLAIN:
            self.running = path == "/continue_generation" or (self.running and path != "/pause_generation")
            return web.json_response({"success": True, **PLAIN[path]})
        body = await request.json()
        try:
            return web.json_response({"success": True, **(await getattr(self, "_do_" + path.replace("/", "_"))(body))})
        except ConnectionAbortedError:
            transport = request.transport
            assert transport is not None
            transport.abort()
            await self._site.stop()
            raise

    async def _do__generate(self, body: Any) -> Any:
        while not self.running:
            await asyncio.sleep(0.01)
        self.sampled.append({name: tensor.clone() for name, tensor in self.tensors.items()})
        spans = [{"version": self.version, "start": 0, "end": 1}]
        return {"meta_info": {"output_token_logprobs": [[-1.0, 7]], "finish_reason": {"type": "stop"},
                              "weight_versions": spans}}  # fmt: skip

    async def _do__update_weights_from_tensor(self, body: Any) -> Any:
        self._buckets += 1
        if self._buckets == self._dies_at:
            raise ConnectionAbortedError
        assert not self.running
        for name, tensor in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])):
            self.tensors[name] = tensor.clone()
        self.version = body.get("weight_version", self.version)
        return {}

    async def _do__get_weights_by_name(self, body: Any) -> Any:
        return {"parameter": self.tensors[body["name"]][: body["truncate_size"]].tolist() if self.named else None}

    async def _do__weights_checker(self, body: Any) -> Any:
        return {
            "ranks": [
                {"checksums": {name: cpu_hash([_as_served(name, tensor)]) for name, tensor in self.tensors.items()}}
            ]
        }


PLAIN: dict[str, dict[str, Any]] = {
    "/server_info": {"tp_size": 1, "device": "cpu"},
    "/pause_generation": {},
    "/continue_generation": {},
    "/abort_request": {},
    "/health": {},
}
