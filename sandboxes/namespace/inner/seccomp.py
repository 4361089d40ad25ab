"""The seccomp filter of every sandbox, assembled for x86_64 and aarch64.

Denied calls return EPERM, unknown and newer ones ENOSYS, so that a libc falls back to older calls. A system call of a
foreign architecture (i386 on x86_64, arm on aarch64) kills the process; x32 is unknown.
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
PRLIMIT64 = (302, 261)
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
"""TIOCSTI and TIOCLINUX, which inject input into another process's terminal."""

ALLOW, KILL_PROCESS, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_BITS, AND, RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
NUMBER, ARCH, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24

Step = tuple[int, int, str, str]
"""An instruction before jumps are resolved: operation, operand, and the labels to go to when true and when false."""


def program(machine: str) -> bytes:
    """Return the filter as the kernel reads it: a sequence of `struct sock_filter`.

    Every sandbox installs it, and the kernel then translates it and runs it for each system call that it knows. Few
    instructions, and a binary search instead of a row of comparisons, halve the cost.
    """
    column = ("x86_64", "aarch64").index(machine)
    special = {CLONE[column]: "clone", SOCKET[column]: "socket", IOCTL[column]: "ioctl", CLONE3[column]: "unknown"}
    denied = {pair[column] for pair in DENIED.values()}
    answers = [special.get(number, "deny" if number in denied else "allow") for number in range(LAST_KNOWN + 1)]
    starts = [number for number in range(LAST_KNOWN + 1) if number == 0 or answers[number] != answers[number - 1]]
    blocks: dict[str, list[Step]] = {
        "begin": [(LOAD, ARCH, "", ""), (JUMP_EQUAL, AUDIT_ARCH[column], "number", "kill")],
        "number": [(LOAD, NUMBER, "", ""), (JUMP_ABOVE, LAST_KNOWN, "beyond", "search")],
        **_search("search", [(start, answers[start]) for start in starts]),
        "beyond": _one_of(KNOWN_BEYOND, "allow", "unknown"),
        "clone": [(LOAD, FIRST_ARGUMENT, "", ""), (JUMP_BITS, NEW_NAMESPACES, "deny", "allow")],
        "socket": [(LOAD, FIRST_ARGUMENT, "", ""), *_one_of(FAMILIES, "type", "deny")],
        "type": [(LOAD, SECOND_ARGUMENT, "", ""), (AND, 0xF, "", ""), *_one_of(SOCKET_TYPES, "allow", "deny")],
        "ioctl": [(LOAD, SECOND_ARGUMENT, "", ""), *_one_of(TERMINAL_IOCTLS, "deny", "allow")],
        "allow": [(RETURN, ALLOW, "", "")],
        "deny": [(RETURN, EPERM, "", "")],
        "unknown": [(RETURN, ENOSYS, "", "")],
        "kill": [(RETURN, KILL_PROCESS, "", "")],
    }
    return assemble(blocks)


def own_limits_only(machine: str) -> bytes:
    """Return a second filter, for commands that share their user with process 1: they could end it by its rlimits."""
    number = PRLIMIT64[("x86_64", "aarch64").index(machine)]
    return assemble(
        {
            "begin": [(LOAD, NUMBER, "", ""), (JUMP_EQUAL, number, "whose", "allow")],
            "whose": [(LOAD, FIRST_ARGUMENT, "", ""), (JUMP_EQUAL, 0, "allow", "deny")],
            "allow": [(RETURN, ALLOW, "", "")],
            "deny": [(RETURN, EPERM, "", "")],
        }
    )


def _one_of(values: tuple[int, ...], then: str, otherwise: str) -> list[Step]:
    """Return the steps that test whether the accumulator holds one of these."""
    steps = [(JUMP_EQUAL, value, then, "") for value in values]
    return [*steps[:-1], (JUMP_EQUAL, values[-1], then, otherwise)]


def _search(name: str, answers: list[tuple[int, str]]) -> dict[str, list[Step]]:
    """Return blocks that find the answer for the number in the accumulator; each is valid up to the next number."""
    middle = len(answers) // 2
    blocks: dict[str, list[Step]] = {}
    labels = []
    for half, place in ((answers[middle:], "+"), (answers[:middle], "-")):
        labels.append(half[0][1] if len(half) == 1 else name + place)
        if len(half) > 1:
            blocks.update(_search(name + place, half))
    return {name: [(JUMP_ABOVE, answers[middle][0] - 1, labels[0], labels[1])], **blocks}


def assemble(blocks: dict[str, list[Step]]) -> bytes:
    """Join the blocks and resolve their labels; jumps lead forward, no further than 255 instructions."""
    places: dict[str, int] = {}
    length = 0
    for name, steps in blocks.items():
        places[name], length = length, length + len(steps)
    code: list[bytes] = []
    for steps in blocks.values():
        for operation, operand, *labels in steps:
            jumps = [places[label] - len(code) - 1 if label else 0 for label in labels]
            code.append(struct.pack("HBBI", operation, *jumps, operand))
    return b"".join(code)
