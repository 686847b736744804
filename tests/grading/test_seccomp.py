"""The filter program, run by a slow interpreter of its eight-byte instructions."""

import os
import struct

import pytest

from lit_dlm.grading.child import seccomp

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
X86, ARM = 0xC000003E, 0xC00000B7


def _run(program: bytes, number: int, *args: int, architecture: int) -> int:
    """Interprets classic BPF on a ``seccomp_data`` (number, architecture, pointer, 6 arguments)."""
    padded = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("IIQ6Q", number, architecture, 0, *padded)
    accumulator = position = 0
    while True:
        code, yes, no, value = struct.unpack_from("HBBI", program, 8 * position)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == 0x06:
            return value
        else:
            tests = {0x15: accumulator == value, 0x35: accumulator >= value}
            tests[0x45] = bool(accumulator & value)
            position += yes if tests[code] else no


@pytest.mark.parametrize(
    ("machine", "number", "args", "result"),
    [
        ("x86_64", 0, (), ALLOW),  # read
        ("x86_64", 9, (), ALLOW),  # mmap
        ("x86_64", 53, (1, 0x80801), ALLOW),  # socketpair of streams: event loops need it
        ("x86_64", 53, (1, 0x80802), EPERM),  # of datagrams
        ("x86_64", 72, (3, 1030), ALLOW),  # fcntl F_DUPFD_CLOEXEC
        ("x86_64", 72, (3, 4, 0x2000), ALLOW),  # F_SETFL
        ("x86_64", 72, (3, 8, 4321), EPERM),  # F_SETOWN
        ("x86_64", 72, (3, 10, 9), EPERM),  # F_SETSIG
        ("x86_64", 16, (0, 0x5401), ALLOW),  # ioctl TCGETS, by which streams know a terminal
        ("x86_64", 16, (0, 0x8901), EPERM),  # FIOSETOWN
        ("x86_64", 469, (), EPERM),  # file_setattr
        ("x86_64", 470, (), ENOSYS),  # newer than the table
        ("x86_64", 41, (), EPERM),  # socket
        ("x86_64", 62, (), EPERM),  # kill
        ("x86_64", 57, (), EPERM),  # fork
        ("x86_64", 59, (), EPERM),  # execve
        ("x86_64", 56, (0x11,), EPERM),  # clone as fork does it
        ("x86_64", 56, (0x3D0F00,), ALLOW),  # clone as threads do it (CLONE_THREAD = 0x10000)
        ("x86_64", 435, (), ENOSYS),  # clone3: the C library then calls clone
        ("x86_64", 257, (0, 0, os.O_CREAT), ALLOW),  # openat: the other walls' concern
        ("x86_64", 302, (0, 7), ALLOW),  # prlimit64 of the process itself
        ("x86_64", 302, (4321, 7), EPERM),  # and of another one
        ("x86_64", 157, (1, 0), EPERM),  # prctl
        ("x86_64", 1 | 0x40000000, (), ENOSYS),  # a call by its x32 number
        ("aarch64", 63, (), ALLOW),  # read in the generic table
        ("aarch64", 198, (), EPERM),  # socket
        ("aarch64", 220, (0x11,), EPERM),  # clone
        ("aarch64", 261, (9,), EPERM),  # prlimit64
    ],
)
def test_the_filter_lets_only_harmless_calls_through(machine, number, args, result):
    architecture = {"x86_64": X86, "aarch64": ARM}[machine]
    assert _run(seccomp.build_program(machine), number, *args, architecture=architecture) == result


def test_machines_without_a_table_and_calls_of_another_architecture_are_refused():
    assert _run(seccomp.build_program("x86_64"), 0, architecture=ARM) == EPERM
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.build_program("riscv64")
