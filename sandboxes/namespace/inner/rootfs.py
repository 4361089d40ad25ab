"""Builds the file system of one box, from inside its fresh mount namespace.

tmpfs (size, inodes limited; thrown away)         the box sees
├── root/       an empty tree for `host`     ->   /            read-only
│               or upper/ + work/ of an overlay   /            image below, changes in memory
├── box/                                     ->   /box         the workspace
├── tmp/ home/ shm/                          ->   /tmp /home/agent /dev/shm
└── empty/                                   ->   over every folder that is masked
"""

from __future__ import annotations

import os
from typing import Any

from .kernel import (
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    mount,
    pivot_root,
    read_only,
    umount,
)

DEVICES = ("null", "zero", "full", "random", "urandom")
HIDDEN = ("kcore", "keys", "key-users", "kallsyms", "sched_debug", "timer_list", "kmsg", "sysrq-trigger")
FIXED = 946684800


def build(plan: dict[str, Any]) -> int:
    """Mount everything, make it `/`, and return a descriptor of the writable tmpfs for the host to read through."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.chdir(plan["stage"])
    options = "size={},nr_inodes={},mode=755".format(plan["disk"], plan["inodes"])
    mount("box", ".", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(plan["stage"])
    for name, mode in (("root", 0o755), ("box", 0o755), ("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777)):
        os.mkdir(name)
        os.chmod(name, mode)
    os.mkdir("empty")
    os.chmod("empty", 0o555)
    for name in ("box", "tmp", "home", "shm"):
        os.chown(name, plan["user"], plan["user"])
    if plan["image"] is None:
        mount("root", "root", None, MS_BIND)
        _host(plan)
    else:
        _overlay(plan)
    os.chdir("root")
    for name in ("proc", "dev", "dev/shm", "tmp", "box", "home", "home/agent"):
        if not os.path.isdir(name):
            os.mkdir(name, 0o755)
    _devices()
    for source, target in (("box", "box"), ("tmp", "tmp"), ("home", "home/agent"), ("shm", "dev/shm")):
        mount("../" + source, target, None, MS_BIND)
    # nobody in the box sees init; init, in group 0 where there is one, sees everybody
    mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2" + (",gid=0" if plan["switch"] else ""))
    _proc()
    for name in ("box", "tmp", "home", "shm"):
        os.utime("../" + name, (FIXED, FIXED))
    keep = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if plan["image"] is None:
        mount("none", ".", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    pivot_root(".", ".")
    umount(".", MNT_DETACH)
    os.chdir("/")
    return keep


def _host(plan: dict[str, Any]) -> None:
    """A root of its own, with the machine's system folders mounted read-only."""
    for folder in ("etc", "run", "var", "var/tmp", "root"):
        os.mkdir("root/" + folder, 0o755)
    for name, target in plan["links"].items():
        os.symlink(target, "root" + name)
    for path, content in plan["texts"].items():
        with open("root" + path, "w") as file:
            file.write(content)
    for path in plan["binds"]:
        target = "root" + path
        if os.path.isdir(path):
            os.makedirs(target, 0o755, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        mount(path, target, None, MS_BIND | MS_REC)
        read_only(target)
    for path in plan["masks"]:
        mount("empty", "root" + path, None, MS_BIND)
        read_only("root" + path)


def _overlay(plan: dict[str, Any]) -> None:
    """An unpacked image, read-only, below an upper layer in memory. Names stay relative: the box can read them."""
    for name in ("lower", "upper", "work"):
        os.mkdir(name)
    mount(plan["image"], "lower", None, MS_BIND | MS_REC)
    read_only("lower")
    layers = "lowerdir=lower,upperdir=upper,workdir=work"
    try:
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers + ",userxattr")
    except OSError:
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers)
    umount("lower", MNT_DETACH)


def _devices() -> None:
    for name in DEVICES:
        path = "dev/" + name
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        mount("/dev/" + name, path, None, MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        if not os.path.lexists("dev/" + name):
            os.symlink(target, "dev/" + name)


def _proc() -> None:
    for name in HIDDEN:
        if os.path.exists("proc/" + name):
            mount("/dev/null", "proc/" + name, None, MS_BIND)
    mount("proc/sys", "proc/sys", None, MS_BIND | MS_REC)
    read_only("proc/sys")
