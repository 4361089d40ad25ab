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
FOLDERS = (("box", 0o755), ("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777))
"""The folders of the tmpfs that the box may write, and the modes they start with."""
FIXED = 946684800


def build(plan: dict[str, Any]) -> int:
    """Mount everything, make it `/`, and return a descriptor of the writable tmpfs for the host to read through."""
    image, user = plan["image"], plan["user"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.chdir(plan["stage"])
    os.umask(0)
    mount("box", ".", "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['disk']},nr_inodes={plan['inodes']},mode=755")
    os.chdir(plan["stage"])
    for name, mode in FOLDERS:
        os.mkdir(name, mode)
        os.chown(name, user, user)
    os.mkdir("root", 0o755)
    if image is None:
        mount("root", "root", None, MS_BIND)
        _skeleton("root/")
        _host(plan)
    else:
        os.mkdir("upper", 0o755)
        _skeleton("upper/")
        _overlay(image)
    os.chdir("root")
    for name in DEVICES:
        mount("/dev/" + name, "dev/" + name, None, MS_BIND)
    for source, target in (("box", "box"), ("tmp", "tmp"), ("home", "home/agent"), ("shm", "dev/shm")):
        mount("../" + source, target, None, MS_BIND)
    # nobody in the box sees init; init, in group 0 where there is one, sees everybody
    mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2" + (",gid=0" if plan["switch"] else ""))
    for name in plan["hidden"]:
        mount("/dev/null", "proc/" + name, None, MS_BIND)
    mount("proc/sys", "proc/sys", None, MS_BIND | MS_REC)
    read_only("proc/sys")
    for name, _ in FOLDERS:
        os.utime("../" + name, (FIXED, FIXED))
    keep = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if image is None:
        mount("none", ".", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    pivot_root(".", ".")
    umount(".", MNT_DETACH)
    os.chdir("/")
    os.umask(0o022)
    return keep


def _skeleton(top: str) -> None:
    """Where things get mounted. For an image they lie in the upper layer: its own folders belong to nobody here."""
    for name in ("proc", "dev", "dev/shm", "tmp", "box", "home", "home/agent"):
        os.mkdir(top + name, 0o755)
    for name in DEVICES:
        _empty_file(top + "dev/" + name)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, top + "dev/" + name)


def _empty_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _host(plan: dict[str, Any]) -> None:
    """A root of its own, with the machine's system folders mounted read-only."""
    for folder in ("etc", "run", "var", "var/tmp", "root"):
        os.mkdir("root/" + folder, 0o755)
    for name, target in plan["links"].items():
        os.symlink(target, "root" + name)
    for path, content in plan["texts"].items():
        descriptor = os.open("root" + path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        os.write(descriptor, content.encode())
        os.close(descriptor)
    for path, is_folder in plan["binds"]:
        target = "root" + path
        if is_folder:
            os.mkdir(target, 0o755)
        else:
            _empty_file(target)
        mount(path, target, None, MS_BIND | MS_REC)
        read_only(target)
    os.mkdir("empty", 0o555)
    mount("empty", "empty", None, MS_BIND)
    read_only("empty")
    for path in plan["masks"]:
        mount("empty", "root" + path, None, MS_BIND)  # read-only, as what it is bound from


def _overlay(image: str) -> None:
    """An unpacked image, read-only, below an upper layer in memory. Names stay relative: the box can read them."""
    for name in ("lower", "work"):
        os.mkdir(name, 0o755)
    mount(image, "lower", None, MS_BIND | MS_REC)
    layers = "lowerdir=lower,upperdir=upper,workdir=work"
    try:
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers + ",userxattr")
    except OSError:  # before Linux 5.11
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers)
    umount("lower", MNT_DETACH)
