"""A Harbor task as it lies on disk (schema 1.4), and Docker through its command line.

task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh
"""

from __future__ import annotations

import asyncio
import io
import json
import posixpath
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, AuthoringError, InfraError

MAX_OUTPUT = 1 << 20
"""Bytes of a command's output that are kept."""
MAX_TREE = 256 << 20
"""Bytes of a working folder that are taken out of a container."""
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command of Docker ended."""

    code: int
    output: bytes
    errors: bytes
    too_long: bool = False


async def docker(*words: str, stdin: bytes = b"", timeout: float = 600.0, limit: int = MAX_OUTPUT) -> Ended:
    """Run a command of Docker; its output is read up to a limit, and the rest dropped. TimeoutError when it is late."""
    try:
        process = await asyncio.create_subprocess_exec(
            "docker", *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise InfraError(f"docker cannot be started: {error}") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    async def feed(pipe: asyncio.StreamWriter) -> None:
        try:
            pipe.write(stdin)
            await pipe.drain()
            pipe.close()
        except (BrokenPipeError, ConnectionResetError):
            pass

    async def take(pipe: asyncio.StreamReader) -> tuple[bytes, bool]:
        kept, dropped = bytearray(), False
        while part := await pipe.read(1 << 16):
            dropped = dropped or len(kept) + len(part) > limit
            kept += part[: max(0, limit - len(kept))]
        return bytes(kept), dropped

    try:
        async with asyncio.timeout(timeout):
            _, (output, long), (errors, _) = await asyncio.gather(
                feed(process.stdin), take(process.stdout), take(process.stderr)
            )
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ended(code, output, errors, long)


async def must(*words: str, **options: Any) -> bytes:
    """Run a command of Docker that has nothing of the agent's in it; InfraError when it fails."""
    try:
        ended = await docker(*words, **options)
    except TimeoutError:
        raise InfraError(f"docker {words[0]} did not end in time") from None
    if ended.code:
        raise InfraError(f"docker {words[0]}: {ended.errors.decode('utf-8', 'replace').strip()[-300:]}")
    return ended.output


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task."""

    folder: Path
    name: str
    prompt: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a task; refuse, by name, what cannot be played."""

        def refuse(what: str) -> AuthoringError:
            return AuthoringError(f"{folder}: {what}")

        try:
            config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            prompt = (folder / "instruction.md").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise refuse(f"this is no Harbor task: {error}") from None
        environment = _section(config, "environment")
        if config.get("steps") or (folder / "steps").is_dir():
            raise refuse("a task of several steps is not played")
        if any((folder / "environment" / name).exists() for name in COMPOSE):
            raise refuse("a task of several containers (docker-compose) is not played")
        if (folder / "tests" / "Dockerfile").exists() or _section(config, "verifier").get("environment"):
            raise refuse("a verifier with an image of its own is not played")
        for key in ("mcp_servers", "gpus", "tpu"):
            if environment.get(key):
                raise refuse(f"environment.{key} is not played")
        if str(environment.get("os", "linux")).lower() != "linux":
            raise refuse(f"environment.os = {environment['os']!r} is not played")
        if not (folder / "tests" / "test.sh").is_file():
            raise refuse("tests/test.sh is missing")
        if not environment.get("docker_image") and not (folder / "environment" / "Dockerfile").is_file():
            raise refuse("there is neither environment/Dockerfile nor environment.docker_image")
        name = str(_section(config, "task").get("name") or folder.name)
        return cls(folder, name, prompt, config)

    @property
    def environment(self) -> Mapping[str, Any]:
        return _section(self.config, "environment")

    @property
    def verifier(self) -> Mapping[str, Any]:
        return _section(self.config, "verifier")

    @property
    def wants_network(self) -> bool:
        """Whether the task would have a network under Harbor; here it never has."""
        return str(self.environment.get("network_mode", "public")) != "no-network"

    async def image(self) -> str:
        """Return the image, which is built from the task's Dockerfile where none is named. Nothing is pulled."""
        if named := self.environment.get("docker_image"):
            return str(named)
        tag = f"agentrl-harbor-{self.folder.resolve().name.lower()}:local"
        seconds = float(self.environment.get("build_timeout_sec", 600))
        await must("build", "-q", "--network", "none", "-t", tag, str(self.folder / "environment"), timeout=seconds)
        return tag

    async def workdir(self, image: str) -> str:
        """Return the folder in which the agent works: the declared one, or the image's own."""
        if declared := self.environment.get("workdir"):
            return str(declared)
        about = json.loads(await must("image", "inspect", image))[0]["Config"]
        return str(about.get("WorkingDir") or "/")

    async def container(self, image: str, workdir: str) -> str:
        """Start a container in which nothing runs yet, without a network."""
        limits = [
            "--memory", f"{int(self.environment.get('memory_mb') or 2048)}m",
            "--cpus", str(float(self.environment.get("cpus") or 1)),
            "--pids-limit", "512",
            "--security-opt", "no-new-privileges",
            "--cap-drop", "NET_RAW", "--cap-drop", "MKNOD", "--cap-drop", "SYS_CHROOT", "--cap-drop", "AUDIT_WRITE",
        ]  # fmt: skip
        variables = _variables(self.environment.get("env"))
        words = ["run", "-d", "--network", "none", "--init", *limits, *variables, "-w", workdir, "--label", "agentrl"]
        return (await must(*words, "--entrypoint", "sleep", image, "infinity")).decode().strip()


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) or {}
    return section if isinstance(section, dict) else {}


def _variables(env: Any) -> list[str]:
    return [word for key, value in dict(env or {}).items() for word in ("-e", f"{key}={value}")]


async def tree_of(container: str, workdir: str) -> bytes:
    """Take a working folder out of a stopped container; AgentError for one that is too large."""
    ended = await docker("cp", f"{container}:{workdir}", "-", limit=MAX_TREE)
    if ended.too_long:
        raise AgentError(f"the working folder holds more than {MAX_TREE >> 20} MiB")
    if ended.code:
        raise AgentError(f"the working folder {workdir} is gone: {ended.errors.decode('utf-8', 'replace')[-200:]}")
    return kept(ended.output)


def kept(tree: bytes) -> bytes:
    """Return a tar of the folders and regular files of another, and of links that stay inside; nothing else.

    A link to /tests would let a submission show the expected values as its own; devices and set-user-id programs have
    no place in what is graded.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tree)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            member.mode &= 0o777
            if member.isfile() or member.isdir():
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
            elif member.issym():
                root = member.name.split("/")[0]
                target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
                if not member.linkname.startswith("/") and (target == root or target.startswith(f"{root}/")):
                    new.addfile(member)
    return out.getvalue()


def packed(folder: Path, name: str) -> bytes:
    """Return a folder as a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, arcname=name)
    return out.getvalue()


async def remove(containers: Sequence[str]) -> None:
    """Remove containers; what is gone already is no matter."""
    if containers:
        await docker("rm", "-f", *containers)
