"""Names what an author did wrong, in the author's own class and line: no check should blame ours for it."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.episode import GRACE_S, Episode
from agentrl.envs.in_flight import is_authors, running
from agentrl.envs.play import Action, Played, Policy, Stop
from agentrl.envs.task_check import defined, fault_of
from agentrl.envs.tools import Tool, tools_of
from agentrl.types import Split, Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Failed(Exception):
    """A check that did not hold; the text is the evidence."""

    def __init__(self, evidence: str, fix: str = "") -> None:
        super().__init__(evidence)
        self.fix = fix


def task_of(environment: Environment, split: Split, level: int, index: int) -> Task:
    """Return the task with that index, once it is certain that it is one."""
    task: Any = environment.task(split, level, index)
    if fault := fault_of(task):
        method = f"{type(environment).__name__}.task({split!r}, {level}, {index}){defined(type(environment).task)}"
        raise Failed(f"{method} {fault[0]}", fault[1])
    checked: Task = task
    return checked


async def verdict_of(verifier: Verifier, submission: Submission, context: Context) -> Verdict:
    """Call an author's `verify` once, directly; what is wrong with it is said with its class and line."""
    method = f"{type(verifier).__name__}.verify{defined(type(verifier).verify)}"
    try:
        answer: Any = verifier.verify(submission, context)
        if not inspect.isawaitable(answer):
            raise Failed(f"{method} is not async: it returned {answer!r:.60}", "write `async def verify(...)`")
        answer = await answer
    except Failed:
        raise
    except Exception as error:
        raise Failed(
            f"{method} raises {type(error).__name__}: {error}{place(error)}",
            "fix the verifier: it must return a Verdict for every submission, score 0 for what it cannot read",
        ) from error
    if not isinstance(answer, Verdict):
        value = f"{answer!r:.40}"
        raise Failed(
            f"{method} returned {value} of type {type(answer).__name__}, not a Verdict",
            f"return Verdict(score={value if isinstance(answer, int | float) else '...'})",
        )
    return answer


def place(error: BaseException) -> str:
    """Return where an exception came from: the innermost line of the author's code, or else the last."""
    trace, places = error.__traceback__, []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    ours = [at for at in places if is_authors(at[0])]
    file, line = (ours or places or [("", 0)])[-1]
    return f" ({file}:{line})" if file else ""


# Tools that do not come back ------------------------------------------------------------------------------------

ENDLESS = "look for an endless loop in it or in what it runs in the sandbox; a tool that needs longer has a timeout_s"


def in_time(kind: type[Environment], task_id: str, slowest: tuple[float, str]) -> None:
    """Fail when a tool call used up all of its time."""
    seconds, name = slowest
    tool = tools_of(kind).get(name)
    if tool is not None and seconds >= tool.timeout_s:
        raise Failed(f"{task_id}: {describe(kind, tool, seconds)}", ENDLESS)


def describe(kind: type[Environment], tool: Tool, seconds: float) -> str:
    """Say that a tool used up its time, and where it still runs."""
    line = f"tool {tool.name!r} of {kind.__name__}{defined(getattr(kind, tool.name))} used up its {tool.timeout_s:g} s"
    for call in running():
        if call.name.endswith(f".{tool.name}") and call.overdue_s > 0:
            at = call.place()
            return f"{line} and still runs{f' at {at}' if at else ''}"
    return f"{line}{' and did not come back' if seconds >= tool.timeout_s + GRACE_S else ''}"


def guarded(policy: Policy, kind: type[Environment]) -> Policy:
    """Stop an episode before its next action once a tool call used up its time: the other calls would too."""

    async def choose(episode: Episode) -> Action | Stop:
        in_time(kind, episode.task.id, episode.slowest)
        return await policy(episode)

    return choose


def timely(kind: type[Environment], played: Played) -> Played:
    """Return the episode if no tool call used up its time."""
    in_time(kind, played.task.id, played.slowest)
    return played


def leave(code: int) -> int:
    """Return the exit code, or end the process with it when a method never came back: its thread cannot be ended."""
    if any(call.overdue_s > 0 for call in running()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
