"""The system calls that Python does not offer, as functions that raise OSError."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enum wrappers, whose memory every child would copy
import ctypes
import os
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
CLONE_PIDFD, CLONE_INTO_CGROUP = 0x1000, 0x200000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 4096, 16384, 1 << 18, 1 << 19
READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 28, 38
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7

MACHINE = os.uname().machine
X86 = MACHINE == "x86_64"
if MACHINE not in ("x86_64", "aarch64"):
    raise RuntimeError("the namespace backend knows the system calls of x86_64 and aarch64, not of " + MACHINE)
SYS_CAPSET = 126 if X86 else 91
SYS_KEYCTL = 250 if X86 else 219
SYS_PIVOT_ROOT = 155 if X86 else 41
SYS_SECCOMP = 317 if X86 else 277
SYS_PIDFD_OPEN, SYS_CLONE3, SYS_MOUNT_SETATTR = 434, 435, 442
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE = 1
"""Landlock's right to execute a file."""

# PyDLL keeps the interpreter's lock: a clone must not come back in a child that waits for it.
libc = ctypes.PyDLL(None, use_errno=True)
_text, _word, _number = ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of libc with its types set once: a call then makes no objects, as it would in every sandbox."""
    function = libc[name]  # another object each time it is looked up
    function.restype, function.argtypes = result, arguments
    return function


_mount = _function("mount", _number, _text, _text, _text, _word, _text)
_umount = _function("umount2", _number, _text, _number)
_unshare = _function("unshare", _number, _number)
_prctl = _function("prctl", _number, _number, _word, _word, _word, _word)
_fork = _function("fork", _number)
_signalfd = _function("signalfd", _number, _number, _text, _number)
_syscall1 = _function("syscall", ctypes.c_long, ctypes.c_long, _word, _word)
_syscall_text = _function("syscall", ctypes.c_long, ctypes.c_long, _text, _text)
_syscall_seccomp = _function("syscall", ctypes.c_long, ctypes.c_long, _word, _word, ctypes.c_void_p)
_syscall_setattr = _function(
    "syscall", ctypes.c_long, ctypes.c_long, ctypes.c_long, _text, _word, ctypes.c_void_p, _word
)
_syscall_tree = _function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_long, _text, _word)
_syscall_move = _function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_long, _text, ctypes.c_long, _text, _word)
_syscall_landlock = _function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, _word, _word, _word)
_syscall_rule = _function("syscall", ctypes.c_long, ctypes.c_long, _word, _word, ctypes.c_void_p, _word)
_syscall_clone = _function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, _word)


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number) + " (" + what + ")")


def _raw(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    options = data.encode() if data else None
    if _mount(_raw(source), _raw(target), encoded, flags, options) < 0:
        raise _failure("mount " + (kind or "bind") + " on " + target)


def umount(target: str, flags: int = 0) -> None:
    if _umount(_raw(target), flags) < 0:
        raise _failure("umount " + target)


def pivot_root(new: str, old: str) -> None:
    if _syscall_text(SYS_PIVOT_ROOT, _raw(new), _raw(old)) < 0:
        raise _failure("pivot_root")


def unshare(flags: int) -> None:
    if _unshare(flags) < 0:
        raise _failure("unshare")


def prctl(option: int, argument: int = 0) -> None:
    if _prctl(option, argument, 0, 0, 0) < 0:
        raise _failure("prctl " + str(option))


def pidfd_open(pid: int) -> int:
    descriptor: int = _syscall1(SYS_PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        raise _failure("pidfd_open")
    return descriptor


def new_session_keyring() -> None:
    """Leave the inherited keyring; a kernel without keyrings has none to leave."""
    _syscall1(SYS_KEYCTL, 1, 0)


def read_only(path: str) -> None:
    """Make a bind mount and everything mounted below it read-only, nosuid, nodev."""
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
    if _syscall_setattr(SYS_MOUNT_SETATTR, -100, _raw(path), 0x8000, attributes, len(attributes)) < 0:
        # before Linux 5.12: only the top one
        mount("none", path, None, READ_ONLY)


def owned_by(ids: int, source: str, target: str) -> None:
    """Mount a folder, read-only, with its owners translated by the map of a user namespace (a descriptor)."""
    tree: int = _syscall_tree(SYS_OPEN_TREE, -100, _raw(source), 1 | 0o2000000)  # a copy, closed on exec
    if tree < 0:
        raise _failure("open_tree " + source)
    try:
        attributes = struct.pack("QQQQ", 1 | 2 | 4 | 0x100000, 0, 0, ids)
        if _syscall_setattr(SYS_MOUNT_SETATTR, tree, b"", 0x1000, attributes, len(attributes)) < 0:
            raise _failure("mount_setattr " + source)
        if _syscall_move(SYS_MOVE_MOUNT, tree, b"", -100, _raw(target), 4) < 0:
            raise _failure("move_mount " + target)
    finally:
        os.close(tree)


def clone(flags: int, cgroup: int = -1) -> tuple[int, int]:
    """Fork into new namespaces; return pid (0 in the child) and pidfd. Runs no hooks, like `bare_fork`."""
    pidfd = ctypes.c_int(-1)
    if cgroup >= 0:
        flags |= CLONE_INTO_CGROUP
    fields = (flags | CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, 17, 0, 0, 0, 0, 0, max(cgroup, 0))
    pid: int = _syscall_clone(SYS_CLONE3, struct.pack("11Q", *fields), 88 if cgroup >= 0 else 64)
    if pid < 0:
        raise _failure("clone3")
    return pid, pidfd.value


def bare_fork() -> int:
    """Fork without the interpreter's hooks, which only cost time in a process of a single thread."""
    pid: int = _fork()
    if pid < 0:
        raise _failure("fork")
    return pid


def child_descriptor() -> int:
    """Block SIGCHLD and return a descriptor that is readable when a child has ended, so that no handler runs."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
    mask = struct.pack("Q", 1 << (_signal.SIGCHLD - 1)).ljust(128, b"\0")
    descriptor: int = _signalfd(-1, mask, 0o2000000 | 0o4000)
    if descriptor < 0:
        raise _failure("signalfd")
    return descriptor


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Drop every capability but these."""
    mask = 0
    for capability in kept:
        mask |= 1 << capability
    header = struct.pack("II", 0x20080522, 0)
    if _syscall_text(SYS_CAPSET, header, struct.pack("6I", mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, 0, 0, 0)) < 0:
        raise _failure("capset")


def drop_bounding_set(last: int) -> None:
    for capability in range(last + 1):
        if _prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            raise _failure("prctl " + str(PR_CAPBSET_DROP))
    prctl(PR_SET_SECUREBITS, 0xEB)  # uid 0 means nothing, no kept or ambient capabilities, all of it locked


class Filter:
    """A seccomp filter, prepared once in the kernel's format."""

    def __init__(self, program: bytes) -> None:
        self.code = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: a 16-bit count, padding, a pointer
        self.header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self.code))

    def install(self) -> None:
        """Install it on this process and its descendants."""
        if _syscall_seccomp(SYS_SECCOMP, 1, 4, self.header) < 0:
            raise _failure("seccomp")


def has_landlock() -> bool:
    version: int = _syscall_landlock(SYS_LANDLOCK_CREATE, None, 0, 1, 0)
    return version > 0


def execute_only(paths: list[str]) -> int:
    """Return a Landlock ruleset, as a descriptor, that allows executing these files and no others."""
    ruleset: int = _syscall_landlock(SYS_LANDLOCK_CREATE, struct.pack("Q", EXECUTE), 8, 0, 0)
    if ruleset < 0:
        raise _failure("a sandbox limited to certain programs needs Landlock, which this kernel does not have")
    for path in paths:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if _syscall_rule(SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", EXECUTE, file), 0) < 0:
            raise _failure("landlock rule for " + path)
        os.close(file)
    return ruleset


def hold_to(ruleset: int) -> None:
    """Apply a ruleset to this process and its descendants."""
    if _syscall1(SYS_LANDLOCK_RESTRICT, ruleset, 0) < 0:
        raise _failure("landlock")
