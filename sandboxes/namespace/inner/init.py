"""Process 1 of a sandbox: takes requests from the host over one socket and runs each in its own child.

    host ──(socket: length, dict, descriptors)──> init ──fork──> child: becomes the sandbox's user, runs
         <──────────(status pipe: how it ended)──      <─wait──

A request brings its own descriptors, the last a status pipe; init keeps no state but pid → status pipe. Children run as
another user than init (where the map has more than one id), so that they can neither signal it nor read its memory.
"""

from __future__ import annotations

import _random
import _signal  # type: ignore[import-not-found]  # without the enum wrappers, whose memory every child would copy
import contextlib
import errno
import gc
import marshal
import os
import resource
import select
import signal
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any

from .kernel import PR_SET_DUMPABLE, bare_fork, child_descriptor, execute_only, hold_to, keep_capabilities, prctl

STATUS = struct.Struct("<iidd")
"""What goes down a status pipe: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""
SOONER = b"1000"
"""The oom score of every process but init."""
CONTROL = 3
"""The descriptor of init's socket to the host."""


class Init:
    def __init__(self, control: Any, plan: dict[str, Any], environment: dict[str, str], oom_score: int) -> None:
        """`oom_score`: the open file that sets how soon the kernel kills this process when memory runs out."""
        self.control = control
        self.user: int = plan["user"]
        self.switch: bool = plan["switch"]
        self.open_files: int = plan["open_files"]
        self.workdir: str = plan["workdir"]
        self.environment = environment
        self.oom_score, self.own_score = oom_score, os.read(oom_score, 16)
        self.fence = -1 if plan["tools"] is None else execute_only(programs(plan["tools"], environment["PATH"]))
        self.running: dict[int, tuple[int, int]] = {}

    def serve(self) -> str:
        """Serve until the host hangs up. Return the source in a child that is to run Python."""
        wake = child_descriptor()
        poll = select.poll()
        poll.register(CONTROL, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    os.read(wake, 4096)
                    self.reap()
                else:
                    source = self.handle(*receive(self.control))
                    if source is not None:
                        return source

    def handle(self, request: dict[str, Any], descriptors: list[int]) -> str | None:
        """Handle one request. Return a source only in a child that is to run it as Python."""
        if request["op"] == "kill":
            for pid, (number, _) in list(self.running.items()):
                if number == request["id"]:
                    kill_tree(pid, request.get("spare", False), request.get("since", 0))
            return None
        if request["op"] in ("stop", "continue"):
            with contextlib.suppress(ProcessLookupError):  # everything but this process
                os.kill(-1, signal.SIGSTOP if request["op"] == "stop" else signal.SIGCONT)
            return None
        status = descriptors.pop()
        self.set_oom_score(SOONER)  # inherited by the child, which is to be killed before init
        try:
            pid = bare_fork()
        except OSError as error:
            os.write(status, STATUS.pack(error.errno or errno.EAGAIN, 0, 0.0, 0.0))
            pid = -1
        if pid == 0:
            return self.child(request, descriptors)
        self.set_oom_score(self.own_score)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self.running[pid] = (request["id"], status)
        else:
            os.close(status)
        return None

    def set_oom_score(self, score: bytes) -> None:
        try:  # noqa: SIM105  # suppress() is a class with methods, and so memory to copy
            os.write(self.oom_score, score)
        except OSError:
            pass  # a kernel that does not allow it: a preference, not a safeguard

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
                try:  # noqa: SIM105
                    os.write(pipe, STATUS.pack(0, status, seconds, usage.ru_maxrss / 1024))
                except OSError:
                    pass  # the host may have given up on it
                os.close(pipe)

    def child(self, request: dict[str, Any], inherited: list[int]) -> str:
        """In the forked child: become the sandbox's user; return only to run Python."""
        try:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
            os.setsid()
            if self.fence >= 0:
                hold_to(self.fence)
            for target, descriptor in enumerate(inherited):
                os.dup2(descriptor, target)
            os.closerange(len(inherited), 4096)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))
            if self.switch:
                os.setresgid(self.user, self.user, self.user)
                os.setresuid(self.user, self.user, self.user)
            if self.user == 0:  # another user has lost them by becoming it
                keep_capabilities(())
            if request["op"] in FILES:
                os._exit(answer(FILES[request["op"]], request, self.workdir))
            try:
                os.chdir(request["cwd"])
            except OSError as error:
                os.write(2, "{}: {}\n".format(request["cwd"], error.strerror).encode())
                os._exit(126)
            if request["op"] == "exec":
                execute(request["argv"], {**self.environment, **request["env"]})
            prctl(PR_SET_DUMPABLE, 1)  # as an exec would have
            for name, value in request["env"].items():  # the rest is set already
                os.environ[name] = value
        except BaseException as error:
            os.write(2, f"the command could not be started: {error!r}\n".encode())
            os._exit(126)
        source: str = request["source"]
        return source


def programs(names: list[str], search_path: str) -> list[str]:
    """Return the paths of programs of these names, and of the loaders without which none of them starts."""
    paths = [folder + "/" + name for folder in search_path.split(":") for name in names]
    for folder in ("/lib", "/lib64", "/lib/" + os.uname().machine + "-linux-gnu"):
        if os.path.isdir(folder):
            paths += [folder + "/" + name for name in os.listdir(folder) if name.startswith("ld-")]
    return sorted({os.path.realpath(path) for path in paths if os.access(path, os.X_OK)})


def receive(control: Any) -> tuple[dict[str, Any], list[int]]:
    """Receive one request with its descriptors; exit if the host hung up."""
    data, ancillary, _, _ = control.recvmsg(4, 64, 0x40000000)  # room for 8 descriptors, to be closed by exec
    descriptors = memoryview(ancillary[0][2]).cast("i").tolist() if ancillary else []
    if len(data) < 4:
        data += exactly(control, 4 - len(data))
    return marshal.loads(exactly(control, int.from_bytes(data, "little"))), descriptors


def exactly(control: Any, length: int) -> bytes:
    data: bytes = control.recv(min(length, 1 << 20))
    if not data:
        os._exit(0)
    return data if len(data) == length else data + exactly_more(control, length - len(data))


def exactly_more(control: Any, length: int) -> bytes:
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


def answer(operation: Callable[[dict[str, Any]], None], request: dict[str, Any], workdir: str) -> int:
    """Do a file operation as the sandbox's user; return its errno as the exit status."""
    try:
        os.chdir(workdir)
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
    _random.Random.seed(sys.modules["random"]._inst)  # as the hook of a fork would do
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["-c"]
    sys.path[:] = ["", *path]
    gc.freeze()  # or the first collection would visit, and so copy, all objects made since the zygote's last one
    gc.enable()
    namespace: dict[str, Any] = main.__dict__
    namespace["__builtins__"] = sys.modules["builtins"]
    return namespace
