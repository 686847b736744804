"""The filter program, run by a slow interpreter of its eight-byte instructions."""

from __future__ import annotations

import os
import struct

import pytest

from lit_dlm.grading.child import seccomp

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
X86, ARM = 0xC000003E, 0xC00000B7


def _run(program: bytes, number: int, *args: int, architecture: int = X86) -> int:
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
    ("number", "args", "result"),
    [
        (0, (), ALLOW),  # read
        (9, (), ALLOW),  # mmap
        (53, (1, 0x80801), ALLOW),  # socketpair of streams: event loops need it
        (53, (1, 0x80802), EPERM),  # of datagrams
        (72, (3, 1030), ALLOW),  # fcntl F_DUPFD_CLOEXEC
        (72, (3, 4, 0x2000), ALLOW),  # F_SETFL
        (72, (3, 8, 4321), EPERM),  # F_SETOWN
        (72, (3, 10, 9), EPERM),  # F_SETSIG
        (16, (0, 0x5401), ALLOW),  # ioctl TCGETS, by which streams know a terminal
        (16, (0, 0x8901), EPERM),  # FIOSETOWN
        (469, (), EPERM),  # file_setattr
        (470, (), ENOSYS),  # newer than the table
        (41, (), EPERM),  # socket
        (62, (), EPERM),  # kill
        (57, (), EPERM),  # fork
        (59, (), EPERM),  # execve
        (56, (0x11,), EPERM),  # clone as fork does it
        (56, (0x3D0F00,), ALLOW),  # clone as threads do it (CLONE_THREAD = 0x10000)
        (435, (), ENOSYS),  # clone3: the C library then calls clone
        (257, (0, 0, os.O_WRONLY | os.O_CREAT), ALLOW),  # openat: the other walls' concern
        (302, (0, 7), ALLOW),  # prlimit64 of the process itself
        (302, (4321, 7), EPERM),  # and of another one
        (157, (1, 0), EPERM),  # prctl
        (1 | 0x40000000, (), ENOSYS),  # a call by its x32 number
    ],
)
def test_filter_on_x86(number, args, result):
    assert _run(seccomp.build_program("x86_64"), number, *args) == result


def test_calls_of_another_architecture_are_refused():
    assert _run(seccomp.build_program("x86_64"), 0, architecture=ARM) == EPERM


def test_a_machine_without_a_table_is_refused():
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.build_program("riscv64")


@pytest.mark.parametrize(
    ("number", "args", "result"),
    [(63, (), ALLOW), (198, (), EPERM), (220, (0x11,), EPERM), (261, (9,), EPERM)],
)
def test_filter_on_arm(number, args, result):
    """On the generic table 63 is read, 198 socket, 220 clone and 261 prlimit64."""
    assert _run(seccomp.build_program("aarch64"), number, *args, architecture=ARM) == result
