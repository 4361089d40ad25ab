"""The far side of a server: a process on some node that starts SGLang there, and ends it."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.engines.sglang.client import Client
from agentrl.engines.sglang.server import Server
from agentrl.recipe import SglangEngine as Section

PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp", "--pp-size", "--pipeline-parallel-size")
"""SGLang's flags that multiply the GPUs of one server."""
ASK_S, SILENT_S = 10.0, 60.0
"""How long one question to a server waits for its answer, and after how much silence the server counts as lost."""


def node_address() -> str:
    """Return this node's address in the cluster."""
    import ray

    util: Any = ray.util
    return str(util.get_node_ip_address())


def fingerprint(folder: Path) -> str:
    """Return a hash of the names and sizes of a folder's files."""
    rows = [f"{file.name} {file.stat().st_size}" for file in sorted(folder.iterdir()) if file.is_file()]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def resources(section: Section) -> dict[str, float]:
    """Return what Ray sets aside for one server: its GPUs; on the CPU, for trials, next to nothing."""
    if section.device == "cpu":
        return {"CPU": 0.01}
    gpus = 1
    for index, flag in enumerate(section.flags):
        name, _, value = flag.partition("=")
        if name in PARALLEL:
            gpus *= int(value or section.flags[index + 1])
    return {"GPU": float(gpus)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a node needs to start a server."""

    model: str
    mark: str
    """The model folder's fingerprint: a node that has the same folder loads it from there."""
    python: str
    """The interpreter that the recipe names; "" for the node's own SGLang."""
    device: str
    flags: tuple[str, ...]
    memory_fraction: float
    timeout_s: float


class ServerActor:
    """Runs on a node and holds one server; its guard ends the server when this process ends in any way."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._model = plan, Path(plan.model)
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-server-", ignore_cleanup_errors=True)
        self._server: Server | None = None
        self._client: Client | None = None
        self._answered = 0.0

    def has_model(self) -> bool:
        """Tell whether this node sees the model folder."""
        return self._model.is_dir() and fingerprint(self._model) == self._plan.mark

    def receive(self, files: Mapping[str, bytes]) -> None:
        """Take the model's files, on a node that does not see them."""
        self._model = Path(self._folder.name) / "model"
        self._model.mkdir()
        for name, content in files.items():
            (self._model / name).write_bytes(content)

    async def start(self) -> str:
        """Start the server at this node's address; return its URL."""
        from agentrl.engines.sglang import install

        plan = self._plan
        self._server = Server(
            self._model,
            python=Path(plan.python) if plan.python else install.python(plan.device == "cpu"),
            device=plan.device,
            log=Path(self._folder.name) / "sglang.log",
            flags=plan.flags,
            memory_fraction=plan.memory_fraction,
            timeout_s=plan.timeout_s,
            host=node_address(),
        )
        await self._server.start()
        self._answered = time.monotonic()
        return self._server.url

    async def state(self) -> str:
        """Return how the server ended, or that it stands still; "" while it runs."""
        assert self._server is not None
        if not self._server.alive:
            return self._server.diagnosis()
        self._client = self._client or Client(self._server.url)
        if await self._client.answers(ASK_S):
            self._answered = time.monotonic()
        silent = time.monotonic() - self._answered > SILENT_S
        return f"its process runs and did not answer for {SILENT_S:.0f} s" if silent else ""

    def process(self) -> int:
        """Return the server's process id."""
        assert self._server is not None and self._server._process is not None
        return self._server._process.pid

    async def stop(self) -> None:
        """End the server and remove its files."""
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
        self._folder.cleanup()
