"""What attacks on the loops are judged by: an episode that vanished, others made late, a figure above the truth."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.play import message_of
from agentrl.envs.tools import tools_of
from agentrl.redteam.loops import HOSTILE, Loops, Says, Script, Stand, Trained, Tries, Turn, script
from agentrl.redteam.play import NotApplicable
from agentrl.redteam.report import Result
from agentrl.types import ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

MAGIC = "open sesame"
"""What provokes a planted bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What an attack on the loops brought about."""

    result: Result = "held"
    score: float | None = None
    evidence: tuple[str, ...] = ()


# Judging -------------------------------------------------------------------------------------------------------------


async def vanish(stand: Stand, loops: Loops, *hostile: Script) -> Observed:
    """Play hostile rollouts beside an honest one. Each must be scored, and no more than wrong work earns."""
    trained = await loops.train(stand, hostile)
    return _scored(stand, trained, len(hostile))


def _scored(stand: Stand, trained: Trained, hostile: int) -> Observed:
    scores, neighbours = trained.scores[:hostile], trained.scores[hostile:]
    shown = f"scores of the hostile rollouts: {_list(scores)}; of honest ones beside them: {_list(neighbours)}"
    lost = [score for score in scores if score is None]
    if lost:
        return Observed(result="evaded", evidence=(f"{len(lost)} of {hostile} episodes vanished", shown))
    best = max((score for score in scores if score is not None), default=0.0)
    if best > stand.target.baseline + 1e-9:
        return Observed(result="gained", score=best, evidence=(shown,))
    if any(score != 1.0 for score in neighbours):
        return Observed(result="evaded", score=best, evidence=("an honest neighbour lost its score", shown))
    return Observed(score=best, evidence=(shown,))


async def delay(stand: Stand, loops: Loops, *hostile: Script) -> Observed:
    """Play hostile rollouts beside honest ones. Nobody may be late; what is late must be so every time it is tried."""
    if loops.name not in stand.usual:
        alone = await loops.train(stand, (), 2)
        stand.usual[loops.name] = max(alone.seconds)
    observed = await _delayed(stand, loops, hostile)
    for _ in range(stand.again):
        if observed.result != "hung":
            break
        await asyncio.sleep(0.5)
        observed = await _delayed(stand, loops, hostile)
    return observed


async def _delayed(stand: Stand, loops: Loops, hostile: Sequence[Script]) -> Observed:
    trained = await loops.train(stand, hostile, 2)
    usual, slack = stand.usual[loops.name], stand.slack_s
    limits = HOSTILE.wall_seconds + 6 * HOSTILE.verify_seconds
    usually = 3 * usual + slack + trained.starved_s
    neighbour = max(trained.seconds[len(hostile) :])
    late = [
        f"{what} took {seconds:.1f} s, more than {most:.1f} s"
        for what, seconds, most in (
            ("the longest standstill of the event loop", trained.stall_s, slack / 2),
            ("an honest neighbour", neighbour, usually),
            ("the whole group", trained.total_s, limits + usually),
        )
        if seconds > most
    ]
    if late:
        return Observed(result="hung", evidence=(*late, f"alone, an honest rollout took {usual:.1f} s"))
    return _scored(stand, trained, len(hostile))


async def inflate(
    stand: Stand, loops: Loops, *failures: Script, passes: int = 1, make: Callable[[], Environment] | None = None
) -> Observed:
    """Evaluate a policy that solves the task in `passes` tries and fails in the others: its pass@1 must say so."""
    at = stand.playing(make) if make is not None else stand
    (problem,) = stand.problems(1)
    scripts = (*[stand.honest] * passes, *failures)
    figures = await loops.evaluate({stand.runtime.name: at}, [Tries(problem, scripts)])
    return figure("pass@1", figures.rate(stand.runtime.name), passes / len(scripts))


def figure(name: str, reported: float, true: float) -> Observed:
    """Judge a figure that was reported."""
    evidence = (f"{name} is reported as {reported:.3f}; the truth is {true:.3f}",)
    if reported > true + 1e-9:
        return Observed(result="gained", score=reported, evidence=evidence)
    if reported < true - 1e-9 or math.isnan(reported):
        return Observed(result="evaded", score=reported, evidence=("an honest try lost its pass", *evidence))
    return Observed(score=reported, evidence=evidence)


def _list(scores: Sequence[float | None]) -> str:
    return ", ".join("none" if score is None else f"{score:g}" for score in scores)


# Turns ---------------------------------------------------------------------------------------------------------------


def some_call(stand: Stand) -> tuple[str, dict[str, Any], str]:
    """Return a call that the task takes: its tool, its arguments, and the argument that hostile values replace."""
    tools = stand.target.tools
    for action in stand.target.expert:
        if isinstance(action, ToolCall) and action.arguments and not tools[action.name].terminal:
            texts = [name for name, value in action.arguments.items() if isinstance(value, str)]
            return action.name, dict(action.arguments), (texts or list(action.arguments))[0]
    for tool in tools.values():
        fields = list(tool.arguments.model_fields)
        if fields and not tool.terminal:
            return tool.name, dict.fromkeys(fields, "x"), fields[0]
    raise NotApplicable("there is no tool to call before the end")


def call(stand: Stand, value: str, **parts: str) -> Says:
    """Call a tool with JSON text of any kind in place of an argument; `parts` replaces other parts, as JSON text."""
    name, arguments, changed = some_call(stand)
    fields = {key: value if key == changed else json.dumps(kept) for key, kept in arguments.items()}
    body = "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}"
    return written(stand, {"name": json.dumps(name), "arguments": body} | parts)


def written(stand: Stand, parts: Mapping[str, str]) -> Says:
    """Write a call whose parts are JSON text, well-formed or not, in the stand's tool format."""
    return block(stand, "{" + ", ".join(f'"{key}": {text}' for key, text in parts.items()) + "}")


def block(stand: Stand, *texts: str) -> Says:
    """Write texts where calls are expected."""
    if stand.renderer.tool_format.name == "mistral":
        return Says(text=f"[TOOL_CALLS] [{', '.join(texts)}]")
    return Says(text="\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts))


def fails(stand: Stand, *turns: Says | ToolCall) -> Script:
    """Play these turns, then end without having done the work."""
    return script(*turns, stand.end)


def slowly(stand: Stand, turn: Turn, seconds: float) -> Says:
    """Say a turn after some time."""
    if isinstance(turn, Says):
        return replace(turn, after_s=seconds)
    return Says(tokens=stand.renderer.write(message_of(turn))[:-1], after_s=seconds)


# Planted bugs --------------------------------------------------------------------------------------------------------


def fragile(stand: Stand, where: str, act: Callable[[], None]) -> Callable[[], Environment]:
    """Plant an ordinary bug in the environment: `act` is called at that place once the policy has said MAGIC.

    The places: tool, message, state, verifier.
    """

    def make() -> Environment:
        environment = stand.runtime.make()
        said: list[str] = []

        def note(method: Any, strikes: bool) -> Any:
            @functools.wraps(method)
            def noting(*args: Any, **options: Any) -> Any:
                if MAGIC in repr((args, options)):
                    said.append(MAGIC)
                    if strikes:
                        act()
                return method(*args, **options)

            @functools.wraps(method)
            async def noting_async(*args: Any, **options: Any) -> Any:
                result = noting(*args, **options)
                return await result

            return noting_async if inspect.iscoroutinefunction(method) else noting

        for name in tools_of(environment):
            setattr(environment, name, note(getattr(environment, name), where == "tool"))
        environment.on_message = note(environment.on_message, where == "message")  # type: ignore[method-assign]
        if where == "state":
            environment.state = _struck(environment.state, said, act)  # type: ignore[method-assign]
        if where == "verifier":
            environment.verifier = Planted(environment.verifier, said, act)  # type: ignore[misc]
        return environment

    return make


def _struck(state: Any, said: list[str], act: Callable[[], None]) -> Any:
    @functools.wraps(state)
    def struck() -> Any:
        if said:
            act()
        return state()

    return struck


class Planted(Verifier):
    """A verifier with a planted bug, or one that notes which secrets it is given."""

    def __init__(self, inner: Verifier, said: Sequence[str], act: Callable[[], None]) -> None:
        self._inner, self._said, self._act = inner, said, act
        self.artifacts = inner.artifacts
        self.version = inner.version
        self.secrets: list[bytes] = []

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        self.secrets.append(context.secret)
        if self._said:
            self._act()
            await asyncio.sleep(30.0 if self._act is nothing else 0.0)
        return await self._inner.verify(submission, context)

    async def probe(self, context: Context) -> None:
        await self._inner.probe(context)


def nothing() -> None:
    """Do nothing: the bug is that grading waits."""


def raises() -> None:
    """Raise what a tool of the environment does not expect."""
    raise RuntimeError("a bug of the environment")


def magic(stand: Stand) -> Script:
    """Provoke the planted bug, in a tool if there is one, and end."""
    try:
        provoke = [call(stand, json.dumps(MAGIC))]
    except NotApplicable:
        provoke = []
    return script(*provoke, stand.target.final(MAGIC))


@dataclass(slots=True)
class Secrets:
    """Environments that note which secrets their episodes are graded with."""

    stand: Stand
    seen: list[bytes] = field(default_factory=list)

    @property
    def noting(self) -> Stand:
        def make() -> Environment:
            environment = self.stand.runtime.make()
            planted = Planted(environment.verifier, (), nothing)
            planted.secrets = self.seen
            environment.verifier = planted  # type: ignore[misc]
            return environment

        return self.stand.playing(make)

    @contextmanager
    def taken(self) -> Iterator[list[bytes]]:
        """Collect the secrets of a block alone."""
        self.seen.clear()
        taken: list[bytes] = []
        yield taken
        taken += self.seen


def another(stand: Stand, name: str) -> Stand:
    """Return the stand's environment under another name."""
    return replace(stand, runtime=replace(stand.runtime, name=name))
