"""One episode of one task. envs/play.py drives it; training, checks and the gymnasium adapter all run it.

start() ── messages ──> policy ── act(message) ── observations ──> policy ── ... ── finish() ── Submission

What goes wrong inside it is told apart by its cause:

    the call does not fit, is denied, or the tool says no    an error observation; the episode continues
    the sandbox died, or a tool ran past its time            AgentError: the episode is over, graded 0
    the cause lies outside (InfraError), or a bug in a tool  raised as it is: retried, never scored
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar, cast

from agentrl import hashing, seeds
from agentrl.envs.base import Environment
from agentrl.envs.in_flight import Call
from agentrl.envs.permissions import Permissions
from agentrl.envs.timed_box import TimedBox
from agentrl.envs.tool_output import frame, harmless, text_of, well_formed
from agentrl.envs.tools import CallError, Tool, nameless, tools_of
from agentrl.errors import AgentError, AgentRLError, AuthoringError
from agentrl.sandboxes.base import Sandbox, off_loop
from agentrl.types import Done, Ending, Message, Observation, Task, ToolCall
from agentrl.verifiers.base import Boxes, Submission

T = TypeVar("T")

START_S = 30.0
"""How long an episode that is given up while it starts waits for `start` to end, so that `stop` comes after it."""
GRACE_S = 2.0
"""How much longer than its timeout a tool may take to come back with what its command had written."""
OPENING_LIMIT = 8_000
"""Characters of what `start` returns that reach the policy."""
LATER = "not carried out: one call per message; look at the result of the first call, then make the next one"
"""What later calls of a message are told where only the first is carried out."""
ERROR_LIMIT = 500
"""Characters of an error that reach the policy."""
SAYS_NO = (ValueError, LookupError, OSError, ArithmeticError)
"""What a tool raises about its input: shown to the policy. Anything else is a bug of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one assistant message."""

    observations: tuple[Observation, ...] = ()
    done: bool = False


class Episode:
    """One run of one task: owns the environment instance and its sandbox from start to close."""

    def __init__(
        self,
        environment: Environment,
        task: Task,
        *,
        seed: int,
        boxes: Boxes,
        permissions: Permissions | None = None,
    ) -> None:
        self.environment = environment
        self.task = task
        self.seed = seed
        self.tools: dict[str, Tool] = tools_of(environment)
        self.transcript: list[Message] = []
        self.answer = ""
        self.sent_back = 0
        """How many answers met an objection."""
        self.root = ""
        self.ending: Ending = "done"
        """How it ended, once it has."""
        self.step: Step | None = None
        """What came of the last message."""
        self.over = False
        """Whether nothing more can be done in it."""
        self.stage = "environment"
        """Which part is at work (environment, policy, engine or verifier), for a fault to name."""
        self.seconds: dict[str, float] = dict.fromkeys(("start", "engine", "tools", "finish", "verifier"), 0.0)
        """Wall time of each part so far."""
        self.permissions = permissions or environment.permissions
        self.slowest: tuple[float, str] = (0.0, "")
        """Seconds and name of the slowest tool call so far."""
        self.auditing = False
        """Whether the audit verifier's artifacts are collected as well."""
        self.boxes = boxes
        self.box: TimedBox | None = None
        """The sandbox, once it has started and where it has one."""
        self.feedback = ""
        """What follows the prompt: what the policy may know of its earlier tries of the task."""
        self._started = self._whole = False
        self._stack = AsyncExitStack()
        self._counts = dict.fromkeys(("calls", "bad_calls", "tool_errors", "tool_timeouts", "bytes_seen"), 0)
        self._denied: list[str] = []
        self._dry_runs: list[str] = []

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, for the chat template."""
        return [tool.schema() for tool in self.tools.values()]

    @property
    def ledger(self) -> dict[str, Any]:
        """What the policy did through its tools; `finish` adds what happened in the sandbox."""
        return {**self._counts, "denied": list(self._denied), "dry_runs": list(self._dry_runs)}

    async def timed(self, part: str, work: Coroutine[Any, Any, T]) -> T:
        """Await work and add its wall time to a part's seconds."""
        began = perf_counter()
        try:
            return await work
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - began

    async def start(self) -> tuple[Message, ...]:
        """Build the sandbox and return the opening messages."""
        env = self.environment
        if self.transcript:
            raise AuthoringError(f"episode of {self.task.id} was started already; make a new one for each run")
        if not isinstance(self.task.prompt, str):
            raise AuthoringError(
                f"{type(env).__name__}.task() gave {self.task.id} a prompt of type {type(self.task.prompt).__name__}; "
                "make it a text: prompt=str(...)"
            )
        env.given = self.task.public()
        env.rng = seeds.generator(self.seed, "episode", self.task.id)
        spec = await run(env.prepare, env.given, seeds.generator(self.seed, "prepare", self.task.id))
        if spec is not None:
            box = await self._stack.enter_async_context(self.boxes.box(spec))
            self.box = TimedBox(box)
            self.root = box.root
            env._box = cast(Sandbox, self.box)
        self._started = True
        opening = await _to_its_end(env.start)
        self._whole = True
        prompt = self.task.prompt
        if isinstance(opening, Observation):
            prompt = f"{prompt}\n\n{frame(opening.content, OPENING_LIMIT)[0]}"
        if self.feedback:
            prompt = f"{prompt}\n\n{well_formed(self.feedback)}"
        self.transcript = [Message(role="system", content=env.system), Message(role="user", content=prompt)]
        return tuple(self.transcript)

    async def act(self, message: Message) -> Step:
        """Carry out one assistant message."""
        if self.over:
            raise AuthoringError(f"episode of {self.task.id} is over; nothing can be done in it any more")
        self.transcript.append(message)
        observations: list[Observation] = []
        try:
            for number, call in enumerate(message.tool_calls):
                if number and self.environment.one_call_per_message:
                    observations.append(self._refuse(call, LATER))
                    continue
                result = await self._call(call)
                if isinstance(result, Done):
                    self.answer = well_formed(result.answer)
                    objection = await self._objection(call)
                    self.over = objection is None
                    if objection is None:
                        break
                    result = objection
                observations.append(result)
            if not message.tool_calls:
                reply = await run(self.environment.on_message, message.content)
                if isinstance(reply, Done):
                    self.answer = well_formed(reply.answer)
                    objection = await self._objection()
                    self.over = objection is None
                    observations += [objection] if objection else []
                else:
                    observations.append(replace(reply, content=well_formed(reply.content)))
        except AgentError:
            self.over = True
            raise
        self.transcript.extend(o.message() for o in observations)
        self._counts["bytes_seen"] += sum(len(o.content.encode()) for o in observations)
        self.step = Step(observations=tuple(observations), done=self.over)
        return self.step

    async def _objection(self, call: ToolCall | None = None) -> Observation | None:
        """Return what speaks against an answer: once that it is a call without a name, and what the environment has
        against it, as often as it may."""
        env = self.environment
        text = nameless(self.answer, self.tools) if call is None and not self.sent_back else ""
        if not text and self.sent_back < env.objections:
            text = await run(env.objection, self.answer)
        if not text:
            return None
        self.sent_back += 1
        if call is None:
            return Observation(content=harmless(text), role="user")
        return Observation(content=harmless(text), name=call.name, call_id=call.id)

    async def _call(self, call: ToolCall) -> Observation | Done:
        self._counts["calls"] += 1
        tool = self.tools.get(call.name)
        if call.error is not None or tool is None:
            return self._refuse(call, call.error or f"there is no tool {call.name[:60]!r}; {self._to_do()}")
        try:
            arguments = tool.validate(call.arguments)
        except CallError as error:
            return self._refuse(call, str(error))
        decision = self.permissions.rule(tool)
        if decision == "ask":  # a person may take long to answer: not on the event loop
            decision = await off_loop(self.permissions.decide, tool, dict(call.arguments))
        if decision != "allow":
            (self._denied if decision == "deny" else self._dry_runs).append(tool.name)
            words = "permission denied" if decision == "deny" else "dry run: accepted, but not carried out"
            return Observation(content=words, name=tool.name, call_id=call.id, error=decision == "deny")
        try:
            result = await self._timed(tool, arguments)
        except AgentRLError:
            raise
        except SAYS_NO as error:
            self._counts["tool_errors"] += 1
            content, cut = frame(f"error: {error}", ERROR_LIMIT)
            return Observation(content=content, name=tool.name, call_id=call.id, error=True, truncated=cut)
        if isinstance(result, Done):
            return result
        if tool.terminal:
            return Done(text_of(result))
        content, cut = frame(text_of(result), tool.output_limit)
        return Observation(content=content, name=tool.name, call_id=call.id, truncated=cut)

    def _to_do(self) -> str:
        """Say which tools there are and how to end: small models invent a tool for that."""
        ends = [f"call {tool.name}" for tool in self.tools.values() if tool.terminal]
        if not ends and type(self.environment).on_message is Environment.on_message:
            ends = ["write your answer as a message without a call"]
        how = f"; to end, {' or '.join(ends)}" if ends else ""
        return f"the tools are: {', '.join(self.tools)}{how}"

    def _refuse(self, call: ToolCall, text: str) -> Observation:
        self._counts["bad_calls"] += 1
        content = f"error: {harmless(text[:ERROR_LIMIT])}"
        return Observation(content=content, name=call.name[:60], call_id=call.id, error=True)

    async def _timed(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """Run a tool within its time: its commands are cut off in time, and it must then come back by itself."""
        method = getattr(self.environment, tool.name)
        clock = asyncio.get_running_loop().time
        began = clock()
        if self.box is not None:
            self.box.until(tool.timeout_s)
        try:
            async with asyncio.timeout(tool.timeout_s + GRACE_S) as limit:
                return await run(method, **arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._counts["tool_timeouts"] += 1
            raise AgentError(f"tool {tool.name} ran longer than its {tool.timeout_s:g} s") from error
        finally:
            self.slowest = max(self.slowest, (clock() - began, tool.name))
            if self.box is not None:
                self.box.until(None)

    async def finish(self, ending: Ending = "done") -> Submission:
        """Kill the agent's processes and collect the artifacts that the verifier declared."""
        env = self.environment
        self.over = True
        happened, artifacts = ({}, {}) if self.box is None else await off_loop(self._left, self.box)
        return Submission(
            task=self.task,
            artifacts=artifacts,
            answer=self.answer,
            transcript=tuple(self.transcript),
            ledger={**happened, **self.ledger},
            ending=ending,
            state=await run(env.state),
        )

    def _left(self, box: TimedBox) -> tuple[dict[str, Any], dict[str, Any]]:
        """Kill the agent's processes; return what happened in the sandbox, and the artifacts. In one go, off the event
        loop: each way there and back costs as much as the work."""
        verifier, second = self.environment.verifier, self.environment.audit_verifier if self.auditing else None
        box.kill_all()
        happened = box.ledger()
        artifacts: dict[str, Any] = {}
        for artifact in verifier.artifacts:
            try:
                files = box.collect(artifact.path, max_bytes=artifact.max_bytes, max_files=artifact.max_files)
            except (FileNotFoundError, NotADirectoryError):
                files = {}  # the agent left nothing there, which is for the verifier to judge
            artifacts[artifact.path] = files
        for artifact in second.artifacts if second else ():
            if artifact.path not in artifacts:
                artifacts[artifact.path] = {}
                # What breaks a limit of the audit's own must not change the reward: the audit gets nothing.
                with suppress(FileNotFoundError, NotADirectoryError, AgentError):
                    artifacts[artifact.path] = box.collect(
                        artifact.path, max_bytes=artifact.max_bytes, max_files=artifact.max_files
                    )
        return happened, artifacts

    async def digest(self, *, times: bool = True) -> str:
        """Hash the sandbox's workspace; "" for an episode without one.

        What an episode writes carries the time of day; `times=False` leaves it out.
        """
        return "" if self.box is None else await self.box.aio.digest(times=times)

    async def state(self) -> str:
        """Hash where the episode stands: the sandbox's content, the environment's own state, what was seen last.

        Two episodes of a task with the same hash are in the same state, whatever they did before. "" where it cannot
        be told, for example because a file is being replaced: such a state equals no other.
        """
        seen = [(o.role, o.name, o.content) for o in self.step.observations] if self.step else []
        try:
            parts = [await self.digest(times=False), await run(self.environment.state), seen]
            return hashing.digest([*parts, self.answer, self.sent_back] if self.sent_back else parts)
        except (AgentError, OSError):
            return ""

    async def close(self) -> None:
        """Release the sandbox and what the environment holds."""
        self.over = True
        try:
            if self._started:
                self._started = False
                # After half a start, stop may miss what it would let go of; that must not hide why the start failed.
                with nullcontext() if self._whole else suppress(Exception):
                    await run(self.environment.stop)
        finally:
            await self._stack.aclose()


async def _to_its_end(start: Callable[[], Any]) -> Any:
    """Run `start` and return what it returns. When cancelled, wait for its end first: a thread cannot be stopped."""
    if inspect.iscoroutinefunction(start) or _untouched(start):
        return await run(start)
    work = asyncio.ensure_future(off_loop(Call(start)))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work}, timeout=START_S)
        if work.done():
            work.exception()  # looked at, so that nobody complains of it later
        raise


async def run(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an author's method: awaited when it is a coroutine, off the event loop when it is not."""
    if inspect.iscoroutinefunction(method):
        with Call(method):
            return await method(*args, **options)
    if _untouched(method):
        return method(*args, **options)
    return await off_loop(Call(method), *args, **options)


def _untouched(method: Callable[..., Any]) -> bool:
    """Tell whether the author left a method as the SDK has it: it takes no time, so it needs no thread."""
    return getattr(method, "__func__", method) is getattr(Environment, getattr(method, "__name__", ""), None)
