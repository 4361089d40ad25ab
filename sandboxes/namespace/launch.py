"""Starts the zygote in a fresh interpreter and speaks with it."""

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
from dataclasses import dataclass
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
"""Modules that every program finds imported. Not threading, whose fork hook alone costs 0.5 ms; nor socket and hashlib,
whose memory and libraries would add a tenth to every fork."""

LOAD = """
import atexit, os, sys
sys.path[:] = [p for p in sys.path if p]
def load(descriptor, parent):
    import json
    with os.fdopen(descriptor, "rb") as file:
        sources = json.load(file)
    package = type(sys)("inner")
    package.__path__ = []
    sys.modules["inner"] = package
    for name, text in sources["modules"]:
        module = type(sys)("inner." + name)
        module.__package__ = "inner"
        sys.modules["inner." + name] = module
        setattr(package, name, module)
        exec(compile(text, "<box>", "exec"), module.__dict__)
    main, socket, warm = module.main, sources["socket"], sources["warm"]
    del sources, text, package, module, file  # here, once: every child would free, and so copy, what is left
    for name in [name for name in sys.modules if name.partition(".")[0] == "inner"]:
        del sys.modules[name]
    return main(socket, parent, warm)
source, space = load(int(sys.argv[1]), int(sys.argv[2]))
del load
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
"""What a fork of a warm interpreter does with a program: as `python3 -c` would, to its end."""
STUB = LOAD + RUN


@dataclass(frozen=True, slots=True)
class Born:
    """A box's first process, as the host holds it."""

    pid: int
    pidfd: int
    """Closed by whoever got it."""


class Zygote:
    """The host's end of one zygote. Safe to use from several threads."""

    def __init__(self, interpreter: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sources, feed = os.pipe()
        try:
            self._process = subprocess.Popen(
                [interpreter, "-S", "-s", "-c", STUB, str(sources), str(os.getpid())],
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
                modules = [(name, (INNER / f"{name}.py").read_text()) for name in MODULES]
                file.write(json.dumps({"modules": modules, "socket": theirs.fileno(), "warm": WARM.split()}).encode())
        except OSError as error:
            raise SandboxError(f"the zygote of the namespace backend did not start: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._lock, self._roots_lock = threading.Lock(), threading.Lock()
        self._roots: dict[tuple[str, int], int] = {}
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
                self._process.kill()  # an answer that comes late would be taken for the next one's
                raise SandboxError(f"the zygote of the namespace backend is gone: {error}") from error
        if "error" in answer:
            raise SandboxError(f"no namespace box could be made: {answer['error']}")
        return answer, received

    def _send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        socket.send_fds(self._socket, [marshal.dumps(message, 2)], [] if descriptor is None else [descriptor])

    def root(self, name: tuple[str, int], plan: dict[str, Any]) -> int:
        """The zygote's number for a root, which it is told of once."""
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

    def create(self, plan: dict[str, Any], control: socket.socket) -> Born:
        """Clone a box that will speak over `control`."""
        answer, pidfd = self._ask({"op": "create", **plan}, control.fileno())
        return Born(answer["pid"], pidfd)

    def bury(self, number: int) -> None:
        """`reap` for somebody who does not want to know; done before anything that is asked later."""
        with self._lock, suppress(OSError):  # a zygote that is gone has taken its boxes along
            self._send({"op": "bury", "id": number})

    def reap(self, number: int) -> tuple[int, int]:
        """After a box's death: its wait status, and how often the kernel ended one of its processes for memory."""
        answer, _ = self._ask({"op": "reap", "id": number})
        return answer["status"], answer["out_of_memory"]

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer of it."""
        return self._lock.locked()

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def close(self) -> None:
        """End it, and with it every box that is left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            if self._owner != os.getpid():  # a fork of the process that started it
                return
        atexit.unregister(self.close)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
