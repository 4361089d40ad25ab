"""The warm interpreter that clones itself into sandboxes, one at a time, at the host's request.

    host ──(seqpacket: dict + descriptor)──> zygote ──clone3──> init of a sandbox ──fork──> commands
         <──────(dict + pidfd)──────────────        <──wait───

It is started with an empty environment and one socket, holds nothing of the host's, and ends with the host: when the
socket closes or the host dies, every sandbox, cgroup and process ends with it. The code between a clone and the first
command touches as few objects as possible: every memory page that it writes must be copied.
"""

from __future__ import annotations

import _socket  # without the classes around it, whose memory every sandbox would copy
import contextlib
import fcntl
import gc
import marshal
import os
import resource
import select
import signal
import site
import struct
import sys
from typing import Any

from . import cgroups, kernel, rootfs, seccomp
from .init import CONTROL, Init, prepare_python

MESSAGE = 1 << 16
OOM_SCORE, HIGH = CONTROL + 1, 64
"""The descriptor of init's own oom score file; and one beyond all that the zygote ever has open."""
SPARE_GROUPS = 64
"""How many empty groups are kept for later sandboxes."""
LOOPBACK_UP = (0x8914, struct.pack("16sH22x", b"lo", 0x1 | 0x40))
"""SIOCSIFFLAGS, with the name and the flags."""
REHEARSAL = """
import os, sys, json
class A:
    def __init__(self, n): self.n = n
    def f(self): return [x * x for x in range(self.n)]
try: raise ValueError(f"{A(3).f()!r}")
except ValueError as error: text = str(error)
with open(os.devnull, "w") as file: print(json.dumps({"a": [1, 2.5, text]}), sorted(set("text")), file=file, flush=True)
print(json.loads("[1]"), end="", flush=True)
"""
KEPT: list[Any] = []
"""What a child keeps instead of freeing it: it ends soon, and freeing would copy the memory first."""
PROBE = {"memory": 64 << 20, "processes": 4, "cpus": 1.0}
Birth = tuple[dict[str, Any], int, cgroups.Group, int]
"""What a new sandbox starts with: its plan, its control socket, its groups, and the pipe that tells it to continue."""


class Zygote:
    def __init__(self, host: int) -> None:
        self.host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, host)
        self.boxes: dict[int, tuple[int, cgroups.Group]] = {}
        self.roots: list[tuple[dict[str, Any], str]] = []
        self.stage = ""
        self.environment = dict(os.environ)
        self.filter = kernel.Filter(seccomp.program(kernel.MACHINE))
        self.last_capability = kernel.last_capability()
        self.root = os.geteuid() == 0
        self.name = cgroups.owner(os.getpid())
        self.places = self.usable(cgroups.find())
        self.spare: dict[tuple[Any, ...], list[cgroups.Group]] = {}
        cgroups.sweep(self.places)

    def usable(self, places: cgroups.Places) -> cgroups.Places:
        """Return the places if a process can really enter groups there; version 2 may show folders it may not use."""
        if not places.folders:
            return places
        group = None
        try:
            group = cgroups.Group(places, self.name + "probe", PROBE)
            group.open()
            pid, pidfd = kernel.clone(0, group.entry)
            if pid == 0:
                try:
                    group.enter()
                    os._exit(0)
                finally:
                    os._exit(1)
            os.close(pidfd)
            entered = os.waitpid(pid, 0)[1] == 0
        except OSError:
            entered = False
        if group is not None:
            group.close()
            group.remove()
        return places if entered else cgroups.Places({}, places.unified)

    def serve(self, parent: int) -> Birth | None:
        """Return None when the host is gone; in a new sandbox, what it starts with."""
        host_died = kernel.pidfd_open(parent)
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        poll.register(host_died, select.POLLIN)
        self.reply({"cgroups": sorted(self.places.folders), "landlock": kernel.has_landlock()})
        while os.getppid() == parent:
            for descriptor, _ in poll.poll():
                if descriptor == host_died:
                    return None
            data, ancillary, _, _ = self.host.recvmsg(MESSAGE, 24, 0x40000000)
            if not data:
                return None
            request = marshal.loads(data)
            descriptors = memoryview(ancillary[0][2]).cast("i").tolist() if ancillary else []
            if request["op"] == "create":
                birth = self.create(request, descriptors[0])
                if birth is not None:
                    return birth
            elif request["op"] == "root":
                self.reply(self.add_root(descriptors[0]))
            elif request["op"] == "reap":
                self.reply(self.reap(request["id"]))
            elif request["op"] == "bury":
                self.reap(request["id"])
        return None

    def reply(self, message: dict[str, Any], descriptor: int = -1) -> None:
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", descriptor))] if descriptor >= 0 else ()
        self.host.sendmsg((marshal.dumps(message, 2),), rights)

    def add_root(self, descriptor: int) -> dict[str, Any]:
        """Read the plan of a root, and prepare what all its sandboxes can share."""
        with open(descriptor, "rb") as file:
            plan = marshal.loads(file.read())
        prepared = ""
        try:
            if self.root and not self.roots:
                with contextlib.suppress(PermissionError):  # root without the right to mount
                    self.stage = rootfs.open_stage(plan["stage"])
            if self.stage:
                prepared = str(len(self.roots))
                plan["stage"] = self.stage
                rootfs.prepare(plan, prepared)
        except OSError as error:
            return {"error": str(error)}
        self.roots.append((plan, prepared))
        return {"root": len(self.roots) - 1}

    def create(self, plan: dict[str, Any], control: int) -> Birth | None:
        """Clone a sandbox. Its uid map is written here while it does what needs none."""
        go, ready = os.pipe()
        group = None
        try:
            group = self.take_group(plan)
            group.open()
            root, prepared = self.roots[plan["root"]]
            plan["lowers"] = []
            if plan["writable_root"] and prepared:
                plan["lowers"] = self.lowers(root, prepared, plan)
            pid, pidfd = kernel.clone(kernel.NAMESPACES, group.entry)
        except OSError as error:
            if plan.get("lowers"):
                rootfs.forget_lowers(root)
            for descriptor in (go, ready, control):
                os.close(descriptor)
            if group is not None:
                group.close()
                group.remove()
            self.reply({"error": str(error)})
            return None
        if pid == 0:
            os.close(ready)
            return plan, control, group, go
        os.close(control)
        os.close(go)
        try:
            self.map_ids(pid, plan)
            os.write(ready, b"g")
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            group.close()
            group.remove()
            self.reply({"error": str(error)})
        else:
            self.boxes[plan["id"]] = (pid, group)
            self.reply({"pid": pid}, pidfd)
        finally:
            os.close(ready)
            os.close(pidfd)
            group.close()
            if plan["lowers"]:
                rootfs.forget_lowers(root)
        return None

    def lowers(self, root: dict[str, Any], prepared: str, plan: dict[str, Any]) -> list[str]:
        """Show what lies below a writable root as the sandbox's user's own. Only an image cannot do without."""
        try:
            ids = self.translation(plan["base"], plan["user"])
            try:
                return rootfs.lowers(root, prepared, ids)
            finally:
                os.close(ids)
        except OSError as error:
            rootfs.forget_lowers(root)
            if root["image"] is not None:
                raise OSError(error.errno, "the image cannot get a writable layer here: " + str(error)) from None
            return []

    def translation(self, base: int, user: int) -> int:
        """Return a user namespace, as a descriptor, whose map gives the machine's root files to the sandbox's user.

        The rest keeps its number, so that the user's own number goes to the sandbox's root.
        """
        swapped = [(0, user, 1), (1, 1, user - 1), (user, 0, 1), (user + 1, user + 1, 65535 - user)]
        lines = "\n".join(f"{a} {base + b} {n}" for a, b, n in swapped if n > 0) if user else f"0 {base} 65536"
        pid, pidfd = kernel.clone(kernel.CLONE_NEWUSER)
        if pid == 0:
            while True:
                signal.pause()
        try:
            for name in ("uid_map", "gid_map"):
                cgroups.write(f"/proc/{pid}/{name}", lines)
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)

    def map_ids(self, pid: int, plan: dict[str, Any]) -> None:
        where = "/proc/" + str(pid)
        if self.root:
            ids = "0 " + str(plan["base"]) + " 65536"
            cgroups.write(where + "/uid_map", ids)
            cgroups.write(where + "/gid_map", ids)
        else:
            cgroups.write(where + "/setgroups", "deny")
            cgroups.write(where + "/uid_map", "{} {} 1".format(plan["user"], os.geteuid()))
            cgroups.write(where + "/gid_map", "{} {} 1".format(plan["user"], os.getegid()))

    def take_group(self, plan: dict[str, Any]) -> cgroups.Group:
        """Return the spare group of these limits that was unused for longest, or a new one."""
        waiting = self.spare.get((plan["memory"], plan["processes"], plan["cpus"]))
        return waiting.pop(0) if waiting else cgroups.Group(self.places, self.name + str(plan["id"]), plan)

    def reap(self, number: int) -> dict[str, Any]:
        """Report how a sandbox ended; keep its groups for another one, or remove them."""
        pid, group = self.boxes.pop(number)
        oom = group.out_of_memory()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if sum(map(len, self.spare.values())) < SPARE_GROUPS and group.as_new():
            self.spare.setdefault(group.limits, []).append(group)
        else:
            group.remove()
        return {"status": status, "out_of_memory": oom}

    def end(self) -> None:
        """End every sandbox."""
        for pid, _ in self.boxes.values():
            os.kill(pid, signal.SIGKILL)
        for number in list(self.boxes):
            self.reap(number)
        for groups in self.spare.values():
            for group in groups:
                group.remove()


def warm_up(modules: list[str]) -> None:
    """Import what programs commonly use, so that every fork has it."""
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    site.setquit()  # `exit` and `quit`, which an interpreter without site lacks
    site.sethelper()
    for _ in range(10):  # what the interpreter sets up at first use is set up here, once, and not in every fork
        exec(compile(REHEARSAL, "<string>", "exec"), {"__name__": "__main__"})
    gc.collect()
    gc.freeze()
    gc.disable()


def be_box(zygote: Zygote, birth: Birth) -> Init:
    """In the new process: isolate itself, tell the host, and become process 1 of the sandbox."""
    own, descriptor, group, go = birth
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, descriptor)
    try:
        group.enter()
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        _socket.sethostname("box")
        loopback_up()
        root, prepared = zygote.roots[own["root"]]
        plan = {**root, **own}
        set_limits(plan)
        kernel.drop_bounding_set(zygote.last_capability)
        if os.read(go, 1) != b"g":  # its ids are known now
            os._exit(1)
        oom_score = os.open("/proc/self/oom_score_adj", os.O_RDWR)  # while it still may
        oom_score = fcntl.fcntl(oom_score, fcntl.F_DUPFD, HIGH)  # out of the way
        control.detach()
        os.dup2(descriptor, CONTROL, False)
        os.dup2(oom_score, OOM_SCORE, False)
        os.closerange(OOM_SCORE + 1, 4096)  # nothing of the zygote's stays open
        control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, CONTROL)
        # forget the other sandboxes and roots
        zygote.boxes.clear()
        zygote.roots.clear()
        zygote.spare.clear()
        zygote.places.folders.clear()
        if plan["switch"]:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        files = rootfs.writable(plan, prepared)
        rights = struct.pack("i", files)
        control.sendmsg((b"F",), ((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights),))  # the host can write files
        os.close(files)
        if plan["restored"] and control.recv(1) != b"g":  # the host brings the files of a snapshot first
            os._exit(1)
        rootfs.build(plan, prepared)
        kernel.keep_capabilities((kernel.CAP_SETUID, kernel.CAP_SETGID, kernel.CAP_KILL) if plan["switch"] else ())
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        zygote.filter.install()
        if plan["user"] == 0 or not plan["switch"]:
            kernel.Filter(seccomp.own_limits_only(kernel.MACHINE)).install()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        init = Init(control, plan, zygote.environment, OOM_SCORE)
        control.send(b"R")
    except BaseException as error:
        control.send(b"E" + str(error).encode())
        os._exit(1)
    return init


def loopback_up() -> None:
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(any_socket.fileno(), *LOOPBACK_UP)
    any_socket.close()


def set_limits(plan: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: plan["disk"],
        resource.RLIMIT_NPROC: plan["processes"],
        resource.RLIMIT_MEMLOCK: 8 << 20,
        resource.RLIMIT_MSGQUEUE: 1 << 20,
    }
    if plan["cap_memory"]:
        limits[resource.RLIMIT_AS] = plan["memory"]
    lower_limits(limits)


def lower_limits(limits: dict[int, int]) -> None:
    """Set rlimits, where the hard limit allows it."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def main(descriptor: int, parent: int, modules: list[str]) -> tuple[str, dict[str, Any]]:
    """Run the zygote. Return only in a child that is to run Python: the source, and the namespace to run it in."""
    path = list(sys.path)
    if os.geteuid() == 0:  # for anyone else, /proc/<pid>/uid_map of a clone could then not be written
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.new_session_keyring()
    warm_up(modules)
    zygote = Zygote(descriptor)
    own = os.getpid()
    try:
        birth = zygote.serve(parent)
    finally:
        if os.getpid() == own:  # and not in a new sandbox
            zygote.end()
    if birth is None:
        os._exit(0)
    init = be_box(zygote, birth)
    source = init.serve()
    KEPT.extend((zygote, birth, init, modules))
    return source, prepare_python(path)
