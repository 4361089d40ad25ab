"""The namespace backend: sandboxes cloned from warm zygotes, without a daemon and without an image pull."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading

from agentrl.errors import AgentError, SandboxError
from agentrl.sandboxes.base import Availability, Backend, SandboxSpec, closed_on_error
from agentrl.sandboxes.container import in_container
from agentrl.sandboxes.namespace import roots
from agentrl.sandboxes.namespace.box import NamespaceSandbox
from agentrl.sandboxes.namespace.launch import Zygote

ID_RANGES, FIRST_ID, IDS = 32_768, 1_000_000_000, 65_536
"""Each sandbox gets its own range of 65,536 host ids, so that no two sandboxes share a user."""
CONTROLLERS = {"memory", "pids", "cpu"}
DESCRIPTORS = 16_384
UNCONFINE = (
    "docker run --security-opt seccomp=unconfined (or a profile that allows them); "
    "in a pod securityContext.seccompProfile.type: Unconfined"
)
UNMASK = "docker run --security-opt systempaths=unconfined; in a pod procMount: Unmasked and hostUsers: false"
OWN_ROOT = 2048
"""Files and folders of a writable root that do not count against the limit: those that it begins with."""
PROCESSORS = 4
"""Processors per zygote; a zygote makes one sandbox after the other."""


class NamespaceBackend(Backend):
    name = "namespace"

    def __init__(self, zygotes: int | None = None) -> None:
        """`zygotes`: how many may make sandboxes at once; by default as many as the processors can use."""
        self._most = zygotes or max(1, len(os.sched_getaffinity(0)) // PROCESSORS)
        self._lock = threading.Lock()
        self._zygotes: list[Zygote] = []
        self._owner = 0
        self._numbers = itertools.count(os.getpid() * 97)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < min(hard, DESCRIPTORS):  # a sandbox holds four, and five more while something runs in it
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS), hard))

    def zygote(self) -> Zygote:
        """Return a free zygote, or else the next in turn; zygotes are started on demand (and again after a fork)."""
        with self._lock:
            if self._owner != os.getpid():
                self._zygotes, self._owner = [], os.getpid()
            self._zygotes = [zygote for zygote in self._zygotes if zygote.alive]
            for zygote in self._zygotes:
                if not zygote.busy:
                    return zygote
            if len(self._zygotes) < self._most:
                self._zygotes.append(Zygote(roots.interpreter()))
                return self._zygotes[-1]
            self._zygotes.append(self._zygotes.pop(0))
            return self._zygotes[-1]

    def available(self) -> Availability:
        try:
            with self.create(SandboxSpec()) as box:
                works = box.exec(["true"], timeout=10).ok
        except (SandboxError, AgentError) as error:
            return Availability(works=False, isolates=(), missing=(str(error),), fix=_remedy(str(error)))
        isolates = [
            "files (own root, read-only, overlaid)",
            "processes",
            "network (own loopback only)",
            "ipc, host name, cgroup view",
            "users (ids of its own)" if os.geteuid() == 0 else "users (one id, shared with init)",
            "system calls (seccomp)",
        ]
        groups = set(self.zygote().facts["cgroups"])
        isolates += [f"{name} limit (cgroup)" for name in ("memory", "pids", "cpu") if name in groups]
        missing, fixes = [], []
        if self.zygote().facts["landlock"]:
            isolates.append("programs, where a spec names those it allows (Landlock)")
        else:
            missing.append("Landlock: no sandbox can be limited to certain programs")
            fixes.append("boot with lsm=landlock,... (Linux 5.13 or later)")
        if groups < CONTROLLERS:
            missing.append(f"cgroups for {', '.join(sorted(CONTROLLERS - groups))}: rlimits per process stand in")
            fixes.append(
                "limit the container as a whole (--memory, --pids-limit; resources.limits of a pod)"
                if in_container()
                else "systemd-run --user --scope -p Delegate=yes agentrl ...  (or run as root)"
            )
        if roots.interpreter() != roots.SYSTEM_PYTHON:
            missing.append(f"{roots.SYSTEM_PYTHON}: no warm Python in the image `host`")
            fixes.append("apt-get install python3-minimal")
        return Availability(works=works, isolates=tuple(isolates), missing=tuple(missing), fix="; ".join(fixes))

    def create(self, spec: SandboxSpec) -> NamespaceSandbox:
        with closed_on_error(self._make(spec)) as box:
            box.lay_out(spec)
            box.wait_until_ready()
        return box

    def prepare(self, spec: SandboxSpec) -> NamespaceSandbox:
        with closed_on_error(self._make(spec)) as box:
            box.wait_until_ready()
        return box

    def _fork(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Return a sandbox for a snapshot; one with a writable root is built around what the snapshot brings."""
        return self._make(spec, restored=True) if spec.writable_root else self.prepare(spec)

    def _make(self, spec: SandboxSpec, *, restored: bool = False) -> NamespaceSandbox:
        """Return a sandbox that is still starting but has its own file system already."""
        root = roots.find(spec.image, spec.user)
        roots.check(spec, root)
        zygote = self.zygote()
        number = next(self._numbers)
        switch = os.geteuid() == 0
        base = FIRST_ID + number % ID_RANGES * IDS if switch else -1
        limits = spec.limits
        plan = {
            "root": zygote.root((spec.image, spec.user, spec.workdir), {**root.plan, "workdir": spec.workdir}),
            "id": number,
            "base": base,
            "user": spec.user,
            "switch": switch,
            "disk": limits.disk_mb << 20,
            "inodes": limits.files + (OWN_ROOT if spec.writable_root else 64),
            "memory": limits.memory_mb << 20,
            "processes": limits.processes + 1,
            "cpus": limits.cpus,
            "open_files": limits.open_files,
            "tools": None if spec.tools is None else list(spec.tools),
            "writable_root": spec.writable_root,
            "restored": restored,
            "cap_memory": "memory" not in zygote.facts["cgroups"],
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            pidfd = zygote.create(plan, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return NamespaceSandbox(spec, root, zygote, number, pidfd, ours, base, self._fork)

    def close(self) -> None:
        with self._lock:
            for zygote in self._zygotes if self._owner == os.getpid() else ():
                zygote.close()
            self._zygotes = []


def _remedy(trouble: str) -> str:
    """Return the fix for what most likely keeps this user from making namespaces here."""
    if "mount proc" in trouble:
        return f"this container hides parts of /proc, so that no sandbox may have its own: {UNMASK}"
    if "[Errno 38]" in trouble:  # no kernel of the last years lacks clone3
        return f"this container's seccomp profile allows no user namespaces: {UNCONFINE}; {UNMASK}"
    for path, bad, command in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        try:
            with open(path) as file:
                if file.read().strip() == bad:
                    return command
        except OSError:
            continue
    return f"{UNCONFINE}; {UNMASK}" if in_container() else "run as root"
