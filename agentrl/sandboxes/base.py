"""The contract every sandbox backend keeps: a spec in, a box out, and no doubt whose fault a death was.

A `Backend` makes `Sandbox`es from `SandboxSpec`s. The methods of a sandbox block; `box.aio` offers the same ones as
coroutines that run off the event loop. A box belongs to one episode and is never handed to another.
"""

from __future__ import annotations

import asyncio
import posixpath
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

from agentrl.errors import AuthoringError

WORKSPACE = "/box"
"""Where a task's files lie inside every sandbox, and where commands start."""
MTIME = 946_684_800
"""The mtime of every file a spec lays out: 2000-01-01 00:00 UTC."""

HOME = "/home/agent"
"""The home folder of a box's user: empty at first, not part of the workspace."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
"""The variables of every command, before a spec's own and a call's own are added."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a file tree, as data: laid out by a spec, or taken out of a box."""

    kind: Literal["file", "dir", "link", "special"] = "file"
    """`special` (fifo, socket, device) only ever comes out of a box; a spec cannot ask for it."""
    content: bytes = b""
    """A file's bytes, or a link's target. Nobody on the host ever follows it."""
    mode: int = 0o644
    """Permission bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sandbox may use. Running into one is the agent's doing, never an infrastructure error."""

    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 128
    """No folder that the box may write (workspace, /tmp, home, /dev/shm) holds more than this; and all of them together
    never more than `memory_mb`, since what is written counts as memory."""
    files: int = 20_000
    """How many files and folders each of them may hold (inodes)."""
    open_files: int = 256
    output_bytes: int = 1 << 20
    """Bytes of stdout and of stderr that are kept; the rest is counted and thrown away."""
    seconds: float = 30.0
    """Default wall time of one exec."""
    cpus: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything that decides what a fresh sandbox contains: same spec, same digest."""

    image: str = "host"
    """A pinned root by name. `host` is the machine's own /usr with site-packages and /usr/local masked; `python` is a
    root with a Python 3, which is the same one unless an image of that name was made. See docs/sandboxes.md."""
    files: Mapping[str, Entry | bytes | str] = field(default_factory=dict)
    """Workspace-relative path → content. Text and bytes stand for a plain file of mode 0644."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides the fixed ones (PATH, HOME, LANG, TZ, PYTHONHASHSEED)."""
    limits: Limits = field(default_factory=Limits)
    user: int = 1000
    """The uid and gid that commands run as, inside."""
    network: Literal["none"] = "none"
    """There is no other network than the box's own loopback."""
    tools: tuple[str, ...] | None = None
    """Names of the only programs that commands and whatever they start may execute; None for all that the image has.

    It keeps an agent to what a task means it to use, and is no wall: a program that may run can do by itself what
    another would have done for it. Files of the workspace cannot be executed then, only given to a program.
    """

    def __post_init__(self) -> None:
        for tool in self.tools or ():
            if not tool or "/" in tool:
                raise AuthoringError(f"tool {tool!r} of a sandbox must be the plain name of a program, as 'python3'")
        for path in self.files:
            clean = posixpath.normpath(path)
            if not path or path.startswith("/") or clean != path.rstrip("/") or clean.split("/")[0] == "..":
                raise AuthoringError(f"file path {path!r} of a sandbox must be relative to the workspace, without '..'")
            if "\0" in path:
                raise AuthoringError(f"file path {path!r} holds a NUL byte")

    def entries(self) -> dict[str, Entry]:
        """The files as entries, with every parent folder made explicit, parents first."""
        out: dict[str, Entry] = {}
        for path, value in self.files.items():
            parts = path.rstrip("/").split("/")
            for depth in range(1, len(parts)):
                out.setdefault("/".join(parts[:depth]), Entry("dir", mode=0o755))
            if isinstance(value, str):
                value = value.encode()
            out[path.rstrip("/")] = Entry(content=value) if isinstance(value, bytes) else value
        for path in out:
            parent = posixpath.dirname(path)
            if parent and out[parent].kind != "dir":
                raise AuthoringError(f"{path!r} lies below {parent!r}, which is not a folder")
        return dict(sorted(out.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one exec used."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_mb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. Output up to a timeout or a limit is kept."""

    exit_code: int
    """The exit status; minus the signal's number when a signal ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    """More was written than `output_bytes`; what came first was kept."""
    reply: bytes = b""
    """For `python`: what the program wrote to its reply descriptor."""
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """What a person at a terminal would see: stdout, stderr, and a note when it did not end well."""
        out = (self.stdout + self.stderr).decode("utf-8", "replace")
        notes = ["[timed out]"] if self.timed_out else []
        if self.exit_code and not self.timed_out:
            killer = signal.strsignal(-self.exit_code) if self.exit_code < 0 else None
            notes = [f"[ended by a signal: {killer}]" if killer else f"[exit code {self.exit_code}]"]
        notes += ["[output cut]"] if self.truncated else []
        return "\n".join(part for part in (out.rstrip("\n"), *notes) if part)


class Shell(ABC):
    """A shell that lives across calls: its directory, variables and background jobs last."""

    @abstractmethod
    def run(self, command: str, *, timeout: float | None = None) -> ExecResult: ...

    @abstractmethod
    def close(self) -> None: ...


def words_of(argv: Sequence[str]) -> list[str]:
    """A command as every backend takes it: a list of strings, at least one."""
    if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
        raise ValueError(f"exec takes a list of strings with at least one, got {argv!r}")
    return [str(word) for word in argv]


class Sandbox(ABC):
    """One box. Raises `SandboxDied` when something inside it ended it, `SandboxError` when the cause lay outside."""

    spec: SandboxSpec
    root: str
    """Hash of the pinned root."""

    @abstractmethod
    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        """Run a command in a fresh process of the box, as the box's user."""

    @abstractmethod
    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        """Run Python source as `__main__` in a fresh process, from a warm interpreter where the backend has one.

        The program reads `message` from descriptor 3 and may write a reply to descriptor 4. The reply is data that
        code in the box controls: parse it as JSON, compare it outside, believe none of it.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A regular file's content; relative paths start at the workspace. FileNotFoundError and the like as usual."""

    @abstractmethod
    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the box's user, creating parent folders."""

    @abstractmethod
    def list(self, path: str = WORKSPACE) -> list[str]:
        """Names in a folder, sorted."""

    @abstractmethod
    def shell(self) -> Shell:
        """Start a persistent shell."""

    @abstractmethod
    def kill_all(self) -> None:
        """End every process that ran in the box. Afterwards only `collect`, `digest`, `ledger`, `close` are allowed."""

    @abstractmethod
    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        """The workspace (or one path in it) as data, read by the host: paths relative to `path`, nothing followed.

        A single file comes back under the key "". Files that would go over `max_bytes` in all, and entries beyond
        `max_files`, raise AgentError: an agent that floods its artifacts has failed, not the infrastructure.
        """

    @abstractmethod
    def snapshot(self) -> str:
        """Keep the box's file state under an id; the box goes on."""

    @abstractmethod
    def fork(self, snapshot: str) -> Sandbox:
        """A second box that starts from a snapshot of this one."""

    @abstractmethod
    def digest(self) -> str:
        """Hash over every path of the workspace: type, mode, owner, link target, mtime, xattrs, content."""

    @abstractmethod
    def ledger(self) -> dict[str, Any]:
        """What happened so far: files created, changed, deleted; execs, timeouts, bytes out."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the box with everything in it. Safe to call twice."""

    @property
    def alive(self) -> bool:
        """Whether it can still run something, as far as a cheap look tells."""
        return True

    def lay_out(self, spec: SandboxSpec) -> None:
        """Turn a box that `Backend.prepare` made, in which nothing ran yet, into that of one spec."""
        raise AuthoringError(f"{type(self).__name__} has no prepared boxes")

    @property
    def aio(self) -> AsyncSandbox:
        """The same box with awaitable methods."""
        return AsyncSandbox(self)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """What `agentrl doctor` says about a backend on this machine."""

    works: bool
    isolates: tuple[str, ...]
    """What it keeps apart here: files, processes, network, ..."""
    missing: tuple[str, ...] = ()
    """What is missing, in words."""
    fix: str = ""
    """The command that installs or enables it."""


class Backend(ABC):
    """Makes sandboxes of one kind. Members of sandboxes/<name>/ export a subclass."""

    name: str
    safe: bool = True
    """False: it isolates nothing; training refuses it unless the recipe says `unsafe: true`."""

    @abstractmethod
    def available(self) -> Availability:
        """Try it, cheaply."""

    @abstractmethod
    def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh box."""

    def prepare(self, spec: SandboxSpec) -> Sandbox | None:
        """A box ready but for its files and variables, for any spec of that image, user and limits.

        None where the backend has no such thing; the pool then creates every box when it is asked for.
        """
        return None

    def close(self) -> None:
        """Let go of everything the backend keeps warm."""
        return None


_threads: ThreadPoolExecutor | None = None


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread of the house's own pool, so that hundreds may wait at once."""
    global _threads
    if _threads is None:
        _threads = ThreadPoolExecutor(max_workers=512, thread_name_prefix="agentrl-box")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: function(*args, **kwargs))


class AsyncShell:
    """`await shell.run(...)`: a persistent shell whose calls are coroutines."""

    __slots__ = ("_shell",)

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def run(self, command: str, *, timeout: float | None = None) -> ExecResult:
        return await off_loop(self._shell.run, command, timeout=timeout)

    async def close(self) -> None:
        await off_loop(self._shell.close)


class AsyncSandbox:
    """`await box.aio.exec([...])`: every blocking method of a sandbox as a coroutine."""

    __slots__ = ("_box",)

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await off_loop(self._box.exec, argv, **options)

    async def python(self, source: str, message: bytes = b"", **options: Any) -> ExecResult:
        return await off_loop(self._box.python, source, message, **options)

    async def read(self, path: str) -> bytes:
        return await off_loop(self._box.read, path)

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        await off_loop(self._box.write, path, content, mode=mode)

    async def list(self, path: str = WORKSPACE) -> list[str]:
        return await off_loop(self._box.list, path)

    async def kill_all(self) -> None:
        await off_loop(self._box.kill_all)

    async def collect(self, path: str = "", **options: Any) -> dict[str, Entry]:
        return await off_loop(self._box.collect, path, **options)

    async def snapshot(self) -> str:
        return await off_loop(self._box.snapshot)

    async def fork(self, snapshot: str) -> Sandbox:
        return await off_loop(self._box.fork, snapshot)

    async def digest(self) -> str:
        return await off_loop(self._box.digest)

    async def ledger(self) -> dict[str, Any]:
        return await off_loop(self._box.ledger)

    async def shell(self) -> AsyncShell:
        return AsyncShell(await off_loop(self._box.shell))

    async def close(self) -> None:
        await off_loop(self._box.close)
