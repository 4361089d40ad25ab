"""The docker backend: hardened containers of a Docker daemon, each with an agent that runs commands quickly."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, AuthoringError, SandboxError
from agentrl.sandboxes.base import (
    ENVIRONMENT,
    HOME,
    MTIME,
    Availability,
    Backend,
    Entry,
    SandboxSpec,
    closed_on_error,
)
from agentrl.sandboxes.container import in_container
from agentrl.sandboxes.docker import derived, images
from agentrl.sandboxes.docker.box import PATIENCE, DockerSandbox
from agentrl.sandboxes.docker.container import Container, Fate, sdk_errors
from agentrl.sandboxes.docker.inner.frames import unpack
from agentrl.sandboxes.docker.line import Line
from agentrl.sandboxes.namespace.inner.cgroups import pid_namespace, start_time
from agentrl.sandboxes.namespace.launch import LOAD, MODULES, RUN, WARM

LABEL = "agentrl.owner"
AT_ONCE = 8
"""Containers that are started at the same time; with more, the daemon only gets slower."""
WRITABLE_ROOT = ("/etc", "/opt", "/root", "/srv", "/usr/local", "/var")
"""What `writable_root` makes writable: a tmpfs each, into which the image's files are copied. Docker cannot limit the
size of a container's own layer on most machines, so the rest of the root stays read-only."""
RUNTIME = "AGENTRL_DOCKER_RUNTIME"
"""The variable that names the runtime of every container (runsc, kata-runtime, ...) if the constructor does not."""

START = """
def start():
    import json
    def exactly(length):
        parts = bytearray()
        while len(parts) < length:
            part = os.read(0, length - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return bytes(parts)
    sources = json.loads(exactly(int.from_bytes(exactly(4), "little")))
    main, plan, warm = load(sources["modules"]), sources["plan"], sources["warm"]
    del sources
    return main(plan, warm)
source, space = start()
del load, start
"""
STAND_IN = f"""
from collections import namedtuple
MTIME = {MTIME}
Entry = namedtuple("Entry", "kind content mode")
"""
"""What tree.py needs of agentrl.sandboxes.base, without all that it imports."""


def _sources() -> list[tuple[str, str | None]]:
    """Return the agent's modules and sources (None for a package), in the order in which they import each other."""
    inner = [f"sandboxes.namespace.inner.{name}" for name in MODULES]
    inner += [f"sandboxes.docker.inner.{name}" for name in ("frames", "files", "agent")]
    sources: dict[str, str | None] = {}
    for module in ("errors", "sandboxes.base", "sandboxes.tree", "sandboxes.snapshot", *inner):
        parts = ["agentrl", *module.split(".")]
        for depth in range(1, len(parts)):
            sources.setdefault(".".join(parts[:depth]), None)
        located = importlib.util.find_spec(".".join(parts))
        assert located is not None and located.origin is not None
        sources[located.name] = STAND_IN if module == "sandboxes.base" else Path(located.origin).read_text()
    return list(sources.items())


def _owner() -> str:
    """Return a unique name of this process: boot id of the machine, pid namespace, pid, start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{pid_namespace()}:{os.getpid()}:{start_time(str(os.getpid()))}"


def _gone(owner: str) -> bool:
    """Whether the process of that name has ended, as far as this process can tell."""
    parts, own = owner.split(":"), _owner().split(":")
    return len(parts) == 4 and parts[:2] == own[:2] and start_time(parts[2]) != parts[3]


class DockerBackend(Backend):
    name = "docker"

    def __init__(self, *, runtime: str | None = None) -> None:
        """`runtime`: an OCI runtime the daemon knows (runsc, kata-runtime); by default the daemon's default."""
        self._runtime = runtime or os.environ.get(RUNTIME) or None
        self._lock = threading.Lock()
        self._starting = threading.BoundedSemaphore(AT_ONCE)
        self._client: Any = None
        self._owner, self._ahead, self._remaps = "", 0.0, False
        self._sources: list[tuple[str, str | None]] = []
        self._roots: dict[str, tuple[str, str]] = {}
        self._contents: dict[str, dict[str, dict[str, Entry]]] = {}

    def client(self) -> Any:
        """Return the connected SDK client, or raise a SandboxError that says what is missing."""
        with self._lock:
            if self._client is None or self._owner != _owner():
                self._client, self._owner, self._sources = self._connect(), _owner(), _sources()
                daemon_time = datetime.fromisoformat(self._client.info()["SystemTime"]).timestamp()
                self._ahead = daemon_time - time.clock_gettime(time.CLOCK_REALTIME)
                security = self._client.info().get("SecurityOptions") or ()
                self._remaps = any(option in ("name=userns", "name=rootless") for option in security)
                self._sweep()
            return self._client

    def _connect(self) -> Any:
        try:
            import docker
            from docker.errors import DockerException
        except ImportError as error:
            raise SandboxError("the docker backend needs the Docker SDK: pip install 'agentrl[docker]'") from error
        try:
            client = docker.from_env(timeout=int(PATIENCE) * 2, max_pool_size=64)
            client.ping()
        except DockerException as error:
            address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
            raise SandboxError(f"no Docker daemon answers at {address}: {_plain(error)}") from error
        return client

    def _now(self) -> float:
        """Return the time of the daemon's clock, which need not be this machine's."""
        return time.clock_gettime(time.CLOCK_REALTIME) + self._ahead

    def _sweep(self) -> None:
        """Remove containers whose owner died before the daemon noticed. (Most end with their owner's connection.)"""
        from docker.errors import DockerException

        with suppress(DockerException):
            for container in self._client.api.containers(all=True, filters={"label": LABEL}):
                if _gone(container.get("Labels", {}).get(LABEL, "")):
                    with suppress(DockerException):
                        self._client.api.remove_container(container["Id"], force=True, v=True)

    def available(self) -> Availability:
        try:
            client = self.client()
            known = client.info().get("Runtimes", {})
            if self._runtime and self._runtime not in known:
                raise SandboxError(f"the Docker daemon has no runtime {self._runtime!r} (it has: {', '.join(known)})")
            base = images.describe(images.HOST)
            missing: tuple[str, ...] = ()
            if base is not None and images.inspect(client, base.tag) is None:
                missing = (f"the image {base.tag}, which is made at first use (by: {images.way(base)})",)
            else:
                with self.create(SandboxSpec()) as box:
                    if not box.exec(["true"], timeout=PATIENCE).ok:
                        raise SandboxError("a container started, but could not run `true`")
        except (SandboxError, AgentError) as error:
            return Availability(works=False, isolates=(), missing=(str(error),), fix=_remedy(str(error)))
        isolates = (
            f"files (own read-only root; runtime {self._runtime or client.info().get('DefaultRuntime')})",
            "processes",
            "network (own loopback only)",
            "ipc, host name",
            "system calls (seccomp: Docker's profile and ours)",
            "memory, pids, cpu limits (cgroup); disk (tmpfs)",
        )
        return Availability(works=True, isolates=isolates, missing=missing)

    def create(self, spec: SandboxSpec) -> DockerSandbox:
        with closed_on_error(self.prepare(spec)) as box:
            box.lay_out(spec)
        return box

    def prepare(self, spec: SandboxSpec) -> DockerSandbox:
        client = self.client()
        if spec.user == 0 and not self._remaps:
            raise AuthoringError(
                "the docker backend runs nothing as user 0 of the machine, which a container's root is here; set "
                "another `user` in the SandboxSpec, or give the daemon userns-remap"
            )
        with self._starting:
            if spec.image not in self._roots:
                self._roots[spec.image] = derived.ensure(client, spec.image, {LABEL: self._owner})
            reference, root = self._roots[spec.image]
            own = self._own_root(client, spec, reference)
            container = self._start(client, spec, reference, tuple(own))
        with closed_on_error(DockerSandbox(spec, root, container, self.prepare)) as box:
            for top, entries in own.items():
                box.write_root(top, entries)
        return box

    def _own_root(self, client: Any, spec: SandboxSpec, reference: str) -> dict[str, dict[str, Entry]]:
        """Return the parts of the root that are to be writable, with what the image holds there."""
        if not spec.writable_root:
            return {}
        if reference not in self._contents:
            self._contents[reference] = images.content(client, reference, WRITABLE_ROOT)
        own = {top: entries for top, entries in self._contents[reference].items() if top != spec.workdir}
        for top, entries in own.items():
            size = sum(len(entry.content) for entry in entries.values())
            if size > spec.limits.disk_mb << 20 or len(entries) > spec.limits.files:
                raise AuthoringError(
                    f"a writable root needs a copy of {top} of the image {spec.image!r}, {size >> 20} MB in "
                    f"{len(entries)} files: raise disk_mb and files in the Limits of the SandboxSpec"
                )
        return own

    def _start(self, client: Any, spec: SandboxSpec, reference: str, own: tuple[str, ...]) -> Container:
        identity, line = "", None
        try:
            identity = client.api.create_container(**self._settings(client, spec, reference, own))["Id"]
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            attached = client.api.attach_socket(identity, params=streams)
            line = Line(getattr(attached, "_sock", attached), attached)
            container = Container(client, identity, line, self._now)
            plan: dict[str, Any] = {"user": spec.user, "switch": False, "open_files": spec.limits.open_files}
            plan |= {"env": ENVIRONMENT, "tools": spec.tools, "workdir": spec.workdir}
            plan["writable"] = own
            sources = json.dumps({"modules": self._sources, "plan": plan, "warm": WARM.split()}).encode()
            line.raw(len(sources).to_bytes(4, "little") + sources)
            client.api.start(identity)
            greeting = line.greeting(PATIENCE)
            if greeting is None or "value" not in unpack(greeting[0])[0]:
                cause = line.said() or container.fate(Fate.ended, 2.0)
                raise SandboxError(f"a container of {reference} did not start: {cause}")
        except BaseException as error:
            if identity:
                with suppress(*sdk_errors()):
                    client.api.remove_container(identity, force=True, v=True)
            if line is not None:
                line.close()
            if isinstance(error, (*sdk_errors(), TimeoutError)):
                raise SandboxError(f"no container could be started: {_plain(error)}") from error
            raise
        return container

    def _settings(self, client: Any, spec: SandboxSpec, reference: str, writable: tuple[str, ...]) -> dict[str, Any]:
        """Return the arguments of `create_container`."""
        from docker.types import LogConfig, Ulimit

        limits = spec.limits
        own = f"exec,nosuid,nodev,size={limits.disk_mb}m,nr_inodes={limits.files + 16},uid={spec.user},gid={spec.user}"
        memory = limits.memory_mb << 20
        ulimits = {"core": 0, "fsize": limits.disk_mb << 20, "nofile": 4096}
        host = client.api.create_host_config(
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            tmpfs={
                spec.workdir: f"{own},mode=0755",
                HOME: f"{own},mode=0755",
                "/tmp": f"{own},mode=1777",
                "/dev/shm": f"{own},mode=1777",
                "/sys": "ro,noexec,nosuid,nodev,size=4k",
                **{path: f"{own},mode=0755" for path in writable},
            },
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=limits.processes + 1,
            nano_cpus=int(min(limits.cpus, os.cpu_count() or 1) * 1e9),
            ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in ulimits.items()],
            log_config=LogConfig(type="none"),
            auto_remove=True,
            runtime=self._runtime,
        )
        return {
            "image": reference,
            "command": ["python3", "-S", "-s", "-c", LOAD + START + RUN],
            "entrypoint": [],
            "hostname": "box",
            "user": f"{spec.user}:{spec.user}",
            "working_dir": "/",
            "environment": ENVIRONMENT,
            "stdin_open": True,
            "tty": False,
            "network_disabled": True,
            "labels": {LABEL: self._owner},
            "host_config": host,
            "healthcheck": {"test": ["NONE"]},
        }

    def close(self) -> None:
        """Close the connection to the daemon; open sandboxes belong to their holders."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None


def _plain(error: BaseException) -> str:
    """Return what the daemon said, or the innermost cause: both say more than the layers of libraries around them."""
    if getattr(error, "explanation", None):
        return str(error.explanation)  # type: ignore[attr-defined]
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {error}"


def _remedy(trouble: str) -> str:
    """Return the fix that most likely helps."""
    if "SDK" in trouble:
        return "pip install 'agentrl[docker]'"
    if "Permission" in trouble:
        return "usermod -aG docker $USER, then log in again (or run as root)"
    if "no runtime" in trouble:
        return "install the runtime and name it in /etc/docker/daemon.json"
    if "answers at" in trouble and in_container():
        return (
            "set DOCKER_HOST to a daemon that the container reaches; one whose socket is mounted into it gives it the "
            "whole machine"
        )
    if "answers at" in trouble:
        started = "systemctl start docker  (or, without systemd: dockerd &)"
        installed = shutil.which("dockerd") or os.path.exists("/usr/sbin/dockerd")
        return started if installed else f"apt-get install docker.io debootstrap; {started}"
    if "image" in trouble:
        return "apt-get install debootstrap"
    return ""
