"""What a package that `agentrl env export --to verifiers` wrote is made of: a taskset, its Env and its harness.

    vf-eval ── Taskset.load: (split, level, index) and the prompt, no secret ──> Env.run
               Env.run: SteppedEpisode here, its tools at an MCP address, the harness talks, then the final message
               is given, graded, recorded; what could not be graded is raised: the episode is tried again

It is imported by such a package alone, in an environment that has verifiers 0.4 and agentrl.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
import verifiers.v1 as vf  # noqa: TID251
from mcp.server.transport_security import TransportSecuritySettings
from verifiers.v1.harnesses.null import NullHarness  # noqa: TID251
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE  # noqa: TID251
from verifiers.v1.mcp import SharedToolServer  # noqa: TID251

from agentrl import envs, sandboxes
from agentrl.envs.play import Stage
from agentrl.envs.stepped import SteppedEpisode
from agentrl.errors import InfraError
from agentrl.interop.mcp_server import server_of
from agentrl.sandboxes.pool import Pool

__all__ = ["AgentrlEnv", "AgentrlHarness", "Config", "Data", "EnvConfig", "Row", "rows"]


class Data(vf.TaskData):  # type: ignore[misc]
    """Which task a row is. It stands on every trace, so it holds no secret: the Env makes the task again from it."""

    environment: str
    options: dict[str, Any]
    split: str
    level: int
    index: int
    sandbox: str


class Row(vf.Task[Data]):  # type: ignore[misc]
    """One task."""

    @property
    def key(self) -> str:
        return f"{self.data.environment}/{self.data.split}/{self.data.level}/{self.data.index}"


class Config(vf.TasksetConfig):  # type: ignore[misc]
    """What can be chosen: `--env.taskset.split heldout`, and so on."""

    environment: str = ""
    options: dict[str, Any] = {}
    split: str = "train"
    level: int = 0
    count: int = 100
    sandbox: str = "namespace"


class AgentrlHarness(NullHarness):  # type: ignore[misc]
    """The chat loop alone: the default harness would hand the model a shell on this machine.

    Its program runs under this interpreter, which has what it needs. Without that, verifiers would download uv and an
    environment for it, and start uv for every rollout.
    """

    async def setup(self, runtime: Any) -> None:
        if not isinstance(runtime.config, vf.SubprocessConfig) or not hasattr(runtime, "_uv_interpreters"):
            await super().setup(runtime)
            return
        program = CHAT_PROGRAM_SOURCE.encode() if isinstance(CHAT_PROGRAM_SOURCE, str) else CHAT_PROGRAM_SOURCE
        path = f"{runtime.scripts_dir}/{hashlib.sha256(program).hexdigest()}.py"
        if path not in runtime._uv_interpreters:
            draft = f"{path}.{uuid.uuid4().hex}.tmp"  # rollouts start at the same time: no one may read half a file
            await runtime.write(draft, program)
            await runtime.run(["mv", "-f", draft, path], {})
        runtime._uv_interpreters[path] = sys.executable


class EnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """Runs the harness as a process here; it holds nothing but the conversation."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


def rows(config: Any) -> Iterator[Row]:
    """Yield the rows of a taskset."""
    options = dict(config.options)
    kind = envs.load(config.environment, options)
    environment = kind(**options)
    level = config.level or kind.levels[0]
    size = environment.size_of(config.split, level)
    for index in range(config.count if size is None else min(config.count, size)):
        task = environment.task(config.split, level, index)
        data = Data(
            id=task.id,
            name=task.id,
            prompt=task.prompt,
            system_prompt=kind.system,
            environment=config.environment,
            options=options,
            split=config.split,
            level=level,
            index=index,
            sandbox=config.sandbox,
        )
        yield Row(data, config.task)


class AgentrlEnv(vf.Env[EnvConfig]):  # type: ignore[misc]
    """Plays rows: the episode lives in this process, the harness gets its tools as an MCP address."""

    async def start(self) -> None:
        self._stages: dict[str, Stage] = {}

    async def stop(self) -> None:
        for stage in getattr(self, "_stages", {}).values():
            stage.boxes.close()

    def _stage(self, sandbox: str) -> Stage:
        if sandbox not in self._stages:
            self._stages[sandbox] = Stage(boxes=Pool(sandboxes.load(sandbox)(), limit=32))
        return self._stages[sandbox]

    async def run(self, task: Any, agents: Any) -> None:
        data = task.data
        options: Mapping[str, Any] = data.options
        kind = envs.load(data.environment, options)
        make = partial(kind, **options)
        playing = SteppedEpisode(
            make, make().task(data.split, data.level, data.index), self._stage(data.sandbox), seed=data.index
        )
        try:
            opening = await playing.start()
            async with _served(playing, opening[1].content) as url:
                trace = await agents.agent.run(task, tools={"": SharedToolServer(url=url, local=True)})
            if trace.errors:
                raise InfraError(f"the harness failed: {trace.errors[-1].message[:500]}")
            if not any(node.sampled for node in trace.nodes):
                raise InfraError("the harness ended before the model was asked anything")
            played = await playing.settle(trace.last_reply)
            if played.score is None:
                cause = played.outcome.fault.cause if played.outcome.fault else "no cause given"
                raise InfraError(f"the episode could not be graded: {cause}")
            trace.record_reward("verdict", played.score)
            trace.record_metric("tool_calls", float(playing.episode.ledger["calls"]))
        finally:
            await playing.close()


@asynccontextmanager
async def _served(playing: SteppedEpisode, prompt: str) -> AsyncIterator[str]:
    wire = socket.create_server(("127.0.0.1", 0))
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server_of(playing, prompt).streamable_http_app(
        json_response=True, stateless_http=True, transport_security=security
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    running = asyncio.create_task(server.serve(sockets=[wire]))
    try:
        yield f"http://127.0.0.1:{wire.getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await running
