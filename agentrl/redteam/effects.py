"""Finds what an environment's tools can do, by calling them: run a command, run Python, write a file.

Names say nothing sure: `python(code)` may run code, `note(text)` may write a file. So each tool is called with small
harmless probes in episodes that are given up, and the sandbox, the observation and `state()` show what came of it. An
author may declare instead what a parameter does: `tool_effects = {"send.body": "plain"}`.
"""

from __future__ import annotations

import inspect
import posixpath
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Abandoned, Action, Stop
from agentrl.envs.play import play as play_episode
from agentrl.envs.tools import Tool, tools_of
from agentrl.errors import AuthoringError, InfraError
from agentrl.hashing import canonical
from agentrl.redteam.play import Arena
from agentrl.sandboxes.base import Entry, off_loop
from agentrl.types import Message, ToolCall

Form = Literal["shell", "quoted", "argv", "program", "python", "expression"]
"""How a parameter takes a command: a shell's text, words of a command, a list of words, a program and its arguments,
Python statements, or one Python expression."""
FORMS: tuple[Form, ...] = ("shell", "quoted", "python", "expression")
PROBE_FILE = "agentrl_probe.txt"
MARK = "agentrl-42-probe"
"""What the probes print; their own text holds a sum instead, so that a copy of it is no sign of execution."""
ON_HOST = "agentrl-on-7-host"
HARMLESS = ("SELECT 1", "1")
"""Texts that languages other than a shell's and Python's take."""
MAX_PROBES = 60
"""Episodes spent on one environment's tools."""


@dataclass(frozen=True, slots=True)
class Executor:
    """A tool that runs what it is told."""

    tool: str
    parameter: str
    form: Form
    others: Mapping[str, Any] = field(default_factory=dict)
    """The other arguments of a call that worked."""
    arguments: str = ""
    """For the form `program`: the parameter with the list of arguments."""

    def call(self, script: str) -> ToolCall:
        """Return the call that runs a shell script."""
        command = ["sh", "-c", script]
        run = f"__import__('subprocess').run({command!r}, capture_output=True, text=True, errors='replace')"
        texts: dict[Form, Any] = {
            "shell": script,
            "quoted": shlex.join(command),
            "argv": command,
            "program": "sh",
            "python": f"_done = {run}\nprint(_done.stdout + _done.stderr)",
            "expression": f"{run}.stdout",
        }
        filled = {**self.others, self.parameter: texts[self.form]}
        if self.form == "program":
            filled[self.arguments] = command[1:]
        return ToolCall(name=self.tool, arguments=filled)


@dataclass(frozen=True, slots=True)
class Writer:
    """A tool that writes text into a file."""

    tool: str
    content: str
    path: str = ""
    """The parameter with the path; "" when the tool chooses the file itself."""
    old: str = ""
    """The parameter with the text to replace, where only part of a file is written."""
    fixed: str = ""
    """The file it writes when there is no parameter for the path."""
    others: Mapping[str, Any] = field(default_factory=dict)

    def call(self, path: str, text: str, before: str) -> ToolCall | None:
        """Return the call that makes this the file's whole text; None where the tool cannot."""
        if not self.path and path != self.fixed:
            return None
        filled = {**self.others, self.content: text}
        if self.path:
            filled[self.path] = path
        if self.old:
            filled[self.old] = before
        return ToolCall(name=self.tool, arguments=filled)


@dataclass(frozen=True, slots=True)
class Effects:
    """What the tools of an environment do."""

    executor: Executor | None = None
    writers: tuple[Writer, ...] = ()
    unclear: tuple[str, ...] = ()
    """Tools that take free text and refused every probe: nobody knows what they do."""
    sandbox: bool = False
    """Whether episodes have a sandbox."""

    @property
    def runs_by_writing(self) -> bool:
        """Whether the tool that executes does so by writing a file, which it then runs."""
        return self.executor is not None and any(writer.tool == self.executor.tool for writer in self.writers)

    def written(self, calls: Sequence[ToolCall]) -> dict[str, bytes]:
        """Return what these calls write, by path."""
        files: dict[str, bytes] = {}
        for call in calls:
            for writer in self.writers:
                text = call.arguments.get(writer.content)
                path = call.arguments.get(writer.path, writer.fixed) if writer.path else writer.fixed
                if call.name == writer.tool and isinstance(text, str) and isinstance(path, str) and path:
                    files[path] = text.encode("utf-8", "replace")
        return files


@dataclass(slots=True)
class _Seen:
    """What came of one probe."""

    accepted: bool = False
    output: str = ""
    before: dict[str, Entry] = field(default_factory=dict)
    after: dict[str, Entry] = field(default_factory=dict)
    state: str = ""
    box_sees_host: bool = False
    sandbox: bool = False
    timed_out: bool = False

    def changed(self) -> dict[str, str]:
        """Return the text of every file that the probe created or changed."""
        return {
            path: entry.content.decode("utf-8", "replace")
            for path, entry in self.after.items()
            if entry.kind == "file" and self.before.get(path) != entry
        }


_known: dict[type[Environment], Effects] = {}
"""What was found out in this process."""


async def effects_of(arena: Arena, expert: Sequence[Action]) -> Effects:
    """Probe an environment's tools, once per class."""
    kind = type(arena.make())
    if kind not in _known:
        with tempfile.NamedTemporaryFile(prefix="agentrl-probe-") as host_file:
            _known[kind] = await _Prober(arena, list(expert), host_file.name).run()
    return _known[kind]


class _Prober:
    def __init__(self, arena: Arena, expert: list[Action], host_file: str) -> None:
        self.arena, self.expert, self.host_file = arena, expert, host_file
        self.environment = arena.make()
        self.declared = dict(self.environment.tool_effects)
        self.left = MAX_PROBES
        self.sandbox = False
        self.paths: list[str] = []
        """Files of the workspace at the start."""

    async def run(self) -> Effects:
        executor: Executor | None = None
        writers: list[Writer] = []
        unclear: list[str] = []
        for tool in tools_of(self.environment).values():
            texts, lists = _parameters(tool)
            texts = [name for name in texts if self.declared.get(f"{tool.name}.{name}") != "plain"]
            lists = [name for name in lists if self.declared.get(f"{tool.name}.{name}") != "plain"]
            declared = self._declared(tool, texts)
            if declared is not None:
                executor = executor or (declared if isinstance(declared, Executor) else None)
                writers += [declared] if isinstance(declared, Writer) else []
                continue
            if not texts and not lists:
                continue
            runs, accepted = await self._executor(tool, texts, lists)
            executor = executor or runs
            writes, taken = await self._writer(tool, texts)
            writers += writes
            if runs is None and not accepted and not taken and not await self._looks_only(tool, texts):
                unclear.append(tool.name)
        return Effects(executor, tuple(writers), tuple(unclear) if self.sandbox else (), self.sandbox)

    def _declared(self, tool: Tool, texts: Sequence[str]) -> Executor | Writer | None:
        by_effect = {self.declared.get(f"{tool.name}.{name}"): name for name in texts}
        for form in ("shell", "python"):
            if form in by_effect:
                return Executor(tool.name, by_effect[form], form, self._base(tool)[0])
        if "content" in by_effect:
            return Writer(tool.name, by_effect["content"], by_effect.get("path", ""), others=self._base(tool)[0])
        return None

    def _base(self, tool: Tool) -> tuple[dict[str, Any], list[Action]]:
        """Return arguments that the tool should take, and the actions that come before such a call."""
        for at, action in enumerate(self.expert):
            if isinstance(action, ToolCall) and action.name == tool.name:
                return dict(action.arguments), self.expert[:at]
        properties = tool.schema()["function"]["parameters"].get("properties", {})
        required = {name for name, info in tool.arguments.model_fields.items() if info.is_required()}
        return {name: _filler(schema) for name, schema in properties.items() if name in required}, []

    async def _executor(self, tool: Tool, texts: list[str], lists: list[str]) -> tuple[Executor | None, bool]:
        """Look for a parameter whose text is executed; also tell whether any probe was accepted."""
        base, before = self._base(tool)
        accepted = False
        candidates = [Executor(tool.name, name, form, base) for name in texts for form in FORMS]
        candidates += [Executor(tool.name, name, "argv", base) for name in lists]
        candidates += [Executor(tool.name, name, "program", base, rest) for name in texts for rest in lists]
        script = (
            f"echo agentrl-$((6*7))-probe; test -e {self.host_file} && echo agentrl-on-$((3+4))-host "
            "|| echo agentrl-$((6*7))-probe > agentrl_probe_out"
        )
        for candidate in candidates:
            seen = await self._try(before, candidate.call(script))
            if seen.timed_out:  # each further probe would wait as long
                return None, False
            accepted = accepted or seen.accepted
            effect = "\n".join([seen.output, *seen.changed().values()])  # not state(): that may run files by itself
            if MARK not in effect:
                continue
            if ON_HOST in effect and not seen.box_sees_host:
                raise AuthoringError(
                    f"tool {tool.name!r} of {type(self.environment).__name__} runs what the policy writes "
                    f"({candidate.parameter}) on the host, outside every sandbox; run it in the sandbox: "
                    "self.box.exec([...]) or self.box.python(...)"
                )
            return candidate, True
        return None, accepted

    async def _writer(self, tool: Tool, texts: list[str]) -> tuple[list[Writer], bool]:
        """Look for a parameter whose text ends up in a file of the workspace, or in what `state()` returns."""
        base, before = self._base(tool)
        accepted = False
        text = "agentrl probe content"
        for path, content in permutations(texts, 2):
            call = ToolCall(name=tool.name, arguments={**base, path: PROBE_FILE, content: text})
            seen = await self._try(before, call)
            if seen.timed_out:
                return [], False
            accepted = accepted or seen.accepted
            if any(posixpath.basename(at) == PROBE_FILE and text in body for at, body in seen.changed().items()):
                return [Writer(tool.name, content, path, others=base)], True
            if PROBE_FILE in seen.state and text in seen.state:
                return [Writer(tool.name, content, path, others=base)], True
        for content in texts:
            seen = await self._try(before, ToolCall(name=tool.name, arguments={**base, content: text}))
            accepted = accepted or seen.accepted
            for at, body in seen.changed().items():
                if text in body:
                    earlier = seen.before[at].content.decode("utf-8", "replace") if at in seen.before else ""
                    path = next((n for n in texts if n != content and _same_path(base.get(n), at)), "")
                    replaced = (n for n in texts if n not in (content, path) and str(base.get(n, "")) in earlier)
                    old = next((n for n in replaced if base.get(n)), "")
                    return [Writer(tool.name, content, path, old, "" if path else at, base)], True
        return [], accepted

    async def _looks_only(self, tool: Tool, texts: list[str]) -> bool:
        """Tell whether a tool that refuses every probe takes other texts without changing anything."""
        calls = [(a, self.expert[:at]) for at, a in enumerate(self.expert) if isinstance(a, ToolCall)]
        tries = [(call, before) for call, before in calls if call.name == tool.name][:4]
        base, before = self._base(tool)
        tries += [
            (ToolCall(name=tool.name, arguments={**base, name: path}), before)
            for name in texts
            for path in (*self.paths[:2], *HARMLESS)
        ]
        for call, before in tries:
            seen = await self._try(before, call)
            if seen.accepted and not seen.changed():
                return True
        return False

    async def _try(self, before: list[Action], call: ToolCall) -> _Seen:
        """Play the calls before it and the probe, look at everything, and give the episode up."""
        seen = _Seen()
        if self.left <= 0:
            return seen
        self.left -= 1
        actions = iter([*before, call])

        async def policy(episode: Episode) -> Action | Stop:
            action = next(actions, None)
            box = episode.environment._box
            if action is call and box is not None:
                seen.before = await box.aio.collect()
                self.paths = self.paths or [path for path, entry in seen.before.items() if entry.kind == "file"]
            if action is not None:
                return action
            await self._look(episode, seen)
            return Stop(None)

        try:
            played = await play_episode(
                self.arena.make(), self.arena.task, policy, self.arena.stage, seed=self.arena.seed, max_turns=64
            )
        except Abandoned:
            pass
        except (AuthoringError, InfraError):
            raise
        except Exception:  # a bug of the tool, which other checks name; the probe was not accepted
            return seen
        else:  # the call ended the episode: its text is the answer
            seen.accepted = played.outcome.ending == "done"
            seen.timed_out = bool(played.ledger.get("tool_timeouts"))
        self.sandbox = self.sandbox or seen.sandbox
        return seen

    async def _look(self, episode: Episode, seen: _Seen) -> None:
        if episode.step is not None:
            seen.output = "\n".join(o.content for o in episode.step.observations)
            seen.accepted = not any(o.error for o in episode.step.observations)
        seconds, tool = episode.slowest
        seen.timed_out = tool in episode.tools and seconds >= episode.tools[tool].timeout_s
        box = episode.environment._box
        if box is not None:
            seen.sandbox = True
            seen.after = await box.aio.collect()
            if ON_HOST in seen.output + "".join(seen.changed().values()):
                seen.box_sees_host = (await box.aio.exec(["test", "-e", self.host_file])).exit_code == 0
        state = episode.environment.state
        seen.state = canonical(await state() if inspect.iscoroutinefunction(state) else await off_loop(state))


def calls_of(messages: Sequence[Message]) -> list[ToolCall]:
    """Return every call of an episode, in order."""
    return [call for message in messages for call in message.tool_calls]


def _parameters(tool: Tool) -> tuple[list[str], list[str]]:
    """Return the parameters that take any text, and those that take a list of texts."""
    properties = tool.schema()["function"]["parameters"].get("properties", {})
    texts = [name for name, schema in properties.items() if any(map(_free_text, _options(schema)))]
    lists = [
        name
        for name, schema in properties.items()
        if any(s.get("type") == "array" and _free_text(s.get("items", {})) for s in _options(schema))
    ]
    return texts, lists


def _options(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield schema
    for key in ("anyOf", "oneOf"):
        yield from schema.get(key, ())


def _free_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not {"enum", "const", "pattern"} & set(schema)


def _filler(schema: Mapping[str, Any]) -> Any:
    """Return the plainest value that fits a schema."""
    for option in _options(schema):
        if "enum" in option or "const" in option:
            return option.get("const", next(iter(option.get("enum", ())), None))
        kinds: dict[str, Any] = {"string": PROBE_FILE, "boolean": False, "array": [], "object": {}, "null": None}
        if option.get("type") in ("integer", "number"):
            return option.get("minimum", 1)
        if option.get("type") in kinds:
            return kinds[option["type"]]
    return None


def _same_path(value: Any, at: str) -> bool:
    return isinstance(value, str) and bool(value) and posixpath.normpath(value).lstrip("/").endswith(at)
