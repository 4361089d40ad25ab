"""The warm interpreter that clones itself into boxes, one at a time, on request of the host.

    host ──(seqpacket: JSON + descriptor)──> zygote ──clone3──> init of a box ──fork──> commands
         <──────(JSON + pidfd)──────────────        <──wait───

It is started with an empty environment and one socket, holds nothing of the host's, and ends with the host: when the
socket closes or the host dies, every box, cgroup and process goes with it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
from typing import Any

from . import cgroups, kernel, rootfs, seccomp
from .init import Child, Init, prepare_python

NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
MESSAGE = 1 << 20
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
"""What a child leaves behind but does not free: it ends soon, and freeing would copy the memory first."""
PROBE = {"memory": 64 << 20, "processes": 4, "cpus": 1.0}
Birth = tuple[dict[str, Any], socket.socket, cgroups.Group]
"""What a newborn box has in its hands: its plan, its control socket, its groups."""


class Zygote:
    def __init__(self, host: socket.socket) -> None:
        self.host = host
        self.boxes: dict[int, tuple[int, cgroups.Group]] = {}
        self.filter = seccomp.program(kernel.MACHINE)
        self.last_capability = kernel.last_capability()
        self.root = os.geteuid() == 0
        self.name = cgroups.owner(os.getpid())
        self.places = self.usable(cgroups.find())
        cgroups.sweep(self.places)

    def usable(self, places: cgroups.Places) -> cgroups.Places:
        """The places, if a process can really enter groups there; version 2 may show folders that it may not use."""
        if not places.folders:
            return places
        group = None
        try:
            group = cgroups.Group(places, self.name + "probe", PROBE)
            pid, pidfd = kernel.clone(0, group.entry)
            if pid == 0:
                try:
                    group.enter()
                    os._exit(0)
                finally:
                    os._exit(1)
            os.close(pidfd)
            well = os.waitpid(pid, 0)[1] == 0
        except OSError:
            well = False
        if group is not None:
            group.opened()
            group.remove()
        return places if well else cgroups.Places({}, places.unified)

    def serve(self, parent: int) -> Birth | None:
        """None when the host is gone; in a newborn box, what it needs to live."""
        host_died = kernel.pidfd_open(parent)
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        poll.register(host_died, select.POLLIN)
        self.reply({"cgroups": sorted(self.places.folders), "python": list(sys.version_info[:2])})
        while os.getppid() == parent:
            ready = dict(poll.poll())
            if host_died in ready:
                return None
            data, ancillary, _, _ = self.host.recvmsg(MESSAGE, socket.CMSG_SPACE(4), 0x40000000)
            if not data:
                return None
            request = json.loads(data)
            descriptors = array.array("i")
            for _, _, payload in ancillary:
                descriptors.frombytes(payload)
            if request["op"] == "create":
                birth = self.create(request, descriptors[0])
                if birth is not None:
                    return birth
            elif request["op"] == "reap":
                self.reply(self.reap(request["id"]))
        return None

    def reply(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        rights = []
        if descriptor is not None:
            rights.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)))
        self.host.sendmsg([json.dumps(message).encode()], rights)

    def create(self, plan: dict[str, Any], control: int) -> Birth | None:
        """Clone a box. Its uid map is written here, before it goes on."""
        go, gone = os.pipe()
        group = cgroups.Group(self.places, self.name + str(plan["id"]), plan)
        try:
            pid, pidfd = kernel.clone(NAMESPACES, group.entry)
        except OSError as error:
            for descriptor in (go, gone, control):
                os.close(descriptor)
            group.opened()
            group.remove()
            self.reply({"error": str(error)})
            return None
        if pid == 0:
            os.close(gone)
            if os.read(go, 1) != b"g":
                os._exit(1)
            os.close(go)
            return plan, socket.socket(fileno=control), group
        os.close(control)
        os.close(go)
        try:
            self.map_ids(pid, plan)
            os.write(gone, b"g")
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            group.remove()
            self.reply({"error": str(error)})
        else:
            self.boxes[plan["id"]] = (pid, group)
            self.reply({"pid": pid}, pidfd)
        finally:
            os.close(gone)
            os.close(pidfd)
            group.opened()
        return None

    def map_ids(self, pid: int, plan: dict[str, Any]) -> None:
        where = f"/proc/{pid}/"
        if self.root:
            ids = "0 {} 65536".format(plan["base"])
            cgroups.write(where + "uid_map", ids)
            cgroups.write(where + "gid_map", ids)
        else:
            cgroups.write(where + "setgroups", "deny")
            cgroups.write(where + "uid_map", "{} {} 1".format(plan["user"], os.geteuid()))
            cgroups.write(where + "gid_map", "{} {} 1".format(plan["user"], os.getegid()))

    def reap(self, number: int) -> dict[str, Any]:
        """How a box that has ended came to it; its groups are removed."""
        pid, group = self.boxes.pop(number)
        oom = group.out_of_memory()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for pause in (0.0, 0.001, 0.01, 0.1):
            time.sleep(pause)
            if group.remove():
                break
        return {"status": status, "out_of_memory": oom}

    def end(self) -> None:
        """Take every box along."""
        for pid, _ in self.boxes.values():
            os.kill(pid, signal.SIGKILL)
        for number in list(self.boxes):
            self.reap(number)


def warm_up(modules: list[str]) -> None:
    """Import what programs commonly use, so that a fork has it already."""
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    site.setquit()  # `exit` and `quit`, which an interpreter without site lacks
    site.sethelper()
    for _ in range(10):  # whatever the interpreter sets up at first use is set up here, once, and not in every fork
        exec(compile(REHEARSAL, "<string>", "exec"), {"__name__": "__main__"})
    gc.collect()
    gc.freeze()
    gc.disable()


def be_box(zygote: Zygote, birth: Birth) -> Init:
    """In the newborn: close itself in, tell the host, and become its process 1."""
    plan, control, group = birth
    zygote.host.close()
    zygote.boxes.clear()  # what it knows of other boxes is none of this one's business
    group.enter()
    group.opened()
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    if plan["switch"]:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.sethostname("box")
    loopback_up()
    keep = rootfs.build(plan)
    set_limits(plan)
    kernel.drop_bounding_set(zygote.last_capability)
    kernel.keep_capabilities((kernel.CAP_SETUID, kernel.CAP_SETGID, kernel.CAP_KILL) if plan["switch"] else ())
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_filter(zygote.filter)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", keep))]
    control.sendmsg([b"R"], rights)
    os.close(keep)
    return Init(control, plan)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", 0x1 | 0x40))


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
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def main(descriptor: int, parent: int, modules: list[str]) -> tuple[str, dict[str, Any]]:
    """Run the zygote. Returns only in a child that is to run Python: the source, and the namespace to run it in."""
    own = os.getpid()
    path = list(sys.path)
    if os.geteuid() == 0:  # for anyone else, /proc/<pid>/uid_map of a clone could then not be written
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.new_session_keyring()
    host = socket.socket(fileno=descriptor)
    warm_up(modules)
    zygote = Zygote(host)
    try:
        birth = zygote.serve(parent)
        if birth is None:
            zygote.end()
            os._exit(0)
        control = birth[1]
        try:
            init = be_box(zygote, birth)
        except BaseException as error:
            control.send(b"E" + str(error).encode())
            os._exit(1)
        zygote.places.folders.clear()
        birth = None  # here, so that not every child has to free what it held
        init.serve()
    except Child as child:
        KEPT.extend((zygote, init, child, modules))
        for held in (host, control):  # their numbers may be the program's descriptors by now: never close them
            held.detach()
        return child.source, prepare_python(path)
    except BaseException:
        if os.getpid() == own:
            zygote.end()
        raise
    raise AssertionError("a box's init only ends by _exit")
