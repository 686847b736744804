"""The filter program, run by a slow interpreter of its eight-byte instructions."""

import os
import re
import struct
from pathlib import Path

import pytest

from lit_dlm.grading.child import seccomp

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
# vmsplice, tee, splice, io_uring_*, keyctl, perf_event_open, bpf, userfaultfd, timer_create,
# prctl, kill, fork, execve, socket, sendmsg, flock, inotify_add_watch, and one newer than the table
X86_ABSENT = (
    *(278, 276, 275, 425, 426, 427, 250, 298, 321, 323, 222),
    *(157, 62, 57, 59, 41, 46, 73, 254, 500),
)
ARM_ABSENT = (75, 77, 76, 425, 426, 427, 219, 241, 280, 282, 107, 167, 129, 221, 198, 211, 32, 27)
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
        ("x86_64", 257, (0, 0, os.O_CREAT), ALLOW),  # openat: the other walls' concern
        ("x86_64", 53, (1, 0x80801), ALLOW),  # socketpair of streams: event loops need it
        ("x86_64", 53, (1, 0x80802), EPERM),  # of datagrams
        ("x86_64", 53, (16, 1), EPERM),  # of another family
        ("x86_64", 72, (3, 1030), ALLOW),  # fcntl F_DUPFD_CLOEXEC
        ("x86_64", 72, (3, 4, 0x2000), ALLOW),  # F_SETFL
        *(("x86_64", 72, (3, command), EPERM) for command in (5, 6, 7, 8, 10, 1024, 1026, 1031)),
        ("x86_64", 16, (0, 0x5401), ALLOW),  # ioctl TCGETS, by which streams know a terminal
        ("x86_64", 16, (0, 0x5452), EPERM),  # FIOASYNC
        ("x86_64", 16, (0, 0x8901), EPERM),  # FIOSETOWN
        ("x86_64", 56, (0x11,), EPERM),  # clone as fork does it
        ("x86_64", 56, (0x3D0F00,), ALLOW),  # clone as threads do it (CLONE_THREAD = 0x10000)
        ("x86_64", 435, (), ENOSYS),  # clone3: the C library then calls clone
        ("x86_64", 302, (0, 7), ALLOW),  # prlimit64 of the process itself
        ("x86_64", 302, (4321, 7), EPERM),  # and of another one
        *(("x86_64", number, (), ENOSYS) for number in X86_ABSENT),
        ("x86_64", 1 | 0x40000000, (), ENOSYS),  # a call by its x32 number
        ("aarch64", 63, (), ALLOW),  # read in the generic table
        ("aarch64", 25, (3, 1024), EPERM),  # fcntl F_SETLEASE
        ("aarch64", 220, (0x11,), EPERM),  # clone
        ("aarch64", 261, (9,), EPERM),  # prlimit64
        *(("aarch64", number, (), ENOSYS) for number in ARM_ABSENT),
    ],
)
def test_the_filter_lets_only_harmless_calls_through(machine, number, args, result):
    architecture = {"x86_64": X86, "aarch64": ARM}[machine]
    assert _run(seccomp.build_program(machine), number, *args, architecture=architecture) == result


def test_machines_without_a_table_and_calls_of_another_architecture_are_refused():
    assert _run(seccomp.build_program("x86_64"), 0, architecture=ARM) == EPERM
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.build_program("riscv64")


def test_the_table_has_the_numbers_of_the_kernels_headers():
    """Where they are installed: those of x86-64, and the generic ones that arm64 has."""
    headers = {
        "x86_64-linux-gnu/asm/unistd_64.h": 1,
        "asm-generic/unistd.h": 2,
    }
    calls = [call.split() for call in ", ".join(seccomp._ALLOWED.values()).split(", ")]
    for header, column in headers.items():
        path = Path("/usr/include", header)
        if not path.exists():
            pytest.skip(f"no {path}")
        numbers = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)$", path.read_text(), re.MULTILINE)
        known = {name.replace("fstatat", "newfstatat"): number for name, number in numbers}
        known |= {name: number for name, number in numbers if name == "newfstatat"}
        assert [known.get(call[0], "-") for call in calls] == [call[column] for call in calls]
