"""What every box does whose process 1 runs requests over pipes: commands, Python, shells and single files.

A backend says how a request is started (`_start`), how process 1 is spoken to (`_send`) and how it ends (`_destroy`,
`_death`); everything between a request and its result is the same for all of them, and lies here.
"""

from __future__ import annotations

import os
import select
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes.base import WORKSPACE, ExecResult, Sandbox, Shell, Usage, words_of
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.shell import ARGV, PipeShell
from agentrl.sandboxes.streams import Output, pump

STATUS = struct.Struct("<iidd")
"""As process 1 packs it: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""
Streams = Sequence[int | None]
"""For each descriptor of a command: None where the host writes it, else how many bytes it keeps; minus one for all."""


class Running:
    """Something that runs in a box, held by its pipes; also the session of a shell."""

    def __init__(self, box: PipedSandbox, number: int, pipes: list[int], status: int) -> None:
        self._box, self._number = box, number
        self.pipes, self.status = pipes, status

    def take(self, place: int) -> int:
        """One of the pipes, to be closed by whoever takes it."""
        taken, self.pipes[place] = self.pipes[place], -1
        return taken

    def kill(self, *, spare: bool = False, since: int = 0) -> None:
        self._box._send({"op": "kill", "id": self._number, "spare": spare, "since": since}, [])

    def ended(self) -> tuple[int, float, float]:
        """Exit code, CPU seconds and peak memory, as process 1 reports them; raises when it is gone."""
        data = os.read(self.status, STATUS.size)
        if len(data) != STATUS.size:
            raise self._box._death()
        failed, code, cpu, memory = STATUS.unpack(data)
        if failed:
            raise SandboxDied(f"no process could be started in the box, which is at its limits: {os.strerror(failed)}")
        return (-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)), cpu, memory

    @property
    def commands(self) -> int:
        return self.pipes[3]

    @property
    def replies(self) -> int:
        return self.pipes[4]

    @property
    def stdout(self) -> int:
        return self.pipes[1]

    @property
    def stderr(self) -> int:
        return self.pipes[2]

    def end(self) -> int:
        with self:
            poll = select.poll()
            poll.register(self.status, select.POLLIN)
            if not poll.poll(self._box.patience * 1000):
                self._box._destroy()
            return self.ended()[0]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in (*self.pipes, self.status):
            if descriptor >= 0:
                os.close(descriptor)
        self.pipes, self.status = [], -1

    def __del__(self) -> None:
        self.__exit__()  # a shell that nobody closed


class PipedSandbox(Sandbox):
    """A box whose commands a process 1 of ours starts."""

    patience: float
    """Seconds after which something that does not depend on the agent counts as broken."""
    _ledger: Ledger
    _warm = True
    """Whether process 1 is an interpreter of the box's own Python, so that `python` may run in a fork of it."""

    @abstractmethod
    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        """Send a request with pipes of its own."""

    @abstractmethod
    def _send(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Send a request, with descriptors where that can be done; its number."""

    @abstractmethod
    def _destroy(self) -> None:
        """End a box that does not answer any more."""

    @abstractmethod
    def _death(self) -> AgentError | SandboxError:
        """The error that says why process 1 is gone: from inside, or from outside."""

    def _ran(self, result: ExecResult) -> None:
        self._ledger.ran(result)

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        return self._run({"op": "exec", "argv": words_of(argv), "cwd": str(cwd)}, stdin, env, timeout)

    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        request: dict[str, Any] = {"op": "python", "source": str(source), "cwd": WORKSPACE}
        if not self._warm:
            request = {"op": "exec", "argv": ["python3", "-s", "-c", source], "cwd": WORKSPACE}
        return self._run(request, b"", None, timeout, message=message, reply_limit=reply_limit)

    def _environment(self, added: Mapping[str, str]) -> dict[str, str]:
        return {str(name): str(value) for name, value in {**self.spec.env, **added}.items()}

    def _run(
        self,
        request: dict[str, Any],
        stdin: bytes,
        env: Mapping[str, str] | None,
        timeout: float | None,
        *,
        message: bytes | None = None,
        reply_limit: int = 0,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run one request from its start to its end."""
        limit = self.spec.limits.output_bytes if output_limit is None else output_limit
        request["env"] = self._environment(env or {})
        running = self._start(request, (None, limit, limit, *((None, reply_limit) if message is not None else ())))
        with running:
            inputs = {running.take(0): stdin}
            outputs = {running.pipes[1]: Output(limit), running.pipes[2]: Output(limit)}
            if message is not None:
                inputs[running.take(3)] = message
                outputs[running.pipes[4]] = Output(reply_limit)
            limit_s = self.spec.limits.seconds if timeout is None else timeout
            pumped = pump(running.status, inputs, outputs, limit_s, running.kill)
            if not pumped.finished:
                self._destroy()
            code, cpu, memory = running.ended()
        kept = list(outputs.values())
        result = ExecResult(
            exit_code=code,
            stdout=bytes(kept[0].data),
            stderr=bytes(kept[1].data),
            timed_out=pumped.timed_out,
            truncated=any(output.dropped for output in kept),
            reply=bytes(kept[2].data) if len(kept) > 2 else b"",
            usage=Usage(wall_s=pumped.wall_s, cpu_s=cpu, memory_mb=memory),
        )
        if request["op"] in ("exec", "python"):
            self._ran(result)
        return result

    def shell(self) -> Shell:
        limits = self.spec.limits
        return PipeShell(self._session, limits.output_bytes, limits.seconds, self._ran)

    def _session(self) -> Running:
        request = {"op": "exec", "argv": list(ARGV), "cwd": WORKSPACE, "env": self._environment({})}
        running = self._start(request, (None, -1, -1, None, -1))
        os.close(running.take(0))
        return running

    def _file(self, request: dict[str, Any], content: bytes = b"") -> bytes:
        path = request["path"]
        if "\0" in path:
            raise ValueError(f"path {path!r} holds a NUL byte")
        result = self._run(request, content, None, self.patience, output_limit=self.spec.limits.disk_mb << 20)
        if result.exit_code < 0 or result.timed_out or result.truncated:
            raise AgentError(f"could not {request['op']} {path!r} in the box within its limits")
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        return result.stdout

    def read(self, path: str) -> bytes:
        return self._file({"op": "read", "path": path})

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._file({"op": "write", "path": path, "mode": mode}, content)

    def list(self, path: str = WORKSPACE) -> list[str]:
        return sorted(os.fsdecode(name) for name in self._file({"op": "list", "path": path}).split(b"\0")[:-1])
