"""The seccomp filter of every box, assembled for x86_64 and aarch64.

Denied calls answer EPERM, unknown and newer ones ENOSYS, so that a libc falls back to what it used before them. A
system call of a foreign architecture (i386 on x86_64, arm on aarch64) kills the process; x32 is unknown.
"""

from __future__ import annotations

import struct

DENIED = {
    # name: (x86_64, aarch64); -1 where the architecture has no such call
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, -1),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, -1),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, -1),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysctl": (156, -1),
    "sysfs": (139, -1),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "ustat": (136, -1),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
CLONE, CLONE3, SOCKET, IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
LAST_KNOWN = 450
KNOWN_BEYOND = (451, 452, 453, 454, 455, 456, 462)
"""cachestat, fchmodat2, map_shadow_stack, the futex calls, mseal."""
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: no netlink, packet, vsock or anything else."""
SOCKET_TYPES = (1, 2, 5)
"""Stream, datagram, seqpacket: no raw sockets."""
NEW_NAMESPACES = 0x7E020000
TERMINAL_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which put words into another process's terminal."""

ALLOW, KILL_PROCESS, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
LOAD, JUMP, JUMP_EQUAL, JUMP_ABOVE, JUMP_BITS, AND, RETURN = 0x20, 0x05, 0x15, 0x25, 0x45, 0x54, 0x06
NUMBER, ARCH, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24


def _block(number: int, body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """`body` for one system call; every body ends in a return."""
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def program(machine: str) -> bytes:
    """The filter as the kernel reads it: a sequence of `struct sock_filter`."""
    column = ("x86_64", "aarch64").index(machine)
    code = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[column]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    beyond = [(JUMP_EQUAL, len(KNOWN_BEYOND) - place, 0, number) for place, number in enumerate(KNOWN_BEYOND)]
    code += [(JUMP_ABOVE, 0, len(beyond) + 1, LAST_KNOWN), *beyond, (RETURN, 0, 0, ENOSYS)]
    # clone3 keeps its flags in memory, where a filter cannot look
    code += _block(CLONE3[column], [(RETURN, 0, 0, ENOSYS)])
    numbers = sorted(pair[column] for pair in DENIED.values() if pair[column] >= 0)
    code += [(JUMP_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    code += [(JUMP, 0, 0, 1), (RETURN, 0, 0, EPERM)]
    code += _block(
        CLONE[column],
        [
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_BITS, 0, 1, NEW_NAMESPACES),
            (RETURN, 0, 0, EPERM),
            (RETURN, 0, 0, ALLOW),
        ],
    )
    families = [(JUMP_EQUAL, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)]
    types = [(JUMP_EQUAL, len(SOCKET_TYPES) - place, 0, kind) for place, kind in enumerate(SOCKET_TYPES)]
    code += _block(
        SOCKET[column],
        [
            (LOAD, 0, 0, FIRST_ARGUMENT),
            *families,
            (RETURN, 0, 0, EPERM),
            (LOAD, 0, 0, SECOND_ARGUMENT),
            (AND, 0, 0, 0xF),
            *types,
            (RETURN, 0, 0, EPERM),
            (RETURN, 0, 0, ALLOW),
        ],
    )
    ioctls = [(JUMP_EQUAL, len(TERMINAL_IOCTLS) - place, 0, code_) for place, code_ in enumerate(TERMINAL_IOCTLS)]
    code += _block(
        IOCTL[column],
        [(LOAD, 0, 0, SECOND_ARGUMENT), *ioctls, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)],
    )
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
