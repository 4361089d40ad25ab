"""Control groups of a sandbox, on version 1, version 2 and mixed machines.

A process that writes `0` into a version 1 `tasks` file joins in 40 microseconds; moving it from outside through
`cgroup.procs` costs 10 milliseconds. On version 2 the sandbox is cloned straight into its group.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "agentrl-"


class Places:
    """Where groups can be made: a folder for each controller, or one for all on version 2."""

    def __init__(self, folders: dict[str, str], unified: bool) -> None:
        self.folders = folders
        self.unified = unified


class Group:
    """The groups of one sandbox, and later of another with the same limits: making and removing them costs time."""

    def __init__(self, places: Places, name: str, limits: dict[str, Any]) -> None:
        self.unified = places.unified
        self.paths: dict[str, str] = {}
        self.tasks: list[int] = []
        self.entry = -1
        self.limits: tuple[int, int, float] = (limits["memory"], limits["processes"], limits["cpus"])
        self.counted = 0
        values = version2(limits) if places.unified else version1(limits)
        for controller, folder in places.folders.items():
            path = os.path.join(folder, PREFIX + name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)
            self.paths[controller] = path
        for controller, file, value in values:
            if controller in self.paths:
                put(os.path.join(self.paths[controller], file), value)

    def open(self) -> None:
        """Open the groups, in the zygote, before the clone."""
        for path in dict.fromkeys(self.paths.values()):
            if self.unified:
                self.entry = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            else:
                self.tasks.append(os.open(path + "/tasks", os.O_WRONLY | os.O_CLOEXEC))

    def enter(self) -> None:
        """Join, in the sandbox's first process. (On version 2 it was cloned there.)"""
        for descriptor in self.tasks:
            os.write(descriptor, b"0")

    def close(self) -> None:
        """Close the groups, in the zygote, after the clone."""
        for descriptor in (*self.tasks, *([self.entry] if self.entry >= 0 else [])):
            os.close(descriptor)
        self.tasks, self.entry = [], -1

    def out_of_memory(self) -> int:
        """Return how many processes the kernel killed in it for memory since the last call."""
        if "memory" not in self.paths:
            return 0
        events = read(self.paths["memory"] + ("/memory.events" if self.unified else "/memory.oom_control")).split()
        if b"oom_kill" not in events:
            return 0
        before, self.counted = self.counted, int(events[events.index(b"oom_kill") + 1])
        return self.counted - before

    def as_new(self) -> bool:
        """Whether next to no memory is counted in it any more. (Since process 1 has ended, no process is left.)"""
        if "memory" not in self.paths:
            return True
        usage = read(self.paths["memory"] + ("/memory.current" if self.unified else "/memory.usage_in_bytes"))
        return int(usage or self.limits[0]) <= self.limits[0] // 16

    def remove(self) -> None:
        for pause in (0.0, 0.001, 0.01, 0.1):
            time.sleep(pause)
            if all([_gone(path) for path in dict.fromkeys(self.paths.values())]):
                return


def _gone(path: str) -> bool:
    """Remove a group; return False while the kernel still counts a dead process in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def read(path: str) -> bytes:
    """Read a short file of the kernel's; return nothing if that fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def write(path: str, value: str) -> None:
    """Write once to a file of the kernel's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def put(path: str, value: str) -> None:
    """Write a limit, unless the kernel was built without it."""
    with contextlib.suppress(OSError):
        write(path, value)


def version1(limits: dict[str, Any]) -> list[tuple[str, str, str]]:
    memory = str(limits["memory"])
    return [
        ("memory", "memory.limit_in_bytes", memory),
        ("memory", "memory.memsw.limit_in_bytes", memory),
        ("pids", "pids.max", str(limits["processes"])),
        ("cpu", "cpu.cfs_quota_us", str(int(limits["cpus"] * 100_000))),
    ]


def version2(limits: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        ("memory", "memory.max", str(limits["memory"])),
        ("memory", "memory.swap.max", "0"),
        ("pids", "pids.max", str(limits["processes"])),
        ("cpu", "cpu.max", "{} 100000".format(int(limits["cpus"] * 100_000))),
    ]


def find() -> Places:
    """Find the controllers under which this process may make groups."""
    mounts: dict[str, str] = {}
    unified = ""
    with open("/proc/self/mounts") as lines:
        for line in lines:
            _, where, kind, options = line.split()[:4]
            if kind == "cgroup2":
                unified = where
            elif kind == "cgroup":
                for controller in CONTROLLERS:
                    if controller in options.split(","):
                        mounts[controller] = where
    if mounts:
        return Places({c: w for c, w in mounts.items() if os.access(w, os.W_OK)}, False)
    return _version2(unified) if unified else Places({}, False)


def _version2(mounted: str) -> Places:
    """Find a delegated subtree: our own group if it is writable and passes its controllers down, else the root."""
    with open("/proc/self/cgroup") as lines:
        own = next((line.strip()[3:] for line in lines if line.startswith("0::")), "/")
    best = Places({}, True)
    for folder in dict.fromkeys((mounted + own.rstrip("/"), mounted + os.path.dirname(own.rstrip("/")), mounted)):
        if not os.access(folder, os.W_OK):
            continue
        put(folder + "/cgroup.subtree_control", "+memory +pids +cpu")
        try:
            with open(folder + "/cgroup.subtree_control") as file:
                passed_down = file.read().split()
        except OSError:
            continue
        folders = {controller: folder for controller in CONTROLLERS if controller in passed_down}
        if len(folders) > len(best.folders):
            best = Places(folders, True)
    return best


def sweep(places: Places) -> None:
    """Remove groups whose zygote, named in their names, is gone; those of another pid namespace stay."""
    for folder in dict.fromkeys(places.folders.values()):
        for name in os.listdir(folder):
            if not name.startswith(PREFIX):
                continue
            parts = name[len(PREFIX) :].split("-")
            if len(parts) == 4 and parts[0] == pid_namespace() and start_time(parts[1]) != parts[2]:
                with contextlib.suppress(OSError):  # still being emptied: left for the next sweep
                    os.rmdir(os.path.join(folder, name))


def pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def owner(pid: int) -> str:
    """Return the first part of the names of a zygote's groups: its pid namespace, pid and start time."""
    return f"{pid_namespace()}-{pid}-{start_time(str(pid))}-"


def start_time(pid: str) -> str:
    """Return when a process started, in clock ticks; empty if there is none."""
    try:
        with open("/proc/" + pid + "/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
