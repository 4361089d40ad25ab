"""Process 1 of a container: the counterpart of the namespace backend's init, over stdin and stdout.

    host ──(stdin: frames)──> agent ──fork──> child: the sandbox's user, runs
         <──(stdout: frames)──      <─pipes──

Pipes cannot cross a daemon, so the agent keeps those of every running command and carries their bytes: to a command at
most WINDOW bytes that it has not read yet, from it at most what the host grants or wants to keep. When stdin ends, so
does the container.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import select
import signal
import struct
import sys
import termios
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import MTIME
from agentrl.sandboxes.docker.inner import frames
from agentrl.sandboxes.docker.inner.files import TOPS, Answer, Files
from agentrl.sandboxes.namespace.inner import kernel, seccomp
from agentrl.sandboxes.namespace.inner.init import STATUS, Init, prepare_python
from agentrl.sandboxes.namespace.inner.zygote import lower_limits, warm_up

BACKLOG = 1 << 20
"""Bytes on their way to the host beyond which no output of a command is read."""
FIRST_PIPE = 32
"""Pipes get numbers above the descriptors of a child, so that `dup2` never overwrites one."""
RLIMITS = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 8 << 20, resource.RLIMIT_MSGQUEUE: 1 << 20}
FIRST_PID = 32
"""The pid of the first command; lower ones are used up before."""
KEPT: list[Any] = []
"""What a child keeps, so that it need not free it."""


class Child(BaseException):
    """Raised in a forked child to leave all stack frames of the agent before untrusted Python code starts."""

    def __init__(self, source: str) -> None:
        self.source = source


class Stream:
    """One pipe between the agent and a running command."""

    def __init__(self, descriptor: int, keep: int | None) -> None:
        self.descriptor = descriptor
        self.left = keep
        """Bytes that the host still keeps; None for a stream with credit that the host grants step by step."""
        self.credit = frames.WINDOW
        self.buffer = bytearray()
        self.last = False
        """The host has sent all of its input."""

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Run:
    """One running command: its streams by number, and its status pipe."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.inputs: dict[int, Stream] = {}
        self.outputs: dict[int, Stream] = {}


def high(descriptor: int) -> int:
    """Move a descriptor above those that a child gets."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_PIPE)
    os.close(descriptor)
    return moved


def high_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    return high(reader), high(writer)


class Agent(Init):  # type: ignore[misc]  # mypy cannot follow a mounted name
    def __init__(self, plan: dict[str, Any], oom_score: int) -> None:
        # there is no socket: frames come on descriptor 0
        super().__init__(None, plan, dict(os.environ), oom_score)
        self.runs: dict[int, Run] = {}
        files = Files({top: high(os.open(path, tree.FOLDER)) for top, path in tops(plan).items()})
        self.operations = {**files.operations, "kill_all": self.kill_all}
        self.received = bytearray()
        self.unsent = bytearray()

    # the loop

    def serve(self) -> None:
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        wake = kernel.child_descriptor()
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(wake, select.POLLIN)
            if self.unsent:
                poll.register(1, select.POLLOUT)
            for run in self.runs.values():
                poll.register(run.status, select.POLLIN)
                for stream in run.inputs.values():
                    if stream.buffer and stream.descriptor >= 0:
                        poll.register(stream.descriptor, select.POLLOUT)
                for stream in run.outputs.values():
                    if stream.credit and stream.descriptor >= 0 and len(self.unsent) < BACKLOG:
                        poll.register(stream.descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self.reap()
            if 1 in ready:
                self.flush()
            for number, run in list(self.runs.items()):
                self.carry(number, run, ready)
            if 0 in ready:
                self.listen()
            self.flush()

    def listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(0, 1 << 18)
            if not part:
                os._exit(0)
            self.received += part
        for received in frames.take_frames(self.received):
            self.handle_frame(*received)

    def handle_frame(self, kind: int, place: int, number: int, payload: bytes) -> None:
        run = self.runs.get(number)
        if kind == frames.REQUEST:
            request, blob = frames.unpack(payload)
            request.setdefault("id", number)
            if request["op"] in self.operations:
                self.operate(request, blob, number)
            elif request["op"] in ("kill", "stop", "continue"):
                self.handle(request, [])
            else:
                self.start(request, number)
        elif run is not None and kind == frames.DATA and place in run.inputs:
            stream = run.inputs[place]
            stream.buffer += payload
            stream.last |= not payload
            self.feed(number, place, stream)
        elif run is not None and kind == frames.GRANT and place in run.outputs:
            run.outputs[place].credit += struct.unpack("<I", payload)[0]

    def send(self, kind: int, place: int, number: int, payload: bytes) -> None:
        self.unsent += frames.HEADER.pack(len(payload), kind, place, number)
        self.unsent += payload

    def flush(self, *, all_of_it: bool = False) -> None:
        while self.unsent:
            try:
                del self.unsent[: os.write(1, memoryview(self.unsent)[: frames.WINDOW])]
            except BlockingIOError:
                if not all_of_it:
                    return
                select.select([], [1], [])
            except OSError:
                os._exit(0)  # the host hung up

    # commands

    def start(self, request: dict[str, Any], number: int) -> None:
        """Start a command; its `streams` are as in agentrl/sandboxes/piped.py."""
        reader, writer = high_pipe()
        run = Run(reader)
        theirs = []
        for place, keep in enumerate(request["streams"]):
            to_read, to_write = high_pipe()
            mine, other = (to_write, to_read) if keep is None else (to_read, to_write)
            theirs.append(other)
            os.set_blocking(mine, False)
            streams = run.inputs if keep is None else run.outputs
            streams[place] = Stream(mine, None if keep is None or keep < 0 else keep)
        self.runs[number] = run
        source = self.handle(request, [*theirs, writer])
        if source is not None:
            raise Child(source)

    def carry(self, number: int, run: Run, ready: set[int]) -> None:
        for place, stream in run.inputs.items():
            if stream.descriptor in ready:
                self.feed(number, place, stream)
        for place, stream in run.outputs.items():
            if stream.descriptor in ready:
                self.drain(number, place, stream, stream.credit)
        if run.status in ready:
            status = os.read(run.status, STATUS.size)
            for place, stream in run.outputs.items():  # what it wrote before its end, not what others still write
                left = array.array("i", [0])
                if stream.descriptor >= 0:
                    fcntl.ioctl(stream.descriptor, termios.FIONREAD, left)
                while left[0] > 0:
                    taken = self.drain(number, place, stream, left[0])
                    if not taken:
                        break
                    left[0] -= taken
            for stream in (*run.inputs.values(), *run.outputs.values()):
                stream.close()
            os.close(run.status)
            del self.runs[number]
            self.send(frames.END, 0, number, status)

    def feed(self, number: int, place: int, stream: Stream) -> None:
        taken = 0
        try:
            while stream.buffer and stream.descriptor >= 0:
                wrote = os.write(stream.descriptor, stream.buffer)
                del stream.buffer[:wrote]
                taken += wrote
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it
            stream.close()
        if stream.descriptor < 0:
            taken += len(stream.buffer)
            stream.buffer.clear()
        elif stream.last and not stream.buffer:
            stream.close()
        if taken:
            self.send(frames.GRANT, place, number, struct.pack("<I", taken))

    def drain(self, number: int, place: int, stream: Stream, most: int) -> int:
        """Pass on up to `most` bytes that are available; return how many there were."""
        try:
            part = os.read(stream.descriptor, min(most, frames.WINDOW))
        except BlockingIOError:
            return 0
        if not part:
            stream.close()
            self.send(frames.DATA, place, number, b"")
            return 0
        kept = part
        if stream.left is None:
            stream.credit = max(stream.credit - len(part), 0)
        else:
            # one byte beyond the limit tells the host that something was dropped
            kept, stream.left = part[: stream.left + 1], max(stream.left - len(part), -1)
        if kept:
            self.send(frames.DATA, place, number, kept)
        return len(part)

    # what the agent itself does for the host

    def operate(self, request: dict[str, Any], blob: memoryview, number: int) -> None:
        try:
            reply = self.operations[request["op"]](request, blob, lambda part: self.answer(number, part))
            payload = reply if isinstance(reply, bytes) else frames.pack({"value": reply})
        except AgentError as error:
            payload = frames.pack({"agent": str(error)})
        except PermissionError as error:  # everything in here belongs to the user that asks
            payload = frames.pack({"agent": f"files of the box are closed even to their owner: {error}"})
        except OSError as error:
            payload = frames.pack({"errno": error.errno, "message": error.strerror})
        self.send(frames.ANSWER, 1, number, payload)

    def answer(self, number: int, part: bytes) -> None:
        """Send one part of an answer before the next is made, so that memory never holds all of them."""
        self.send(frames.ANSWER, 0, number, part)
        self.flush(all_of_it=True)

    def kill_all(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # the kernel includes processes that are just being forked
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                self.reap()


def use_up_pids() -> None:
    """Use up the low pids: the runtime's own threads took a number of them that varies between containers."""
    while True:
        pid = kernel.bare_fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if pid >= FIRST_PID - 1:
            return


def tops(plan: dict[str, Any]) -> dict[str, str]:
    """Return the writable folders of this sandbox, by the names that they have in a snapshot."""
    return {**TOPS, "box": plan["workdir"], **{path: path for path in plan["writable"]}}


def check_places(plan: dict[str, Any]) -> None:
    """Refuse an image in which a writable folder is a link: it would have been mounted where the link leads."""
    for path in tops(plan).values():
        if os.path.realpath(path) != path and path not in TOPS.values():
            os.write(2, ("the image has a link at " + path + ", where no folder of the sandbox can appear").encode())
            os._exit(1)


def settle(places: dict[str, str]) -> None:
    """Protect this process: nobody in the container may trace, read or signal it, or make forbidden system calls."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.Filter(seccomp.program(kernel.MACHINE)).install()
    kernel.Filter(seccomp.own_limits_only(kernel.MACHINE)).install()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not receive from inside
    lower_limits(RLIMITS)
    for place in places.values():
        if place not in TOPS.values():  # a tmpfs gets the mode of the folder that the image has there
            os.chmod(place, 0o755)
        os.utime(place, (MTIME, MTIME))


def main(plan: dict[str, Any], modules: list[str]) -> tuple[str, dict[str, Any]]:
    """Serve. Return only in a child that is to run Python: the source, and the namespace to run it in."""
    path = list(sys.path)
    for name in set(os.environ) - set(plan["env"]):
        del os.environ[name]
    os.environ.update(plan["env"])
    use_up_pids()
    stdout, nowhere = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)  # warming up prints
    warm_up(modules)
    os.dup2(stdout, 1)
    os.close(stdout)
    os.close(nowhere)
    oom_score = high(os.open("/proc/self/oom_score_adj", os.O_RDWR))  # while this process may still open its own
    check_places(plan)
    settle(tops(plan))
    agent = Agent(plan, oom_score)
    agent.send(frames.ANSWER, 1, 0, frames.pack({"value": list(sys.version_info[:2])}))
    try:
        agent.serve()
    except Child as child:
        KEPT.extend((agent, child, modules))
        return child.source, prepare_python(path)
    raise AssertionError("the agent only ends by _exit")
