"""Process 1 of a box: takes requests from the host over one socket and runs each in a child of its own.

    host ──(socket: length, JSON, descriptors)──> init ──fork──> child: drops to the box's user, runs
         <──────────(status pipe: how it ended)──      <─wait──

A request brings its own descriptors, the last a status pipe; init keeps no other state than pid → status pipe.
Children run as another user than init (where the map has more than one id), so that they can neither signal it nor
read its memory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enum wrappers, whose memory every child would copy
import array
import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any

from .cgroups import write
from .kernel import PR_SET_DUMPABLE, bare_fork, child_descriptor, keep_capabilities, prctl

STATUS = struct.Struct("<iidd")
"""What goes down a status pipe: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""


class Child(BaseException):
    """Raised in a forked child to leave every frame of init before foreign Python code starts."""

    def __init__(self, source: str) -> None:
        self.source = source


class Init:
    def __init__(self, control: socket.socket, plan: dict[str, Any]) -> None:
        self.control = control
        self.user: int = plan["user"]
        self.switch: bool = plan["switch"]
        self.open_files: int = plan["open_files"]
        self.environment = dict(os.environ)
        self.running: dict[int, tuple[int, int]] = {}

    def serve(self) -> None:
        """Until the host hangs up. In a child that shall run Python, `Child` is raised out of here."""
        wake = child_descriptor()
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self.reap()
                else:
                    request, descriptors = receive(self.control)
                    self.handle(request, descriptors)

    def handle(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if request["op"] == "kill":
            for pid, (number, _) in list(self.running.items()):
                if number == request["id"]:
                    kill_tree(pid, request.get("spare", False), request.get("since", 0))
            return
        if request["op"] in ("stop", "continue"):
            with contextlib.suppress(ProcessLookupError):  # everything but this process
                os.kill(-1, signal.SIGSTOP if request["op"] == "stop" else signal.SIGCONT)
            return
        *inherited, status = descriptors
        try:
            # a child that only executes something needs none of the interpreter's fork hooks
            pid = os.fork() if request["op"] == "python" else bare_fork()
        except OSError as error:
            os.write(status, STATUS.pack(error.errno or errno.EAGAIN, 0, 0.0, 0.0))
            pid = -1
        if pid == 0:
            self.child(request, inherited, status)
        for descriptor in inherited:
            os.close(descriptor)
        if pid > 0:
            self.running[pid] = (request["id"], status)
        else:
            os.close(status)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            _, pipe = self.running.pop(pid, (0, -1))
            if pipe >= 0:
                seconds = usage.ru_utime + usage.ru_stime
                with contextlib.suppress(OSError):  # the host may have given up on it
                    os.write(pipe, STATUS.pack(0, status, seconds, usage.ru_maxrss / 1024))
                os.close(pipe)

    def child(self, request: dict[str, Any], inherited: list[int], status: int) -> None:
        """In the forked child: never returns, but for `Child`."""
        try:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
            os.setsid()
            for target, descriptor in enumerate(inherited):
                os.dup2(descriptor, target)
            os.closerange(len(inherited), 4096)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))
            if self.switch:
                os.setresgid(self.user, self.user, self.user)
                os.setresuid(self.user, self.user, self.user)
            if self.user == 0:  # another user has lost them by becoming it
                keep_capabilities(())
            prctl(PR_SET_DUMPABLE, 1)
            write("/proc/self/oom_score_adj", "500")  # rather than init
            if request["op"] in FILES:
                os._exit(answer(FILES[request["op"]], request))
            try:
                os.chdir(request["cwd"])
            except OSError as error:
                os.write(2, "{}: {}\n".format(request["cwd"], error.strerror).encode())
                os._exit(126)
            if request["op"] == "exec":
                execute(request["argv"], {**self.environment, **request["env"]})
            for name, value in request["env"].items():  # the rest is there already
                os.environ[name] = value
        except BaseException as error:
            os.write(2, f"the command could not be started: {error!r}\n".encode())
            os._exit(126)
        raise Child(request["source"])


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request with its descriptors; the end of the box when the host hung up."""
    descriptors = array.array("i")
    data, ancillary, _, _ = control.recvmsg(4, socket.CMSG_SPACE(8 * descriptors.itemsize), 0x40000000)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    data += exactly(control, 4 - len(data))
    (length,) = struct.unpack("<I", data)
    return json.loads(exactly(control, length)), list(descriptors)


def exactly(control: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = control.recv(min(length - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def kill_tree(root: int, spare_root: bool, since: int) -> None:
    """Kill a process and its descendants (those started after `since`, in clock ticks, when the root is spared)."""
    parents: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(name))
            started[int(name)] = int(fields[19])
    doomed, queue = [] if spare_root else [root], [root]
    while queue:
        for pid in parents.get(queue.pop(), ()):
            queue.append(pid)
            if not spare_root or started[pid] >= since:
                doomed.append(pid)
    for pid in doomed:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def execute(argv: list[str], env: dict[str, str]) -> None:
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)


def read_file(request: dict[str, Any]) -> None:
    descriptor = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    while True:
        part = os.read(descriptor, 1 << 20)
        if not part:
            return
        write_all(1, part)


def write_file(request: dict[str, Any]) -> None:
    parent = os.path.dirname(request["path"])
    if parent:
        os.makedirs(parent, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(request["path"], flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    os.fchmod(descriptor, request["mode"])
    while True:
        part = os.read(0, 1 << 20)
        if not part:
            return
        write_all(descriptor, part)


def list_folder(request: dict[str, Any]) -> None:
    names = sorted(os.listdir(os.fsencode(request["path"])))
    write_all(1, b"".join(name + b"\0" for name in names))


FILES: dict[str, Callable[[dict[str, Any]], None]] = {"read": read_file, "write": write_file, "list": list_folder}


def answer(operation: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> int:
    """Do a file operation as the box's user; the errno goes back as the exit status."""
    try:
        os.chdir("/box")
        operation(request)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def prepare_python(path: list[str]) -> dict[str, Any]:
    """Make the forked interpreter look like `python3 -c`, and return the namespace of its `__main__`."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["-c"]
    sys.path[:] = ["", *path]
    gc.freeze()  # or the first collection would walk, and so copy, all that was made since the zygote's last one
    gc.enable()
    namespace: dict[str, Any] = main.__dict__
    namespace["__builtins__"] = sys.modules["builtins"]
    return namespace
