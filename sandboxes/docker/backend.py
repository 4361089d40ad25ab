"""The docker backend: hardened containers of a Docker daemon, each with an agent that runs commands quickly."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl import errors
from agentrl.errors import AgentError, AuthoringError, SandboxError
from agentrl.sandboxes import snapshot, tree
from agentrl.sandboxes.base import ENVIRONMENT, HOME, MTIME, WORKSPACE, Availability, Backend, SandboxSpec
from agentrl.sandboxes.docker import images
from agentrl.sandboxes.docker.box import PATIENCE, DockerSandbox, Fate
from agentrl.sandboxes.docker.inner.frames import unpack
from agentrl.sandboxes.docker.line import Line
from agentrl.sandboxes.namespace.inner.cgroups import pid_namespace, start_time
from agentrl.sandboxes.namespace.launch import INNER, MODULES, RUN, WARM

OWN = Path(__file__).parent / "inner"
LABEL = "agentrl.owner"
AT_ONCE = 8
"""Containers that are started at the same time; a daemon asked for more only gets slower."""
RUNTIME = "AGENTRL_DOCKER_RUNTIME"
"""Names the runtime of every container where the constructor does not: runsc, kata-runtime, ..."""

LOAD = """
import atexit, os, sys
sys.path[:] = [p for p in sys.path if p]
def load():
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
    for name, text in sources["modules"]:
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
    main, plan, warm = module.main, sources["plan"], sources["warm"]
    names = {name for name, _ in sources["modules"]}
    for name in names:
        del sys.modules[name]
    del sources, text, module, names
    return main(plan, warm)
source, space = load()
del load
"""
STAND_IN = f"""
from collections import namedtuple
MTIME = {MTIME}
Entry = namedtuple("Entry", "kind content mode")
"""
"""What the file tree's code needs of agentrl.sandboxes.base, without all that it imports."""


def _sources() -> list[tuple[str, str | None]]:
    """The modules that the agent is made of, in the order in which they import each other; None for a package."""
    package, own = "agentrl.sandboxes.namespace.inner", "agentrl.sandboxes.docker.inner"
    inner = [(f"{package}.{name}", (INNER / f"{name}.py").read_text()) for name in MODULES]
    agent = [(f"{own}.{name}", (OWN / f"{name}.py").read_text()) for name in ("frames", "files", "agent")]
    files = [(module.__name__, Path(str(module.__file__)).read_text()) for module in (tree, snapshot)]
    return [
        ("agentrl", None),
        ("agentrl.errors", Path(str(errors.__file__)).read_text()),
        ("agentrl.sandboxes", None),
        ("agentrl.sandboxes.base", STAND_IN),
        *files,
        ("agentrl.sandboxes.namespace", None),
        (package, None),
        *inner,
        ("agentrl.sandboxes.docker", None),
        (own, None),
        *agent,
    ]


def _owner() -> str:
    """This process, so that nobody takes another for it: machine since its start, pid namespace, pid, start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{pid_namespace()}:{os.getpid()}:{start_time(str(os.getpid()))}"


def _gone(owner: str) -> bool:
    """Whether the process of that name has ended, as far as one can tell from here."""
    parts, own = owner.split(":"), _owner().split(":")
    return len(parts) == 4 and parts[:2] == own[:2] and start_time(parts[2]) != parts[3]


class DockerContainer:
    """A container of ours, and the line to its agent."""

    def __init__(self, client: Any, identity: str, line: Line, now: Callable[[], float]) -> None:
        """`now`: the daemon's time."""
        self._client, self._id, self.line, self._now = client, identity, line, now
        self._removed = False

    def fate(self, settled: Callable[[Fate], bool], wait: float) -> Fate:
        from requests.exceptions import RequestException

        from docker.errors import DockerException

        deadline = time.monotonic() + wait
        while True:
            try:
                seen = self._events()
            except (DockerException, RequestException, ValueError):
                return Fate(reachable=False)
            codes = [int(event["Actor"]["Attributes"].get("exitCode", -1)) for event in seen["die"]]
            killed = bool(seen["kill"] or seen["stop"])
            fate = Fate(True, len(seen["oom"]), killed, codes[0] if codes else None)
            if settled(fate) or time.monotonic() > deadline:
                return fate
            time.sleep(0.02)

    def _events(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("oom", "die", "kill", "stop")}
        filters = {"container": self._id}
        for event in self._client.api.events(since=0, until=self._now(), filters=filters, decode=True):
            found.setdefault(event.get("Action", ""), []).append(event)
        return found

    def remove(self) -> None:
        from requests.exceptions import RequestException

        from docker.errors import APIError, DockerException, NotFound

        if self._removed:
            return
        self._removed = True
        try:
            self._client.api.remove_container(self._id, force=True, v=True)
        except NotFound:
            pass
        except APIError:  # it is being removed already, since its first process ended
            self._wait_until_gone()
        except (DockerException, RequestException) as error:
            raise SandboxError(f"a container could not be removed, the Docker daemon said: {error}") from error
        finally:
            self.line.close()

    def _wait_until_gone(self) -> None:
        from docker.errors import APIError, NotFound

        for _ in range(200):
            try:
                self._client.api.inspect_container(self._id)
            except NotFound:
                return
            except APIError as error:
                raise SandboxError(f"a container could not be removed, the Docker daemon said: {error}") from error
            time.sleep(0.05)
        raise SandboxError(f"container {self._id[:12]} does not go away")


class DockerBackend(Backend):
    name = "docker"

    def __init__(self, *, runtime: str | None = None) -> None:
        """`runtime`: an OCI runtime the daemon knows (runsc, kata-runtime); its default one without."""
        self._runtime = runtime or os.environ.get(RUNTIME) or None
        self._lock = threading.Lock()
        self._starting = threading.BoundedSemaphore(AT_ONCE)
        self._found: Any = None
        self._owner, self._ahead = "", 0.0
        self._sources: list[tuple[str, str | None]] = []
        self._roots: dict[str, tuple[str, str]] = {}

    def client(self) -> Any:
        """The connected SDK client; SandboxError says what is in the way."""
        with self._lock:
            if self._found is None or self._owner != _owner():
                self._found, self._owner, self._sources = self._connect(), _owner(), _sources()
                told = datetime.fromisoformat(self._found.info()["SystemTime"]).timestamp()
                self._ahead = told - time.clock_gettime(time.CLOCK_REALTIME)
                self._sweep()
            return self._found

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
            raise SandboxError(f"no Docker daemon answers at {_address()}: {_plain(error)}") from error
        return client

    def _now(self) -> float:
        """The daemon's clock, which need not be this machine's."""
        return time.clock_gettime(time.CLOCK_REALTIME) + self._ahead

    def _sweep(self) -> None:
        """Remove containers whose owner died before the daemon noticed. (Most end with their owner's connection.)"""
        from docker.errors import DockerException

        with suppress(DockerException):
            for found in self._found.api.containers(all=True, filters={"label": LABEL}):
                if _gone(found.get("Labels", {}).get(LABEL, "")):
                    with suppress(DockerException):
                        self._found.api.remove_container(found["Id"], force=True, v=True)

    def available(self) -> Availability:
        try:
            client = self.client()
            known = client.info().get("Runtimes", {})
            if self._runtime and self._runtime not in known:
                raise SandboxError(f"the Docker daemon has no runtime {self._runtime!r} (it has: {', '.join(known)})")
            base = images.describe(images.HOST)
            missing: tuple[str, ...] = ()
            if base is not None and images.inspect(client, base.tag) is None:
                missing = (f"the image {base.tag}, which is made at first use (way: {images.way(base)})",)
            else:
                with self.create(SandboxSpec()) as box:
                    if not box.exec(["true"], timeout=PATIENCE).ok:
                        raise SandboxError("a container came up, but could not run `true`")
        except (SandboxError, AgentError) as error:
            return Availability(works=False, isolates=(), missing=(str(error),), fix=_remedy(str(error)))
        kept = (
            f"files (own read-only root; runtime {self._runtime or client.info().get('DefaultRuntime')})",
            "processes",
            "network (own loopback only)",
            "ipc, host name",
            "system calls (seccomp: Docker's profile and ours)",
            "memory, pids, cpu limits (cgroup); disk (tmpfs)",
        )
        return Availability(works=True, isolates=kept, missing=missing)

    def create(self, spec: SandboxSpec) -> DockerSandbox:
        box = self.prepare(spec)
        try:
            box.lay_out(spec)
        except BaseException:
            box.close()
            raise
        return box

    def prepare(self, spec: SandboxSpec) -> DockerSandbox:
        """A running container for any spec of that image, user and limits; `lay_out` makes it that of one spec."""
        if spec.user == 0:
            raise AuthoringError("the docker backend runs nothing as user 0; say another user in the sandbox's spec")
        client = self.client()
        with self._starting:
            if spec.image not in self._roots:
                self._roots[spec.image] = images.ensure(client, spec.image)
            reference, root = self._roots[spec.image]
            container = self._start(client, spec, reference)
        return DockerSandbox(spec, root, container, self.prepare)

    def _start(self, client: Any, spec: SandboxSpec, reference: str) -> DockerContainer:
        from requests.exceptions import RequestException

        from docker.errors import DockerException

        identity, line = "", None
        try:
            identity = client.api.create_container(**self._settings(client, spec, reference))["Id"]
            wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            attached = client.api.attach_socket(identity, params=wanted)
            line = Line(getattr(attached, "_sock", attached), attached)
            container = DockerContainer(client, identity, line, self._now)
            plan = {
                "user": spec.user,
                "switch": False,
                "open_files": spec.limits.open_files,
                "env": ENVIRONMENT,
                "tools": spec.tools,
            }
            sources = json.dumps({"modules": self._sources, "plan": plan, "warm": WARM.split()}).encode()
            line.raw(len(sources).to_bytes(4, "little") + sources)
            client.api.start(identity)
            greeting = line.greeting(PATIENCE)
            if greeting is None or "value" not in unpack(greeting[0])[0]:
                said = bytes(line.complaints).decode("utf-8", "replace").strip()
                raise SandboxError(
                    f"a container of {reference} did not come up: {said or container.fate(Fate.ended, 2.0)}"
                )
        except BaseException as error:
            if identity:
                with suppress(DockerException, RequestException):
                    client.api.remove_container(identity, force=True, v=True)
            if line is not None:
                line.close()
            if isinstance(error, (DockerException, RequestException, TimeoutError)):
                raise SandboxError(f"no container could be started: {_plain(error)}") from error
            raise
        return container

    def _settings(self, client: Any, spec: SandboxSpec, reference: str) -> dict[str, Any]:
        """Everything that the daemon is told about a container."""
        from docker.types import LogConfig, Ulimit

        limits, user = spec.limits, f"{spec.user}:{spec.user}"
        own = f"exec,nosuid,nodev,size={limits.disk_mb}m,nr_inodes={limits.files + 16},uid={spec.user},gid={spec.user}"
        memory = limits.memory_mb << 20
        ulimits = {"core": 0, "fsize": limits.disk_mb << 20, "nofile": 4096}
        host = client.api.create_host_config(
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            tmpfs={
                WORKSPACE: f"{own},mode=0755",
                HOME: f"{own},mode=0755",
                "/tmp": f"{own},mode=1777",
                "/dev/shm": f"{own},mode=1777",
                "/sys": "ro,noexec,nosuid,nodev,size=4k",
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
            "command": ["python3", "-S", "-s", "-c", LOAD + RUN],
            "entrypoint": [],
            "hostname": "box",
            "user": user,
            "working_dir": "/",
            "environment": ENVIRONMENT,
            "stdin_open": True,
            "tty": False,
            "network_disabled": True,
            "labels": {LABEL: self._owner},
            "host_config": host,
        } | ({"healthcheck": {"test": ["NONE"]}})

    def close(self) -> None:
        """Let the daemon go; boxes that are still open belong to their holders."""
        with self._lock:
            if self._found is not None:
                self._found.close()
            self._found = None


def _address() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def _plain(error: BaseException) -> str:
    """What the daemon said, or the innermost cause: both say more than the layers of libraries around them."""
    if getattr(error, "explanation", None):
        return str(error.explanation)  # type: ignore[attr-defined]
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {error}"


def _remedy(trouble: str) -> str:
    """What most likely helps."""
    if "SDK" in trouble:
        return "pip install 'agentrl[docker]'"
    if "Permission" in trouble:
        return "usermod -aG docker $USER, then log in again (or run as root)"
    if "no runtime" in trouble:
        return "install the runtime and name it in /etc/docker/daemon.json"
    if "answers at" in trouble:
        started = "systemctl start docker  (or, without systemd: dockerd &)"
        installed = shutil.which("dockerd") or os.path.exists("/usr/sbin/dockerd")
        return started if installed else f"apt-get install docker.io debootstrap; {started}"
    if "image" in trouble:
        return "apt-get install debootstrap"
    return ""
