"""Builds the file system of one box, from inside its fresh mount namespace.

tmpfs (size, inodes limited; thrown away)         the box sees
├── root/       the prepared tree of `host`  ->   /            read-only
│               or upper/ + work/ of an overlay   /            image below, changes in memory
├── box/                                     ->   /box         the workspace
└── tmp/ home/ shm/                          ->   /tmp /home/agent /dev/shm

What does not differ from box to box is prepared once, in a mount namespace of the zygote's own, where that may be made:
a clone inherits it, and neither can nor may take it apart. Elsewhere each box prepares its own.
"""

from __future__ import annotations

import os
from typing import Any

from .kernel import (
    CLONE_NEWNS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    MS_SLAVE,
    mount,
    pivot_root,
    read_only,
    umount,
    unshare,
)

DEVICES = ("null", "zero", "full", "random", "urandom")
FOLDERS = (("box", 0o755), ("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777))
"""The folders of the tmpfs that the box may write, and the modes they start with."""
WRITABLE = (("../box", "box"), ("../tmp", "tmp"), ("../home", "home/agent"), ("../shm", "dev/shm"))
FIXED = (946684800, 946684800)
READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV


def open_stage(folder: str) -> str:
    """In the zygote: a mount namespace of its own with room for prepared roots; where boxes are to be built."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_SLAVE)  # what the machine unmounts shall not stay in use here
    mount("boxes", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir(folder + "/box", 0o755)
    return folder + "/box"


def prepare(plan: dict[str, Any], name: str) -> None:
    """Below the stage, make what boxes of one root share."""
    os.chdir(os.path.dirname(plan["stage"]))
    os.mkdir(name, 0o755)
    if plan["image"] is None:
        mount(name, name, None, MS_BIND)
        _host(name, plan)
        _fix_times(name, os.stat(name).st_dev)
        mount("none", name, None, READ_ONLY)
    else:
        mount(plan["image"], name, None, MS_BIND | MS_REC)
        read_only(name)
    mount("none", name, None, MS_REC | MS_PRIVATE)  # what the machine mounts there later is no part of it
    os.chdir("/")


def writable(plan: dict[str, Any], prepared: str) -> int:
    """Mount the box's own file system and return a descriptor of it, for the host to write and read through.

    `prepared` names what the zygote has made for this root; empty where it could not.
    """
    if not prepared:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.chdir(plan["stage"])
    os.umask(0)
    options = "size={},nr_inodes={},mode=755".format(plan["disk"], plan["inodes"])
    mount("box", ".", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(plan["stage"])
    for name, mode in FOLDERS:
        os.mkdir(name, mode)
        os.chown(name, plan["user"], plan["user"])
        os.utime(name, FIXED)
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def build(plan: dict[str, Any], prepared: str) -> None:
    """Around it, in the current folder, mount everything else, and make it `/`."""
    os.mkdir("root", 0o755)
    if plan["image"] is not None:
        _overlay(plan["image"], prepared)
    elif prepared:
        mount("../" + prepared, "root", None, MS_BIND | MS_REC)
    else:
        mount("root", "root", None, MS_BIND)
        _host("root", plan)
        mount("none", "root", None, READ_ONLY)
    os.chdir("root")
    for source, target in WRITABLE:
        mount(source, target, None, MS_BIND)
    # nobody in the box sees init; init, in group 0 where there is one, sees everybody
    mount(
        "proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2,gid=0" if plan["switch"] else "hidepid=2"
    )
    for name in plan["hidden"]:
        mount("dev/null", name, None, MS_BIND)
    mount("proc/sys", "proc/sys", None, MS_BIND | MS_REC)
    read_only("proc/sys")
    pivot_root(".", ".")
    umount(".", MNT_DETACH)
    os.chdir("/")
    os.umask(0o022)


def _skeleton(top: str) -> None:
    """Where things get mounted. For an image they lie in the upper layer: its own folders belong to nobody here."""
    for name in ("proc", "dev", "dev/shm", "tmp", "box", "home", "home/agent"):
        os.mkdir(top + name, 0o755)
    for name in DEVICES:
        _empty_file(top + "dev/" + name)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, top + "dev/" + name)


def _devices(top: str) -> None:
    for name in DEVICES:
        mount("/dev/" + name, top + "dev/" + name, None, MS_BIND)


def _empty_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _host(root: str, plan: dict[str, Any]) -> None:
    """On the mount point `root`: a tree of our own, with the machine's system folders mounted in it."""
    _skeleton(root + "/")
    for folder in ("etc", "run", "var", "var/tmp", "root"):
        os.mkdir(root + "/" + folder, 0o755)
    for name, target in plan["links"].items():
        os.symlink(target, root + name)
    for path, content in plan["texts"].items():
        descriptor = os.open(root + path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        os.write(descriptor, content.encode())
        os.close(descriptor)
    for path, is_folder in plan["binds"]:
        target = root + path
        if is_folder:
            os.mkdir(target, 0o755)
        else:
            _empty_file(target)
        mount(path, target, None, MS_BIND | MS_REC)
        read_only(target)
    empty = root + "-empty"
    os.mkdir(empty, 0o555)
    mount(empty, empty, None, MS_BIND)
    read_only(empty)
    for path in plan["masks"]:
        mount(empty, root + path, None, MS_BIND)  # read-only, as what it is bound from
    _devices(root + "/")


def _fix_times(folder: str, device: int) -> None:
    """Give everything that was made here, and nothing that is mounted, the one time of all boxes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_dev == device:
                if entry.is_dir(follow_symlinks=False):
                    _fix_times(entry.path, device)
                elif entry.is_symlink() or entry.is_file():
                    os.utime(entry.path, FIXED, follow_symlinks=False)
    os.utime(folder, FIXED)


def _overlay(image: str, prepared: str) -> None:
    """An unpacked image, read-only, below an upper layer in memory. Names stay relative: the box can read them."""
    os.mkdir("upper", 0o755)
    os.mkdir("work", 0o755)
    _skeleton("upper/")
    lower = "../" + prepared
    if not prepared:
        lower = "lower"
        os.mkdir(lower, 0o755)
        mount(image, lower, None, MS_BIND | MS_REC)
    layers = "lowerdir=" + lower + ",upperdir=upper,workdir=work"
    try:
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers + ",userxattr")
    except OSError:  # before Linux 5.11
        mount("root", "root", "overlay", MS_NOSUID | MS_NODEV, layers)
    if not prepared:
        umount(lower, MNT_DETACH)
    _devices("root/")
