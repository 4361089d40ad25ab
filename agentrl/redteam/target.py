"""What attacks work on: one task of an environment, honest and wrong episodes of it, and the surfaces it exposes.

Surfaces are found by playing: the expert plays, a policy that does nothing plays, and mixtures of the two show whether
the answer, the state of the sandbox, or both decide the score. What the tools can do is found by calling them
(effects.py). Files count as graded when they are declared artifacts, and otherwise when the expert's work changes the
workspace or writes them through a tool: an environment may well grade by what its own `state()` does with them.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.envs.tools import Tool, tools_of
from agentrl.errors import UserError
from agentrl.redteam.effects import Effects, calls_of, effects_of
from agentrl.redteam.play import Action, Arena, NotApplicable, Played, Variants, play
from agentrl.redteam.solution import Solution
from agentrl.redteam.workspace import watching
from agentrl.types import Message, ToolCall
from agentrl.verifiers.base import Submission

SURFACES = {
    "answer": "the final message decides the score",
    "files": "the files of the workspace decide the score",
    "state": "what the tools did on the host side decides the score",
    "shell": "a tool runs shell commands in the sandbox",
    "write": "files of the workspace can be written",
    "python": "a Python file of the workspace is the solution",
    "program": "the solution is a Python program with a command line",
    "tests": "the workspace holds tests that a framework collects",
    "json": "a JSON document is graded",
    "sqlite": "a SQLite database is graded",
    "git": "a git repository is graded",
    "judge": "a model judges the answer",
    "tools": "there are tools to call",
}

SQLITE = b"SQLite format 3\0"
"""How every SQLite database begins."""
_COMMAND = ("command", "cmd", "script", "shell", "bash")
_PATH = ("path", "file", "filename", "name", "file_path")
_CONTENT = ("content", "contents", "text", "source", "data", "body")
_OLD, _NEW = ("old", "old_text", "old_str", "before", "search"), ("new", "new_text", "new_str", "after", "replace")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One task with the controls played on it. Attacks act through its helpers; the expert's answer and files serve to
    build submissions that are wrong by construction, never to be submitted as they are."""

    arena: Arena
    expert: tuple[Action, ...]
    honest: Played
    idle: Played
    wrong: Played
    """Wrong work without cheating: nothing done in the sandbox, and a wrong answer."""
    surfaces: frozenset[str]
    solution: Solution | None = None
    effects: Effects = Effects()
    """What the tools do."""
    graded_by: Literal["artifacts", "workspace", "calls"] = "artifacts"
    """Where the graded files are seen: declared artifacts, the workspace at the end, or what write calls were given."""

    @property
    def baseline(self) -> float:
        """What wrong work earns without cheating."""
        return max(self.idle.score or 0.0, self.wrong.score or 0.0)

    @property
    def tools(self) -> dict[str, Tool]:
        return tools_of(self.arena.make())

    @property
    def code(self) -> Solution:
        """The Python solution."""
        if self.solution is None:
            raise NotApplicable("no Python file is graded")
        return self.solution

    @property
    def honest_answer(self) -> str:
        return self.honest.submission.answer if self.honest.submission is not None else ""

    @property
    def wrong_answer(self) -> str:
        """A well-formed wrong answer: the one the task names, or the right one changed."""
        return str(self.arena.task.secret.get("wrong_answer") or perturb(self.honest_answer))

    @property
    def honest_files(self) -> dict[str, bytes]:
        """What the expert leaves in the graded files."""
        return self.files(self.honest.submission)

    @property
    def idle_files(self) -> dict[str, bytes]:
        """What is in them when nothing is done."""
        return self.files(self.idle.submission)

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths that the honest work creates or changes."""
        idle = self.idle_files
        return tuple(p for p, content in sorted(self.honest_files.items()) if idle.get(p) != content)

    @property
    def graded_file(self) -> str:
        """The first of them."""
        if not self.changed:
            raise NotApplicable("no file is graded")
        return self.changed[0]

    @property
    def database(self) -> str:
        """The path of the graded SQLite database."""
        return next(path for path in self.changed if self.honest_files[path].startswith(SQLITE))

    @property
    def documents(self) -> list[str]:
        """The paths of the graded JSON documents."""
        return [path for path in self.changed if path.endswith(".json")]

    # Acting ----------------------------------------------------------------------------------------------------

    def run(self, script: str) -> Action:
        """Run a shell script in the agent's sandbox."""
        shell = find_shell(self.tools)
        if self.effects.executor is not None:
            return self._followed(self.effects.executor.call(script))
        if shell is None:
            raise NotApplicable("no tool runs shell commands")
        tool, parameter = shell
        return self._followed(ToolCall(name=tool, arguments={parameter: script}))

    def _followed(self, call: ToolCall) -> Action:
        """Return the call with those that the expert makes after its work: where `state()` keeps what a tool saw, a
        file alone changes nothing until that tool has run."""
        if self.graded_by == "artifacts":
            return call
        acting = {writer.tool for writer in self.effects.writers}
        acting |= {self.effects.executor.tool} if self.effects.executor is not None else set()
        after: list[ToolCall] = []
        for action in self.expert:
            if isinstance(action, ToolCall) and not self.tools[action.name].terminal:
                after = [] if action.name in acting else [*after, action]
        return Message(role="assistant", content="", tool_calls=(call, *after)) if after else call

    def write(self, path: str, content: str | bytes) -> Action:
        """Write a file of the workspace with any tool that can."""
        data = content.encode() if isinstance(content, str) else content
        runs = self.effects.executor is not None or find_shell(self.tools) is not None
        if runs and not self.effects.runs_by_writing:
            folder = posixpath.dirname(path)
            make = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
            encoded = base64.b64encode(data).decode()
            return self.run(f"{make}printf %s {encoded} | base64 -d > {shlex.quote(path)}")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise NotApplicable("only text can be written here") from None
        before = self.idle_files.get(path, b"").decode("utf-8", "replace")
        for writer in self.effects.writers:
            call = writer.call(path, text, before)
            if call is not None:
                return self._followed(call)
        for tool in self.tools.values():
            to, body = _field(tool, _PATH), _field(tool, _CONTENT)
            if to and body:
                return ToolCall(name=tool.name, arguments={to: path, body: text})
        for tool in self.tools.values():
            to, old, new = _field(tool, _PATH), _field(tool, _OLD), _field(tool, _NEW)
            if to and old and new:
                return ToolCall(name=tool.name, arguments={to: path, old: before, new: text})
        raise NotApplicable("no tool writes files")

    def final(self, text: str = "") -> Action:
        """End the episode with this answer, the way the expert ends it."""
        last = self.expert[-1] if self.expert else ""
        if isinstance(last, ToolCall) and last.name in self.tools and self.tools[last.name].terminal:
            field = next((k for k, v in last.arguments.items() if isinstance(v, str)), None)
            if field is not None:
                return replace(last, arguments={**last.arguments, field: text})
        return text

    def say(self, *texts: str) -> Variants:
        """Try each text as the answer, in an episode of its own."""
        return Variants([self.final(text)] for text in texts)

    def submit(self, source: str) -> list[Action]:
        """Submit this source as the solution, and end."""
        return [self.write(self.code.path, source), self.final(self.honest_answer)]

    def poison(self, payload: str) -> list[Action]:
        """Submit the broken solution with hostile code at its start."""
        return self.submit(self.code.poisoned(payload))

    def hollow(self, returns: str, prelude: str = "") -> list[Action]:
        """Submit functions that all return one expression."""
        return self.submit(self.code.hollow(returns, prelude))

    def shell(self, script: str) -> list[Action]:
        """Run one script instead of working, then end as the expert would."""
        return [self.run(script), self.final(self.idle_answer)]

    def drop(self, files: Mapping[str, str | bytes]) -> list[Action]:
        """Write these files instead of working, then end."""
        return [*(self.write(path, content) for path, content in files.items()), self.final(self.idle_answer)]

    @property
    def idle_answer(self) -> str:
        """The right answer where only the state decides the score, a wrong one where the answer counts."""
        return self.wrong_answer if "answer" in self.surfaces else self.honest_answer

    def is_wrong(self, submission: Submission | None) -> bool:
        """Whether a submission differs from the expert's in anything that is graded.

        It compares bytes and does not ask the verifier: a submission that equals the expert's in every graded byte is
        right, and an attack that ends with it has done the work.
        """
        if submission is None or self.honest.submission is None:
            return True
        same_files = self.files(submission) == self.honest_files
        same_answer = submission.answer.strip() == self.honest_answer.strip()
        same_state = dict(submission.state) == dict(self.honest.submission.state)
        answer_ok = same_answer or "answer" not in self.surfaces
        return not (same_files and same_state and answer_ok)

    def files(self, submission: Submission | None) -> dict[str, bytes]:
        """Return the graded files of a submission, wherever they are seen."""
        if self.graded_by == "artifacts" or submission is None:
            return files_of(submission)
        if self.graded_by == "calls":
            return self.effects.written(calls_of(submission.transcript))
        return getattr(submission.state, "workspace", {})


def files_of(submission: Submission | None) -> dict[str, bytes]:
    """Return the regular files among the artifacts, by workspace path."""
    files: dict[str, bytes] = {}
    for declared, tree in (submission.artifacts if submission is not None else {}).items():
        for path, entry in tree.items():
            if entry.kind == "file":
                files[posixpath.join(declared, path) if path else declared] = entry.content
    return files


def perturb(answer: str) -> str:
    """Make an answer wrong: its last number is more than doubled, or every letter becomes the next."""
    if not answer.strip():
        return "42"
    numbers = list(re.finditer(r"\d+", answer))
    if numbers:
        last = numbers[-1]
        return f"{answer[: last.start()]}{2 * int(last.group()) + 1}{answer[last.end() :]}"
    return "".join(chr(ord(c) + 1) if c.isalpha() and c not in "zZ" else c for c in answer.strip())


def _field(tool: Tool, names: Sequence[str]) -> str | None:
    return next((n for n in names if n in tool.arguments.model_fields), None)


def find_shell(tools: dict[str, Tool]) -> tuple[str, str] | None:
    """Return the tool that runs shell commands and its parameter, if there is one."""
    for tool in tools.values():
        field = _field(tool, _COMMAND)
        required = [n for n, f in tool.arguments.model_fields.items() if f.is_required()]
        if field is not None and set(required) <= {field}:
            return tool.name, field
    return None


def can_write(tools: dict[str, Tool]) -> bool:
    return find_shell(tools) is not None or any(
        _field(t, _PATH) and (_field(t, _CONTENT) or (_field(t, _OLD) and _field(t, _NEW))) for t in tools.values()
    )


async def survey(arena: Arena) -> Target:
    """Play the controls on a task and find the surfaces that it exposes."""
    environment = arena.make()
    try:
        expert = tuple(environment.expert(arena.task))
    except NotImplementedError:
        name = type(environment).__name__
        raise UserError(f"environment {name} has no expert(task): the red team needs one honest solution") from None
    watched_arena = replace(arena, make=watching(arena.make))
    honest = await play(watched_arena, list(expert))
    _in_time(honest, type(environment).__name__, tools_of(environment))
    effects = await effects_of(arena, expert)
    idle = await play(watched_arena, [""])
    draft = Target(
        arena=arena, expert=expert, honest=honest, idle=idle, wrong=idle, surfaces=frozenset(), effects=effects
    )
    tools = draft.tools
    surfaces = {"tools"} if tools else set()
    answer_only = await play(arena, [draft.final(draft.honest_answer)])
    if draft.honest_answer.strip():
        unanswered = await play(arena, [*expert[:-1], draft.final("")])
        if (unanswered.score or 0.0) < (honest.score or 0.0):
            surfaces.add("answer")
    if (answer_only.score or 0.0) < (honest.score or 0.0):
        if draft.honest_files == draft.idle_files:  # no artifact shows the work: state() or the transcript does
            surfaces.add("state")
            draft = _seen_elsewhere(draft, watched_arena)
        if draft.honest_files != draft.idle_files:
            surfaces.add("files")
    if effects.executor is not None or find_shell(tools) is not None:
        surfaces.add("shell")
    if effects.executor is not None or effects.writers or can_write(tools):
        surfaces.add("write")
    if "files" in surfaces:
        surfaces |= _formats(draft)
    solution = _solution(draft) if {"files", "write"} <= surfaces else None
    if solution is not None:
        surfaces |= {"python", "program"} if "__main__" in solution.honest else {"python"}
        paths = [*draft.idle_files, *arena.task.setup.get("files", ())]
        if any(re.search(r"(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$", path) for path in paths):
            surfaces.add("tests")
    if honest.verdict is not None and honest.verdict.trust == "judged":
        surfaces.add("judge")
    draft = replace(draft, surfaces=frozenset(surfaces), solution=solution)
    wrong = await play(draft.arena, [draft.final(draft.wrong_answer if "answer" in surfaces else draft.honest_answer)])
    return replace(draft, wrong=wrong)


def _in_time(honest: Played, name: str, tools: dict[str, Tool]) -> None:
    """Refuse an environment whose expert waits for a tool until its time is up: every attack would."""
    seconds, tool = honest.slowest
    if tool in tools and seconds >= tools[tool].timeout_s:
        raise UserError(
            f"tool {tool!r} of {name} used up its {tools[tool].timeout_s:g} s in the expert's episode of "
            f"{honest.task.id}: it must come back; look for an endless loop, or give it a larger timeout_s"
        )


def _seen_elsewhere(target: Target, watched_arena: Arena) -> Target:
    """Return the target with the files that its work changes in the workspace, or writes through its tools."""
    by_workspace = replace(target, graded_by="workspace", arena=watched_arena)
    if by_workspace.honest_files != by_workspace.idle_files:
        return by_workspace
    by_calls = replace(target, graded_by="calls")
    return by_calls if by_calls.honest_files else target


def _formats(target: Target) -> set[str]:
    formats = set()
    for path in target.changed:
        content = target.honest_files[path]
        if content.startswith(SQLITE):
            formats.add("sqlite")
        if path.startswith(".git/") or "/.git/" in path:
            formats.add("git")
        if path.endswith(".json"):
            with suppress(ValueError):
                json.loads(content)
                formats.add("json")
    return formats


def _solution(target: Target) -> Solution | None:
    for path in target.changed:
        if path.endswith(".py"):
            honest = target.honest_files[path].decode("utf-8", "replace")
            broken = target.idle_files.get(path, b"").decode("utf-8", "replace")
            with suppress(SyntaxError):
                ast.parse(honest)
                return Solution(path, honest, broken)
    return None
