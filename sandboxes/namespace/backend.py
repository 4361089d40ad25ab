"""The namespace backend: boxes cloned from a warm zygote, without a daemon and without an image pull."""

from __future__ import annotations

import itertools
import os
import socket
import threading

from agentrl.errors import SandboxError
from agentrl.sandboxes.base import Availability, Backend, SandboxSpec
from agentrl.sandboxes.namespace import roots
from agentrl.sandboxes.namespace.box import NamespaceSandbox
from agentrl.sandboxes.namespace.launch import Zygote

RANGES, FIRST_RANGE = 32_768, 1_000_000_000
"""Each box gets 65,536 host ids of its own, so that even its users are strangers to the next box's."""


class NamespaceBackend(Backend):
    name = "namespace"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._owner = 0
        self._numbers = itertools.count(os.getpid() * 97)

    def zygote(self) -> Zygote:
        """The running zygote, started when it is first needed (and again after a fork of this process)."""
        with self._lock:
            if self._zygote is None or self._owner != os.getpid() or not self._zygote.alive:
                self._zygote, self._owner = Zygote(roots.INTERPRETER), os.getpid()
            return self._zygote

    def available(self) -> Availability:
        isolates = ("files", "processes", "network", "ipc", "host name", "users", "system calls")
        try:
            with self.create(SandboxSpec()) as box:
                works = box.exec(["true"]).ok
        except SandboxError as error:
            return Availability(works=False, isolates=(), missing=(str(error),))
        return Availability(works=works, isolates=isolates)

    def create(self, spec: SandboxSpec) -> NamespaceSandbox:
        box = self.prepare(spec)
        try:
            box.lay_out(spec)
        except BaseException:
            box.close()
            raise
        return box

    def prepare(self, spec: SandboxSpec) -> NamespaceSandbox:
        """A box for any spec of that image, user and limits; `lay_out` makes it that of one spec."""
        root = roots.find(spec.image, spec.user)
        zygote = self.zygote()
        number = next(self._numbers)
        switch = os.geteuid() == 0
        base = FIRST_RANGE + number % RANGES * 65_536 if switch else -1
        limits = spec.limits
        plan = {
            **root.plan,
            "id": number,
            "base": base,
            "user": spec.user,
            "switch": switch,
            "disk": limits.disk_mb << 20,
            "inodes": limits.files + 64,
            "memory": limits.memory_mb << 20,
            "processes": limits.processes + 1,
            "cpus": limits.cpus,
            "open_files": limits.open_files,
            "cap_memory": "memory" not in zygote.facts["cgroups"],
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            born = zygote.create(plan, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return NamespaceSandbox(spec, root.hash, zygote, number, born, ours, base, self.prepare)

    def close(self) -> None:
        with self._lock:
            if self._zygote is not None and self._owner == os.getpid():
                self._zygote.close()
            self._zygote = None
