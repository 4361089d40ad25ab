"""The system calls that Python does not offer, as functions that raise OSError."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_PIDFD, CLONE_INTO_CGROUP = 0x1000, 0x200000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
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
SYS_PIDFD_OPEN, SYS_CLONE3, SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 434, 435, 428, 429, 442

# PyDLL keeps the interpreter's lock: a clone must not come back in a child that waits for it.
libc = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) + " (" + what + ")")
    return result


def _syscall(number: int, what: str, *args: object) -> int:
    padded = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    libc.syscall.restype = ctypes.c_long
    return _check(libc.syscall(ctypes.c_long(number), *padded), what)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = kind.encode() if kind is not None else None
    result = libc.mount(
        os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), data.encode() if data else None
    )
    _check(result, "mount " + (kind or "bind") + " on " + target)


def umount(target: str, flags: int = 0) -> None:
    _check(libc.umount2(os.fsencode(target), flags), "umount " + target)


def pivot_root(new: str, old: str) -> None:
    _syscall(SYS_PIVOT_ROOT, "pivot_root", os.fsencode(new), os.fsencode(old))


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def sethostname(name: str) -> None:
    _check(libc.sethostname(name.encode(), len(name)), "sethostname")


def prctl(option: int, argument: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _check(libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), "prctl " + str(option))


def pidfd_open(pid: int) -> int:
    return _syscall(SYS_PIDFD_OPEN, "pidfd_open", pid, 0)


def new_session_keyring() -> None:
    """Leave the keyring that was inherited; a kernel without keyrings has none to leave."""
    with contextlib.suppress(OSError):
        _syscall(SYS_KEYCTL, "keyctl", 1, 0)


def read_only(path: str) -> None:
    """Make a bind mount and everything mounted below it read-only, nosuid, nodev."""
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
    try:
        _syscall(SYS_MOUNT_SETATTR, "mount_setattr", -100, os.fsencode(path), 0x8000, attributes, len(attributes))
    except OSError:  # before Linux 5.12: only the top one
        mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def clone(flags: int, cgroup: int = -1) -> tuple[int, int]:
    """Fork into fresh namespaces: pid (0 in the child) and pidfd. Without the hooks, as `bare_fork`."""
    pidfd = ctypes.c_int(-1)
    if cgroup >= 0:
        flags |= CLONE_INTO_CGROUP
    fields = (flags | CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, 17, 0, 0, 0, 0, 0, max(cgroup, 0))
    request = ctypes.create_string_buffer(struct.pack("11Q", *fields))
    libc.syscall.restype = ctypes.c_long
    pid = libc.syscall(ctypes.c_long(SYS_CLONE3), request, ctypes.c_long(88 if cgroup >= 0 else 64))
    return _check(pid, "clone3"), pidfd.value


def bare_fork() -> int:
    """fork without the interpreter's hooks: for a single-threaded process whose child soon executes something."""
    return _check(libc.fork(), "fork")


def child_descriptor() -> int:
    """Block SIGCHLD and return a descriptor that is readable when a child has ended: no handler has to run for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    mask = struct.pack("Q", 1 << (signal.SIGCHLD - 1)).ljust(128, b"\0")
    return _check(libc.signalfd(-1, mask, 0o2000000 | 0o4000), "signalfd")


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Give up every capability but those named, and the bounding set with them."""
    mask = 0
    for capability in kept:
        mask |= 1 << capability
    header = struct.pack("II", 0x20080522, 0)
    _syscall(SYS_CAPSET, "capset", header, struct.pack("6I", mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, 0, 0, 0))


def drop_bounding_set(last: int) -> None:
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_SET_SECUREBITS, 0xEB)  # uid 0 means nothing, no kept or ambient capabilities, all of it locked


def install_filter(program: bytes) -> None:
    """Install a seccomp filter on this process and all that descend from it."""
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a 16-bit count, padding, a pointer
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    _syscall(SYS_SECCOMP, "seccomp", 1, 4, header)
