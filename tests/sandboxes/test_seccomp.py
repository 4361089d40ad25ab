"""The filter, run by a small interpreter of its instructions, for both architectures."""

import os
import struct

import pytest

from agentrl.sandboxes.namespace.inner import seccomp

X86, ARM = "x86_64", "aarch64"
ALLOW, KILL, EPERM, ENOSYS = seccomp.ALLOW, seccomp.KILL_PROCESS, seccomp.EPERM, seccomp.ENOSYS


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the filter answers to one system call."""
    if arch is None:
        arch = seccomp.AUDIT_ARCH[(X86, ARM).index(machine)]
    data = struct.pack("<IIQ6Q", number, arch, 0, *(list(arguments) + [0] * 6)[:6])
    program = seccomp.program(machine)
    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, place = 0, 0
    while True:
        operation, yes, no, value = code[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x05:
            place += value
        elif operation == 0x15:
            place += yes if accumulator == value else no
        elif operation == 0x25:
            place += yes if accumulator > value else no
        elif operation == 0x45:
            place += yes if accumulator & value else no
        elif operation == 0x54:
            accumulator &= value
        else:
            assert operation == 0x06
            return int(value)


@pytest.mark.parametrize(("machine", "column"), [(X86, 0), (ARM, 1)])
def test_every_denied_call_is_denied_and_only_those(machine: str, column: int) -> None:
    denied = {pair[column] for pair in seccomp.DENIED.values() if pair[column] >= 0}
    answers = {number: decide(machine, number, 1, 1) for number in range(seccomp.LAST_KNOWN + 1)}
    assert {number for number, answer in answers.items() if answer == EPERM} == denied
    assert {number for number, answer in answers.items() if answer == ENOSYS} == {435}
    assert decide(machine, 435) == ENOSYS
    beyond = {number for number in range(451, 600) if decide(machine, number) == ALLOW}
    assert beyond == set(seccomp.KNOWN_BEYOND)


@pytest.mark.parametrize(("machine", "clone", "socket", "ioctl"), [(X86, 56, 41, 16), (ARM, 220, 198, 29)])
def test_calls_that_depend_on_their_arguments(machine: str, clone: int, socket: int, ioctl: int) -> None:
    assert decide(machine, clone, 0x11) == decide(machine, clone, 0x3D0F00) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flag | 0x11) == EPERM
    cloexec = 0o2000000
    allowed = {(f, t) for f in range(50) for t in range(11) if decide(machine, socket, f, t | cloexec) == ALLOW}
    assert allowed == {(f, t) for f in (1, 2, 10) for t in (1, 2, 5)}
    assert [decide(machine, ioctl, 0, c) for c in (0x5412, 0x541C, 0x5401)] == [EPERM, EPERM, ALLOW]


def test_foreign_architectures() -> None:
    assert decide(X86, 39, arch=0x40000003) == KILL  # i386
    assert decide(ARM, 172, arch=0x40000028) == KILL  # arm
    assert decide(X86, 0x40000000 | 39) == ENOSYS  # x32


def test_numbers_are_the_kernels() -> None:
    places = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")
    header = next((place for place in places if os.path.exists(place)), None)
    if header is None:
        pytest.skip("the kernel's headers for x86_64 are not installed, so there is nothing to compare with")
    with open(header) as lines:
        table = {w[1][5:]: int(w[2]) for w in map(str.split, lines) if len(w) == 3 and w[1].startswith("__NR_")}
    named = {name: pair[0] for name, pair in seccomp.DENIED.items() if pair[0] >= 0 and name in table}
    assert len(named) > 60 and named == {name: table[name] for name in named}
