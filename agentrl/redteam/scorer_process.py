"""Runs a user's scoring function under the user's own interpreter, in a sandbox that sees that environment read-only.

    Scorer ──ask──> client in the sandbox ──socket──> worker (scorer_worker.py): imported once ──fork──> one submission

The interpreter's folders are mounted read-only in their own places; modules of the working folder are copied in. There
is no network, and nothing else of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, InfraError, UserError
from agentrl.redteam import scorer_worker
from agentrl.sandboxes.base import ExecResult, Limits, Sandbox, SandboxSpec
from agentrl.verifiers.base import Boxes

FACTS = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, sys.path]))"
CLIENT = """\
import os, socket
s = socket.socket(socket.AF_UNIX)
s.connect("SOCKET")
with os.fdopen(3, "rb") as order:
    s.sendall(order.read())
s.shutdown(1)
for block in iter(lambda: s.recv(65536), b""):
    os.write(4, block)
"""
"""Runs in the sandbox for each submission, on the machine's own Python: it starts in milliseconds."""
SERVER, SOCKET = ".agentrl/scorer_worker.py", ".agentrl/socket"
LIMITS = Limits(memory_mb=6144, processes=512, disk_mb=512, open_files=4096, seconds=60.0, cpus=4.0)
START_S = 600.0
"""How long the imports may take."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
COPIED = (".py", ".json", ".jsonl", ".txt", ".toml", ".yaml", ".yml", ".csv")
MOST_FILES, MOST_BYTES = 2_000, 32 << 20
"""What is copied of the folder that holds the scorer's module."""


class WorkerGone(Exception):
    """The process that serves the scorer does not answer any more."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that the scorer runs under, and the folders that it needs."""

    path: str
    folders: tuple[str, ...]
    search: tuple[str, ...]
    """Its sys.path."""

    @classmethod
    def find(cls, option: str) -> Interpreter:
        """Take the interpreter that was named, else that of the active virtual environment, else our own."""
        active = os.environ.get("VIRTUAL_ENV", "")
        path = option or (f"{active}/bin/python" if active else sys.executable)
        if Path(path).is_dir():
            path = str(Path(path) / "bin/python")
        path = os.path.abspath(path)
        try:
            # not in the working folder, whose modules are no part of the environment
            asked = subprocess.run([path, "-c", FACTS], capture_output=True, text=True, timeout=60, cwd="/", check=True)
            prefix, base, exec_prefix, search = json.loads(asked.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise UserError(f"--python {path} is not a Python interpreter that starts: {error}") from None
        return cls(path, _shown([prefix, base, exec_prefix, *_links(path), *search]), tuple(search))


def _links(path: str) -> list[str]:
    """Return the folders through which the links of an interpreter lead."""
    folders = []
    while os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
        folders.append(os.path.normpath(os.path.dirname(path)))
    return folders


def _shown(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the folders to show: the topmost ones, without what every sandbox has anyway."""
    folders = {
        form for path in paths if os.path.isdir(path) for form in (os.path.abspath(path), os.path.realpath(path))
    }
    folders = {"/usr/local" if f.startswith("/usr/local/") else f for f in folders}  # hidden as a whole
    hidden = ("/usr/local", "site-packages", "dist-packages")
    needed = [f for f in folders if not f.startswith(SYSTEM) or any(name in f for name in hidden)]
    tops = [f for f in needed if f != "/" and not any(f != top and f.startswith(top + "/") for top in needed)]
    if any(":" in top for top in tops):
        raise UserError(f"the environment lies in a folder with a colon in its name: {', '.join(tops)}")
    return tuple(sorted(tops))


def sources(module: str, interpreter: Interpreter) -> dict[str, bytes]:
    """Read the folder that holds the module, unless the interpreter finds it by itself. Nothing is imported here."""
    top = module.split(".")[0]
    own = [folder for folder in sys.path if folder and folder not in interpreter.search and "-packages" not in folder]
    extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(Path.cwd()), *filter(None, extra), *own]
    spec = PathFinder.find_spec(top, [p for p in places if not p.startswith(sys.base_prefix + "/lib")])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return {}
    origin = Path(spec.origin)
    folder = origin.parent.parent if origin.name == "__init__.py" else origin.parent
    first = [origin] if origin.name != "__init__.py" else sorted(p for p in origin.parent.rglob("*") if p.is_file())
    files: dict[str, bytes] = {}
    size = 0
    for path in [*first, *_beside(folder)]:
        name = str(path.relative_to(folder))
        if name in files or "__pycache__" in name or len(files) >= MOST_FILES or size >= MOST_BYTES:
            continue
        with suppress(OSError):
            files[name] = path.read_bytes()
            size += len(files[name])
    return files


def _beside(folder: Path) -> list[Path]:
    """List the small files of the folder that modules import or read, nearest first."""
    files: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")) and f != "node_modules")
        folders[:] = [f for f in folders if not os.path.exists(os.path.join(root, f, "pyvenv.cfg"))]
        files += [Path(root) / name for name in sorted(names) if name.endswith(COPIED)]
        if len(files) > 2 * MOST_FILES:
            break
    small = [path for path in files if not path.is_symlink() and path.is_file() and path.stat().st_size <= 1 << 20]
    return sorted(small, key=lambda path: (len(path.parts), path))


class Worker:
    """One sandbox in which the scorer has been imported and waits for submissions."""

    def __init__(self, interpreter: Interpreter, target: str, convention: str, files: Mapping[str, bytes]) -> None:
        self.interpreter = interpreter
        self._argv = [interpreter.path, SERVER, target, convention, SOCKET]
        server = Path(scorer_worker.__file__).read_bytes()
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._spec = SandboxSpec(
            image=":".join(("host", *interpreter.folders)),
            files={**files, SERVER: server},
            env={**threads, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false"},
            limits=LIMITS,
        )
        self._stack = AsyncExitStack()
        self._box: Sandbox | None = None
        self._process: asyncio.Task[ExecResult] | None = None
        self.about: dict[str, Any] = {}
        """How it is called and how long its imports took, or what went wrong."""

    async def start(self, boxes: Boxes) -> Worker:
        """Make the sandbox, import the scorer there, and wait until it serves."""
        try:
            self._box = box = await self._stack.enter_async_context(boxes.box(self._spec))
            self._process = asyncio.create_task(box.aio.exec(self._argv, timeout=1e6))
            self._process.add_done_callback(lambda task: task.cancelled() or task.exception())
            deadline = asyncio.get_running_loop().time() + START_S
            while not self.about:
                if self._process.done():
                    raise UserError(f"--scorer: {self.interpreter.path} does not run in the sandbox: {self._last()}")
                if asyncio.get_running_loop().time() > deadline:
                    raise UserError(f"--scorer: importing {self._argv[2]} took more than {START_S:g} s")
                with suppress(WorkerGone):
                    self.about = await self._send({}, 60.0)
                await asyncio.sleep(0.05)
        except BaseException:
            await self.close()
            raise
        return self

    def _last(self) -> str:
        """Return the last words of a process that has ended."""
        try:
            lines = self._process.result().text.strip().splitlines() if self._process is not None else []
        except (AgentError, InfraError, OSError) as error:
            lines = [str(error)]
        return " | ".join(lines[-3:])[:500] or "it ended without a message"

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have one submission scored. Raises `WorkerGone` when the process that serves the scorer has ended."""
        reply = await self._send({**order, "nonce": secrets.token_hex(16)}, 2 * float(order["seconds"]) + 30)
        return reply or {"problem": "died", "text": "it sent no reply"}

    async def _send(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._box is not None
        client = CLIENT.replace("SOCKET", SOCKET)
        try:
            done = await self._box.aio.python(client, json.dumps(order).encode(), timeout=seconds)
            return dict(json.loads(done.reply))
        except (AgentError, InfraError, ValueError) as error:
            raise WorkerGone(str(error)) from None

    async def close(self) -> None:
        """Destroy the sandbox with everything that runs in it."""
        await self._stack.aclose()
        if self._process is not None:
            with suppress(AgentError, InfraError):
                await self._process
            self._process = None
