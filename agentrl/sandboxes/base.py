"""The contract of every sandbox backend: a spec in, a sandbox out, and a clear cause when a sandbox dies.

A `Backend` makes `Sandbox`es from `SandboxSpec`s. The methods of a sandbox block; `box.aio` offers the same ones as
coroutines that run off the event loop. A sandbox belongs to one episode and is never reused.
"""

from __future__ import annotations

import asyncio
import functools
import posixpath
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from agentrl.errors import AuthoringError

WORKSPACE = "/box"
"""The folder of a task's files, and the working directory of commands, unless a spec's `workdir` names another."""
MTIME = 946_684_800
"""The mtime of every file of a spec: 2000-01-01 00:00 UTC."""
MAX_READ = 16 << 20
"""Bytes of the longest file that `read` returns unless it is told otherwise, and of the names in a folder."""

HOME = "/home/agent"
"""The home folder of a sandbox's user: empty at first, not part of the workspace."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
"""The environment variables of every command; those of the spec and of the call are added."""

_PLACE = re.compile(r"(/[A-Za-z0-9_+@-][A-Za-z0-9._+@-]*)+")
TAKEN = (
    "/proc",
    "/dev",
    "/sys",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/boot",
    "/tmp",
)
"""Folders in which no workspace can lie: programs need what is there, or a sandbox has its own there already."""
TAKEN_ITSELF = ("/", "/home", "/run", "/var")
"""Folders that cannot be a workspace themselves, but may hold one."""

ADDED = {"added": True}
"""The metadata of a field that was added later: at its default it leaves hashes as they were (agentrl/hashing.py)."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a file tree, as data: put into a sandbox by a spec, or collected from one."""

    kind: Literal["file", "dir", "link", "special"] = "file"
    """`special` (fifo, socket, device) is only ever collected; a spec cannot ask for it."""
    content: bytes = b""
    """A file's bytes, or a link's target, which the host never follows."""
    mode: int = 0o644
    """Permission bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sandbox may use. Reaching a limit is the agent's doing, never an infrastructure error."""

    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 128
    """No writable folder (workspace, /tmp, home, /dev/shm) holds more than this; and all of them together never more
    than `memory_mb`, since their content counts as memory."""
    files: int = 20_000
    """Files and folders (inodes) in each writable folder."""
    open_files: int = 256
    output_bytes: int = 1 << 20
    """Bytes of stdout and of stderr that are kept; the rest is counted and dropped."""
    seconds: float = 30.0
    """Default wall time of one exec."""
    cpus: float = 1.0


class Kind(NamedTuple):
    """The fields of a spec that a prepared sandbox cannot change; it serves every spec of its kind."""

    image: str
    user: int
    limits: Limits
    tools: tuple[str, ...] | None
    workdir: str
    writable_root: bool


def _check_workdir(path: str) -> None:
    """Refuse a place at which no workspace can appear."""
    if not _PLACE.fullmatch(path) or len(path) > 200:
        raise AuthoringError(f"workdir {path!r} of a sandbox must be an absolute path of plain names, such as '/app'")
    inside = next((top for top in (*TAKEN, HOME) if path == top or path.startswith(f"{top}/")), "")
    if inside or path in TAKEN_ITSELF:
        raise AuthoringError(f"workdir {path!r} of a sandbox would hide what lies in {inside or path}; take '/app'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything that decides what a fresh sandbox contains: same spec, same digest."""

    image: str = "host"
    """The name of a pinned root. `host` is the machine's own /usr with site-packages and /usr/local masked; `python` is
    a root with a Python 3, the same one unless there is an image of that name. See docs/sandboxes.md."""
    files: Mapping[str, Entry | bytes | str] = field(default_factory=dict)
    """Workspace-relative path → content. Text and bytes make a plain file of mode 0644."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides the fixed ones (PATH, HOME, LANG, TZ, PYTHONHASHSEED)."""
    limits: Limits = field(default_factory=Limits)
    user: int = 1000
    """The uid and gid of commands, as seen inside. 0 is root of the sandbox alone, without any capability."""
    tools: tuple[str, ...] | None = None
    """Names of the only programs that commands and their children may execute; None for every program of the image.

    This keeps an agent to the tools that a task intends. It is no security boundary: an allowed program can do the work
    of a forbidden one. Files of the workspace cannot be executed then, only passed to a program.
    """
    workdir: str = field(default=WORKSPACE, metadata=ADDED)
    """The absolute path at which the workspace appears and commands start. What the image holds there is hidden."""
    writable_root: bool = field(default=False, metadata=ADDED)
    """Whether commands may write outside of the workspace too (/etc, /opt, /usr/local, ...), on a layer of the
    sandbox's own: it counts against the disk limit, goes with the sandbox, and no other one sees it."""

    def __post_init__(self) -> None:
        _check_workdir(self.workdir)
        if not 0 <= self.user < 65_534:
            raise AuthoringError(f"user {self.user} of a sandbox must lie between 0 and 65533")
        if self.tools is not None and self.writable_root:
            raise AuthoringError("a sandbox held to certain `tools` cannot have a writable root: it could replace them")
        for tool in self.tools or ():
            if not tool or "/" in tool:
                raise AuthoringError(f"tool {tool!r} of a sandbox must be the plain name of a program, as 'python3'")
        for path in self.files:
            clean = posixpath.normpath(path)
            if not path or path.startswith("/") or clean != path.rstrip("/") or clean.split("/")[0] == "..":
                raise AuthoringError(f"file path {path!r} of a sandbox must be relative to the workspace, without '..'")
            if "\0" in path:
                raise AuthoringError(f"file path {path!r} holds a NUL byte")

    @property
    def kind(self) -> Kind:
        return Kind(self.image, self.user, self.limits, self.tools, self.workdir, self.writable_root)

    def entries(self) -> dict[str, Entry]:
        """Return the files as entries, with every parent folder made explicit, parents first."""
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
    """How a command ended. Output before a timeout or a limit is kept."""

    exit_code: int
    """The exit status; minus the number of the signal that ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    """The output was longer than `output_bytes`; its beginning was kept."""
    reply: bytes = b""
    """For `python`: what the program wrote to its reply descriptor."""
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """What a person at a terminal would see: stdout, stderr, and a note if the command did not end well."""
        out = (self.stdout + self.stderr).decode("utf-8", "replace")
        notes = ["[timed out]"] if self.timed_out else []
        if self.exit_code and not self.timed_out:
            killer = signal.strsignal(-self.exit_code) if self.exit_code < 0 else None
            notes = [f"[ended by a signal: {killer}]" if killer else f"[exit code {self.exit_code}]"]
        notes += ["[output cut]"] if self.truncated else []
        return "\n".join(part for part in (out.rstrip("\n"), *notes) if part)


class Shell(ABC):
    """A shell that lives across calls, with its directory, variables and background jobs."""

    @abstractmethod
    def run(self, command: str, *, timeout: float | None = None) -> ExecResult: ...

    @abstractmethod
    def close(self) -> None: ...


class Sandbox(ABC):
    """One sandbox. Raises `SandboxDied` when it died from inside, `SandboxError` when the cause lay outside."""

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
        cwd: str = ".",
    ) -> ExecResult:
        """Run a command in a new process of the sandbox, as the sandbox's user; `cwd` starts at the workspace."""

    @abstractmethod
    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        """Run Python source as `__main__` in a new process, from a warm interpreter where the backend has one.

        The program reads `message` from descriptor 3 and may write a reply to descriptor 4. Code in the sandbox
        controls the reply: parse it as JSON, compare it outside, trust none of it.
        """

    @abstractmethod
    def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        """Return a regular file's content; relative paths start at the workspace. Raises OSErrors as `open` does, and
        EFBIG for a file of more than `limit` bytes: agent code decides how long its files are."""

    @abstractmethod
    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the sandbox's user, creating parent folders."""

    @abstractmethod
    def list(self, path: str = ".") -> list[str]:
        """Return the names in a folder, sorted."""

    @abstractmethod
    def shell(self) -> Shell:
        """Start a persistent shell."""

    @abstractmethod
    def kill_all(self) -> None:
        """Kill every process in the sandbox. Afterwards only `collect`, `digest`, `ledger`, `close` are allowed."""

    @abstractmethod
    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        """Return the workspace (or one path in it) as data: paths relative to `path`, no link followed.

        A single file comes back under the key "". More than `max_bytes` in all, or more than `max_files` entries,
        raise AgentError: an agent that floods its artifacts has failed, not the infrastructure.
        """

    @abstractmethod
    def snapshot(self) -> str:
        """Save the sandbox's files and return an id for `fork`; the sandbox keeps running."""

    @abstractmethod
    def fork(self, snapshot: str) -> Sandbox:
        """Return a second sandbox that starts from a snapshot of this one, also after this one was closed."""

    def snapshot_bytes(self, snapshot: str) -> int:
        """Return about how much of this process's memory a snapshot takes."""
        return 0

    def forget(self, snapshot: str) -> None:
        """Release the memory of a snapshot; it cannot be forked any more."""
        return None

    @abstractmethod
    def digest(self, *, times: bool = True) -> str:
        """Hash every path of the workspace: type, mode, owner, link target, mtime, xattrs, content.

        What an episode writes carries the time of day. `times=False` leaves mtimes out, and Python's bytecode caches,
        which hold the time of the source that they were made from.
        """

    @abstractmethod
    def ledger(self) -> dict[str, Any]:
        """Report what happened so far: files created, changed, deleted; execs, timeouts, bytes out."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the sandbox with everything in it. Safe to call twice."""

    @property
    def alive(self) -> bool:
        """Whether it can still run commands, as far as a cheap check can tell."""
        return True

    def lay_out(self, spec: SandboxSpec) -> None:
        """Give a sandbox of `Backend.prepare`, in which nothing has run yet, the files and variables of a spec."""
        raise AuthoringError(f"{type(self).__name__} cannot be prepared ahead")

    @property
    def aio(self) -> AsyncSandbox:
        """The same sandbox with awaitable methods."""
        return AsyncSandbox(self)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


S = TypeVar("S", bound=Sandbox)


@contextmanager
def closed_on_error(box: S) -> Iterator[S]:
    """Close a new sandbox if the block that sets it up fails."""
    try:
        yield box
    except BaseException:
        box.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """What `agentrl doctor` says about a backend on this machine."""

    works: bool
    isolates: tuple[str, ...]
    """What it isolates here: files, processes, network, ..."""
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
        """Try the backend, cheaply."""

    @abstractmethod
    def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a new sandbox."""

    def prepare(self, spec: SandboxSpec) -> Sandbox | None:
        """Make a sandbox without files and variables, for any spec of this kind.

        Returns None if the backend cannot; the pool then creates every sandbox on demand.
        """
        return None

    def close(self) -> None:
        """Release everything the backend keeps warm."""
        return None


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return the package's own threads for blocking calls, so that hundreds can wait at once."""
    return ThreadPoolExecutor(max_workers=512, thread_name_prefix="agentrl-box")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in one of those threads."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads(), lambda: function(*args, **kwargs))


def _awaitable(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method that runs the blocking object's method of that name off the event loop."""

    @functools.wraps(method, updated=())
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await off_loop(getattr(self._blocking, method.__name__), *args, **kwargs)

    return call


class AsyncShell:
    """`await shell.run(...)`: a persistent shell whose calls are coroutines."""

    def __init__(self, shell: Shell) -> None:
        self._blocking = shell

    run = _awaitable(Shell.run)
    close = _awaitable(Shell.close)


class AsyncSandbox:
    """`await box.aio.exec([...])`: every blocking method of a sandbox as a coroutine."""

    def __init__(self, box: Sandbox) -> None:
        self._blocking = box

    exec = _awaitable(Sandbox.exec)
    python = _awaitable(Sandbox.python)
    read = _awaitable(Sandbox.read)
    write = _awaitable(Sandbox.write)
    list = _awaitable(Sandbox.list)
    kill_all = _awaitable(Sandbox.kill_all)
    collect = _awaitable(Sandbox.collect)
    snapshot = _awaitable(Sandbox.snapshot)
    fork = _awaitable(Sandbox.fork)
    digest = _awaitable(Sandbox.digest)
    ledger = _awaitable(Sandbox.ledger)
    close = _awaitable(Sandbox.close)

    async def shell(self) -> AsyncShell:
        return AsyncShell(await off_loop(self._blocking.shell))
