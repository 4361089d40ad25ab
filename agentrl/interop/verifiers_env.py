"""Plays the tasksets of verifiers 0.4: their rows, their tools, their rewards, for checks, the red team and training.

    agentrl env check verifiers --option id=my-taskset
    envs: [{name: verifiers, options: {id: my-taskset, config: {difficulty: easy}}}]

Tools run through mcp's in-process client, rewards through `Task.score(trace)` on a trace made from the transcript, as
`vf-replay` does it offline. Scores are the taskset's own word, of trust `reported`. Rewards that look into a live
runtime are refused, not skipped. All of the taskset's code runs on an event loop of its own, within `timeout_s`.
It needs the package verifiers; check, red team and training go on in an environment of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agentrl.envs import Environment
from agentrl.envs.schema_tools import SchemaTool, attach, foreign_tool
from agentrl.errors import AgentRLError, AuthoringError, InfraError, VerifierError
from agentrl.interop.bridge import Bridge, checked
from agentrl.interop.openenv import solution
from agentrl.interop.peer_loop import PeerLoop
from agentrl.interop.reported import ScoreRule, finite
from agentrl.sandboxes.base import off_loop
from agentrl.types import SPLITS, Message, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

MAX_ROWS = 1_000_000
"""The most rows of a taskset that says it has an end."""
LATE_S = 5.0
"""How much longer a tool may take than the taskset, which is then named as the one that was late."""
NEUTRAL = "I do not know."
"""What is scored to see whether a taskset's rewards work, with nothing of a policy's in it."""


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
    """The most seconds of a tool call, of a start, and of scoring."""
    expert: str = ""
    """A JSON file with a solution: a list of actions, or {task id: list}."""


class Verifiers(Bridge):
    """Solve the tasks of a verifiers taskset."""

    options: ClassVar[Options]
    rows: ClassVar[Sequence[Any]] = ()
    taskset: ClassVar[Any] = None
    server_of: ClassVar[Mapping[str, tuple[int, str]]] = {}
    """For each tool, the number of its server and its name there."""
    peer: ClassVar[Peer]

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
        self.peer.loop.run(self._begun(), self.options.timeout_s, "to start its tools")

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
                offered = await _tools(self._clients)
                if offered != self.peer.offered:
                    ready.set_exception(InfraError(f"{self.peer.name} offers other tools now than when it was loaded"))
                    return
                ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the taskset; InfraError where it does not come back."""
        try:
            text = self.peer.loop.run(self._called(name, arguments), self.options.timeout_s, f"for a call of {name}")
        except InfraError:
            self.peer.silent.add(name)
            raise
        self.peer.answered.add(name)
        return text

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
        self.peer.loop.run(self._ended(), self.options.timeout_s, "to end its tools")

    async def _ended(self) -> None:
        self._over.set()
        if self._keeper is not None:
            await asyncio.wait({self._keeper}, timeout=5.0)

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        if not self.options.expert:
            raise NotImplementedError(f"the taskset {self.options.id} offers no solution; name one with `expert`")
        return solution(Path(self.options.expert), task)


class Peer:
    """What is known of a taskset in this process."""

    def __init__(self, id: str) -> None:
        self.name = f"the verifiers taskset {id}"
        self.loop = PeerLoop(self.name)
        self.offered: list[list[tuple[str, str, str]]] = []
        """The tools of each server, as they were announced."""
        self.answered: set[str] = set()
        """Tools that have come back from a call."""
        self.silent: set[str] = set()
        """Tools that have not."""


class Scored(Verifier):
    """Takes the word of a taskset: what its own `score` gives."""

    def __init__(self, options: Options, rows: Sequence[Any], peer: Peer) -> None:
        self.reports = peer.name
        self._rule, self._rows, self._limit_s = options.score, rows, options.timeout_s
        self._peer = peer

    async def probe(self, context: Context) -> None:
        """Score words of our own: rewards that are no numbers, or that hang, for these as well are no policy's doing;
        neither is a tool that has never come back for anybody."""
        if never := self._peer.silent - self._peer.answered:
            raise InfraError(f"{self.reports}: {', '.join(sorted(never))} has never come back from a call")
        row = self._rows[0]
        talk = [Message(role="user", content=str(row.data.prompt_text)), Message(role="assistant", content=NEUTRAL)]
        await self._scored(row, talk, _state_type(row)())

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        row = self._rows[submission.task.secret["row"]]
        reward, parts = await self._scored(row, submission.transcript, submission.state["verifiers"])
        score = self._rule.score([reward], self.reports) if reward is not None else 0.0
        evidence = (f"reported by {self.reports}; not verified here",)
        return Verdict(score=score, breakdown=parts, evidence=evidence, trust="reported", verifier=self.version)

    async def _scored(self, row: Any, talk: Sequence[Message], state: Any) -> tuple[float | None, dict[str, float]]:
        trace = trace_of(row, talk, state)
        try:
            await off_loop(self._peer.loop.run, row.score(trace), self._limit_s, "to score an episode")
            reward = finite(trace.reward, self.reports)
            named = {name: finite(part.score, self.reports) for name, part in trace.rewards.items() if part is not None}
        except AgentRLError:
            raise
        except Exception as error:  # whatever somebody else's reward raises
            raise VerifierError(f"{self.reports} cannot score: {type(error).__name__}: {str(error)[:200]}") from error
        return reward, {name: value for name, value in named.items() if value is not None}


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
            f"environment of its own, where `env check`, `redteam` and `train` go on ({error})"
        ) from None
    try:
        config = vf.taskset_config_type(options.id).model_validate({"id": options.id, **options.config})
        taskset = vf.load_taskset(config)
        rows = list(islice(taskset if taskset.bounded else taskset.take(options.limit), MAX_ROWS))
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
    peer = Peer(options.id)
    body: dict[str, Any] = {
        "__doc__": f"Solve the tasks of {peer.name}.",
        "__module__": __name__,
        "options": options,
        "rows": rows,
        "taskset": taskset,
        "size": len(rows) // len(SPLITS),
        "max_turns": options.turns,
        "system": rows[0].data.system_prompt or "Use the tools; finish with the final answer.",
        "verifier": Scored(options, rows, peer),
        "peer": peer,
    }
    places: dict[str, tuple[int, str]] = {}
    try:
        prefixes, peer.offered = peer.loop.run(_listed(taskset, rows[0]), options.timeout_s, "to list its tools")
    except InfraError as error:
        raise AuthoringError(f"verifiers: {error}") from error
    for at, (prefix, tools) in enumerate(zip(prefixes, peer.offered, strict=True)):
        for inner, description, schema in tools:
            outer = prefix + inner
            offered = foreign_tool(
                outer, description, json.loads(schema), peer=peer.name, timeout_s=options.timeout_s + LATE_S
            )
            own = f"{outer}_" if hasattr(Verifiers, outer) else outer  # a name that the SDK needs itself
            if own in places:
                raise AuthoringError(f"{peer.name} has two tools called {outer!r}")
            places[own] = (at, inner)
            renamed = SchemaTool(**{f: getattr(offered, f) for f in offered.__dataclass_fields__} | {"name": own})
            attach(body, renamed, _method(own))
    body["server_of"] = places
    return type("Verifiers", (Verifiers,), body)


async def _listed(taskset: Any, row: Any) -> tuple[list[str], list[list[tuple[str, str, str]]]]:
    """Return the prefix of each server's tools, and the tools."""
    servers = _servers(taskset, row, _state_type(row)())
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(server)) for _, server in servers]
        offered = await _tools(clients)
    return [f"{toolset.server_name}_" if toolset.server_name else "" for toolset, _ in servers], offered


async def _tools(clients: Sequence[Any]) -> list[list[tuple[str, str, str]]]:
    """Return the name, description and schema of each tool of each server."""
    lists = [(await client.list_tools()).tools for client in clients]
    return [[(t.name, t.description or "", json.dumps(t.input_schema, sort_keys=True)) for t in ts] for ts in lists]


def _method(name: str) -> Any:
    def method(self: Verifiers, **arguments: Any) -> str:
        return self.call(name, arguments)

    return method
