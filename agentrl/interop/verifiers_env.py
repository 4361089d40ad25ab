"""Plays the tasksets of verifiers 0.4: their rows, their tools, their rewards, for checks, the red team and training.

    agentrl env check verifiers --option id=my-taskset
    envs: [{name: verifiers, options: {id: my-taskset, config: {difficulty: easy}}}]

Tools run through mcp's in-process client, rewards through `Task.score(trace)` on a trace made from the transcript, as
`vf-replay` does it offline. Scores are the taskset's own word, of trust `reported`. Rewards that look into a live
runtime are refused, not skipped. It needs the package verifiers; check and red team go on in an environment of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agentrl import event_loop
from agentrl.envs import Environment
from agentrl.envs.gym_adapter import wait
from agentrl.envs.schema_tools import SchemaTool, attach, foreign_tool
from agentrl.errors import AuthoringError
from agentrl.interop.bridge import Bridge, checked
from agentrl.interop.openenv import solution
from agentrl.interop.reported import ScoreRule, finite
from agentrl.types import SPLITS, Message, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Options(BaseModel):
    """The options of the environment `verifiers`."""

    model_config = ConfigDict(extra="forbid")

    id: str
    """The taskset, as `vf-eval` names it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own settings."""
    limit: int = Field(default=1000, ge=3)
    """The most rows that are taken of an endless taskset."""
    score: ScoreRule = Field(default_factory=ScoreRule)
    """How the taskset's reward becomes a score."""
    turns: int = Field(default=16, ge=1)
    """The most turns of an episode."""
    timeout_s: float = Field(default=30.0, gt=0)
    """The most seconds of a tool call."""
    expert: str = ""
    """A JSON file with a solution: a list of actions, or {task id: list}."""


class Verifiers(Bridge):
    """Solve the tasks of a verifiers taskset."""

    options: ClassVar[Options]
    rows: ClassVar[Sequence[Any]] = ()
    taskset: ClassVar[Any] = None
    server_of: ClassVar[Mapping[str, tuple[int, str]]] = {}
    """For each tool, the number of its server and its name there."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._keeper: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._clients: list[Any] = []
        self._vf_state: Any = None

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        return _class(checked("verifiers", Options, options))

    def task(self, split: Split, level: int, index: int) -> Task:
        at = index % (len(self.rows) // len(SPLITS))  # beyond the end a new epoch begins
        row = len(SPLITS) * at + SPLITS.index(split)  # a row belongs to one split
        id = f"{self.name or 'verifiers'}/{split}/{level}/{at}"
        prompt = str(self.rows[row].data.prompt_text)
        return Task(id=id, split=split, level=level, prompt=prompt, setup={"row": row}, secret={"row": row})

    def start(self) -> None:
        wait(self._begun())  # on an event loop of its own: somebody else's tools may hold it up, never the trainer's

    async def _begun(self) -> None:
        self._vf_state = _state_type(self.rows[0])()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(ready))
        await ready

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Hold the clients open: what mcp opens in one task must be closed in the same one."""
        try:
            async with AsyncExitStack() as stack:
                for toolset, server in _servers(self.taskset, self.rows[0], self._vf_state):
                    await toolset.setup()
                    await toolset.setup_task(self.rows[self.given.setup["row"]].data)
                    self._clients.append(await stack.enter_async_context(_client(server)))
                ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the taskset."""
        return wait(self._called(name, arguments))

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        at, inner = self.server_of[name]
        result = await self._clients[at].call_tool(inner, dict(arguments))
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ValueError(text)
        return text

    def state(self) -> Mapping[str, Any]:
        return {"verifiers": self._vf_state}

    def stop(self) -> None:
        wait(self._ended())

    async def _ended(self) -> None:
        self._over.set()
        if self._keeper is not None:
            await asyncio.wait({self._keeper}, timeout=5.0)

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        if not self.options.expert:
            raise NotImplementedError(f"the taskset {self.options.id} offers no solution; name one with `expert`")
        return solution(Path(self.options.expert), task)


class Scored(Verifier):
    """Takes the word of a taskset: what its own `score` gives."""

    def __init__(self, options: Options, rows: Sequence[Any]) -> None:
        self.reports = f"the verifiers taskset {options.id}"
        self._rule, self._rows = options.score, rows

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        row = self._rows[submission.task.secret["row"]]
        trace = trace_of(row, submission.transcript, submission.state["verifiers"])
        await row.score(trace)
        reward = finite(trace.reward, self.reports)
        parts = {name: float(part.score) for name, part in trace.rewards.items() if part is not None}
        score = self._rule.score([reward], self.reports) if reward is not None else 0.0
        evidence = (f"reported by {self.reports}; not verified here",)
        return Verdict(score=score, breakdown=parts, evidence=evidence, trust="reported", verifier=self.version)


def trace_of(task: Any, talk: Sequence[Message], state: Any) -> Any:
    """Return a transcript as a verifiers trace: a straight line of nodes, the assistant's marked as sampled."""
    import verifiers.v1 as vf  # noqa: TID251
    from verifiers.v1.configs.agent import WireAgentConfig  # noqa: TID251

    nodes = []
    for number, message in enumerate(talk):
        said: Any
        if message.role == "assistant":
            calls = [
                vf.ToolCall(id=c.id or f"c{number}", name=c.name, arguments=json.dumps(dict(c.arguments), default=str))
                for c in message.tool_calls
            ]
            said = vf.AssistantMessage(content=message.content, tool_calls=calls or None)
        elif message.role == "tool":
            said = vf.ToolMessage(tool_call_id=message.tool_call_id or f"c{number - 1}", content=message.content)
        else:
            said = (vf.SystemMessage if message.role == "system" else vf.UserMessage)(content=message.content)
        parent = number - 1 if number else None
        nodes.append(vf.MessageNode(parent=parent, message=said, sampled=message.role == "assistant"))
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=WireAgentConfig(runtime=vf.SubprocessConfig()))
    return vf.Trace(task=about, agent=agent, nodes=nodes, state=state, is_completed=True, ok=True)


def _client(server: Any) -> Any:
    from mcp import Client

    return Client(server)


def _state_type(row: Any) -> Any:
    import verifiers.v1 as vf  # noqa: TID251
    from verifiers.v1.utils.generic import concrete_type  # noqa: TID251

    return concrete_type(type(row), vf.State) or vf.State


def _servers(taskset: Any, row: Any, state: Any) -> list[tuple[Any, Any]]:
    """Return the tool servers of a taskset; without this channel each call would get a state of its own."""
    from mcp.server.mcpserver import MCPServer

    async def pull(kept: Any = state) -> Any:
        return kept

    servers = []
    for toolset in [*type(taskset).toolsets(taskset.config), *type(row).toolsets(taskset.config.task)]:
        toolset._pull_state, toolset._push_state = pull, lambda before: asyncio.sleep(0)
        server = MCPServer(toolset.server_name or "tools")
        toolset.register(server)
        servers.append((toolset, server))
    return servers


def _class(options: Options) -> type[Verifiers]:
    """Load a taskset, and make the environment class with its tools."""
    try:
        import verifiers.v1 as vf  # noqa: TID251
    except ImportError as error:
        raise AuthoringError(
            "verifiers: this needs the package verifiers 0.4; `agentrl env get verifiers` installs it in an "
            f"environment of its own, where `env check` and `redteam` go on ({error})"
        ) from None
    try:
        config = vf.taskset_config_type(options.id).model_validate({"id": options.id, **options.config})
        taskset = vf.load_taskset(config)
        rows = list(taskset if taskset.bounded else taskset.take(options.limit))
    except Exception as error:  # whatever somebody else's package raises
        raise AuthoringError(
            f"verifiers: the taskset {options.id} cannot be loaded: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if len(rows) < len(SPLITS):
        raise AuthoringError(f"verifiers: the taskset {options.id} has {len(rows)} rows; three splits need at least 3")
    live = [hook.__name__ for hook in rows[0].hooks("reward") if "runtime" in inspect.signature(hook).parameters]
    if live:
        raise AuthoringError(
            f"verifiers: the rewards {', '.join(live)} of {options.id} look into a live runtime, which a transcript "
            "does not have; they cannot be played here"
        )
    peer = f"the verifiers taskset {options.id}"
    body: dict[str, Any] = {
        "__doc__": f"Solve the tasks of {peer}.",
        "__module__": __name__,
        "options": options,
        "rows": rows,
        "taskset": taskset,
        "size": len(rows) // len(SPLITS),
        "max_turns": options.turns,
        "system": rows[0].data.system_prompt or "Use the tools; finish with the final answer.",
        "verifier": Scored(options, rows),
    }
    places: dict[str, tuple[int, str]] = {}
    for at, inner, outer, description, schema in event_loop.run(_listed(taskset, rows[0])):
        offered = foreign_tool(outer, description, schema, peer=peer, timeout_s=options.timeout_s)
        own = f"{outer}_" if hasattr(Verifiers, outer) else outer  # a name that the SDK needs itself
        if own in places:
            raise AuthoringError(f"{peer} has two tools called {outer!r}")
        places[own] = (at, inner)
        renamed = SchemaTool(**{f: getattr(offered, f) for f in offered.__dataclass_fields__} | {"name": own})
        attach(body, renamed, _method(own))
    body["server_of"] = places
    return type("Verifiers", (Verifiers,), body)


async def _listed(taskset: Any, row: Any) -> list[tuple[int, str, str, str, Any]]:
    tools: list[tuple[int, str, str, str, Any]] = []
    for at, (toolset, server) in enumerate(_servers(taskset, row, _state_type(row)())):
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        async with _client(server) as client:
            for tool in (await client.list_tools()).tools:
                tools.append((at, tool.name, prefix + tool.name, tool.description or "", tool.input_schema))
    return tools


def _method(name: str) -> Any:
    def method(self: Verifiers, **arguments: Any) -> str:
        return self.call(name, arguments)

    return method
