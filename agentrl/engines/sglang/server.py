"""One SGLang server process: started, watched, and ended with agentrl.

agentrl ── Popen, new session ──> sglang.launch_server ── scheduler, detokenizer (same process group)
   │                                     ^
   └── pipe ──> guard ── kills the group when the pipe closes: at close(), or when agentrl dies in any way

SGLang leaves sockets among its temporary files: these have a folder of their own, which is removed with the group.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import httpx

from agentrl.engines.sglang.install import STAND_INS
from agentrl.errors import EngineError, UserError

ROOT = "/tmp"
"""Where the server's temporary files are: a short path, since sockets lie among them."""
GUARD = """
import contextlib, os, shutil, signal, sys
sys.stdin.buffer.read()
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-overlap-schedule", "--sleep-on-idle",
)  # fmt: skip


@dataclass(eq=False)
class Server:
    """A server that we launch. `start` may be called again after it died."""

    model: Path
    _: KW_ONLY
    python: Path
    device: str
    log: Path
    flags: tuple[str, ...] = ()
    memory_fraction: float = 0.4
    timeout_s: float = 600.0
    host: str = "127.0.0.1"
    """The address that it listens on; all who reach it can ask for tokens and send it weights."""
    url: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _temporary: str = field(default="", init=False)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def command(self, port: int) -> list[str]:
        """Return the command line; the caller's flags come last, and so win."""
        command = [str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", self.host, "--port", str(port)]
        command += ["--mem-fraction-static", str(self.memory_fraction)]
        command += CPU_FLAGS if self.device == "cpu" else ()
        return [*command, *self.flags]

    def environment(self) -> dict[str, str]:
        """Return the process's environment: ours, the stand-ins on a machine without a GPU, and no downloads."""
        compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"  # kept from one server to the next
        env = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)
        if self.device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
            env["PYTHONPATH"] = str(STAND_INS / "shims")
        elif "--enable-memory-saver" in self.flags:
            # The memory saver is preloaded, before torch could say where its own CUDA runtime is.
            paths = [*_cuda_runtimes(self.python), *filter(None, [env.get("LD_LIBRARY_PATH")])]
            env["LD_LIBRARY_PATH"] = ":".join(paths)
        return env

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        if not self.python.exists():
            cpu = " --cpu" if self.device == "cpu" else ""
            raise UserError(
                f"no interpreter for SGLang at {self.python}; run `agentrl engine install sglang{cpu}`, "
                "or name one with rollout.engine.python or AGENTRL_SGLANG_PYTHON"
            )
        await self.stop()
        port = free_port(self.host)
        self.url = f"http://{self.host}:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.mkdtemp(prefix="agentrl-sglang-", dir=ROOT)
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command(port),
                    env={**self.environment(), "TMPDIR": self._temporary},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            guard = [sys.executable, "-S", "-E", "-c", GUARD, str(self._process.pid), self._temporary]
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
            await self._wait_until_healthy()
        except BaseException:
            await self.stop()
            raise

    async def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise EngineError(f"SGLang stopped while starting.\n{self.diagnosis()}")
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(0.25)
        raise EngineError(f"SGLang did not answer within {self.timeout_s:.0f} s.\n{self.diagnosis()}")

    def diagnosis(self, lines: int = 20) -> str:
        """Return how the process ended, and the last lines of its log."""
        state = "it is running"
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            state = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        try:
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            text = ""
        tail = [line[:500] for line in text.splitlines() if line.strip()][-lines:]
        return "\n".join([f"{state}; log {self.log}, its end:", *tail])

    async def stop(self) -> None:
        """End the whole process group. Safe to call twice."""
        process, guard, temporary = self._process, self._guard, self._temporary
        self._process, self._guard, self._temporary = None, None, ""
        try:
            await _ended(process, guard)
        finally:
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)


async def _ended(process: subprocess.Popen[bytes] | None, guard: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            await _wait(process, 5.0)
        _signal_group(process.pid, signal.SIGKILL)  # also what a dead leader left behind
        await _wait(process, 10.0)
    if guard is not None and guard.stdin is not None:
        guard.kill()
        guard.stdin.close()
        await _wait(guard, 5.0)


async def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _cuda_runtimes(python: Path) -> list[str]:
    """Return folders with a CUDA runtime library: of the server's own packages, of ours, of the system."""
    lib = python.absolute().parent.parent / "lib"
    packages = [*lib.glob("python3*/*-packages"), *map(Path, sys.path)]
    libraries = [file for folder in packages for file in folder.glob("nvidia/*/lib/libcudart.so.*")]
    libraries += Path("/usr/local").glob("cuda*/lib64/libcudart.so.*")
    return list(dict.fromkeys(str(file.parent) for file in libraries))


def free_port(host: str) -> int:
    """Return a port of `host` that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
