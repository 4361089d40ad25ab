"""Starts the zygote in a new interpreter and talks to it."""

from __future__ import annotations

import atexit
import json
import marshal
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandboxes.base import ENVIRONMENT

INNER = Path(__file__).parent / "inner"
MODULES = ("kernel", "seccomp", "cgroups", "rootfs", "init", "zygote")
"""In the order in which they import each other."""
WARM = """
    abc array ast base64 bisect collections collections.abc contextlib copy dataclasses datetime decimal enum
    errno fractions functools heapq inspect io itertools json math numbers operator os os.path pathlib
    random re select signal site stat statistics string struct sys textwrap time traceback types typing
    unicodedata warnings weakref
"""
"""Modules that are already imported in every program. Not threading, whose fork hook alone costs 0.5 ms; nor socket and
hashlib, whose memory and libraries would add a tenth to every fork."""

LOAD = """
import atexit, os, sys
sys.path[:] = [p for p in sys.path if p]
def load(modules):
    for name, text in modules:
        module = type(sys)(name)
        above, _, last = name.rpartition(".")
        module.__package__ = above
        sys.modules[name] = module
        if above:
            setattr(sys.modules[above], last, module)
        if text is None:
            module.__path__ = []
        else:
            exec(compile(text, "<box>", "exec"), module.__dict__)
    for name, _ in modules:
        del sys.modules[name]
    return module.main
"""
"""Makes modules from names and sources (None for a package) and returns the `main` of the last one."""
START = """
def start(descriptor, parent):
    import json
    with os.fdopen(descriptor, "rb") as file:
        sources = json.load(file)
    main, socket, warm = load(sources["modules"]), sources["socket"], sources["warm"]
    del sources, file  # here, once: every child would free, and so copy, what is left
    return main(socket, parent, warm)
source, space = start(int(sys.argv[1]), int(sys.argv[2]))
del load, start
"""
RUN = """
code = 0
try:
    exec(compile(source, "<string>", "exec"), space)
except SystemExit as stop:
    code = stop.code
    if code is None:
        code = 0
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
except BaseException as error:
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    sys.excepthook(type(error), error, error.__traceback__)
    code = 1
try:
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
finally:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 255)
"""
"""Runs a program in a fork of a warm interpreter as `python3 -c` would, to its end."""


class Zygote:
    """The host's side of one zygote. Safe to use from several threads."""

    def __init__(self, interpreter: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sources, feed = os.pipe()
        try:
            self._process = subprocess.Popen(
                [interpreter, "-S", "-s", "-c", LOAD + START + RUN, str(sources), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(), sources),
                start_new_session=True,
            )
            os.close(sources)
            with os.fdopen(feed, "wb") as file:
                modules = [
                    ("inner", None),
                    *((f"inner.{name}", (INNER / f"{name}.py").read_text()) for name in MODULES),
                ]
                file.write(json.dumps({"modules": modules, "socket": theirs.fileno(), "warm": WARM.split()}).encode())
        except OSError as error:
            raise SandboxError(f"the zygote of the namespace backend did not start: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._lock, self._sending, self._roots_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._roots: dict[tuple[str, int, str], int] = {}
        self._closed, self._owner = False, os.getpid()
        ours.settimeout(30)
        self.facts = self._receive()[0]
        atexit.register(self.close)

    def _receive(self) -> tuple[dict[str, Any], int]:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 12, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"the zygote of the namespace backend does not answer: {error}") from error
        if not data:
            raise SandboxError(f"the zygote of the namespace backend has ended (status {self._process.poll()})")
        return marshal.loads(data), int.from_bytes(ancillary[0][2], sys.byteorder) if ancillary else -1

    def _ask(self, message: dict[str, Any], descriptor: int | None = None) -> tuple[dict[str, Any], int]:
        with self._lock:
            try:
                self._send(message, descriptor)
                answer, received = self._receive()
            except (OSError, SandboxError) as error:
                self._process.kill()  # a late answer would be mistaken for the answer to the next request
                raise SandboxError(f"the zygote of the namespace backend is gone: {error}") from error
        if "error" in answer:
            raise SandboxError(f"no namespace sandbox could be made: {answer['error']}")
        return answer, received

    def _send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        with self._sending:
            socket.send_fds(self._socket, [marshal.dumps(message, 2)], [] if descriptor is None else [descriptor])

    def root(self, name: tuple[str, int, str], plan: dict[str, Any]) -> int:
        """Return the zygote's number for a root, which is sent to it once."""
        with self._roots_lock:
            if name not in self._roots:
                content = os.memfd_create("root")
                try:
                    os.write(content, marshal.dumps(plan, 2))
                    os.lseek(content, 0, os.SEEK_SET)
                    self._roots[name] = self._ask({"op": "root"}, content)[0]["root"]
                finally:
                    os.close(content)
            return self._roots[name]

    def create(self, plan: dict[str, Any], control: socket.socket) -> int:
        """Clone a sandbox that will talk over `control`; return a pidfd of its first process."""
        return self._ask({"op": "create", **plan}, control.fileno())[1]

    def bury(self, number: int) -> None:
        """Do what `reap` does, without an answer; done before any later request. It waits for no answer of others."""
        with suppress(OSError):  # a zygote that is gone has taken its sandboxes along
            self._send({"op": "bury", "id": number})

    def reap(self, number: int) -> tuple[int, int]:
        """Return a dead sandbox's wait status, and how many of its processes the kernel killed for memory."""
        answer, _ = self._ask({"op": "reap", "id": number})
        return answer["status"], answer["out_of_memory"]

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._lock.locked()

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def close(self) -> None:
        """End it, and with it every sandbox that is left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with self._sending:
                self._socket.close()
            if self._owner != os.getpid():  # a fork of the process that started it
                return
        atexit.unregister(self.close)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
