"""Lets through the system calls that CPython, numpy and their libraries need, and no others.

A classic BPF program is loaded with ``prctl``. A call that it does not list appears not to exist
(``ENOSYS``: the C library falls back from ``clone3`` to ``clone``, whose flags can be checked); a
listed one with other arguments fails with ``EPERM``. This closes what the other walls leave open:
other processes (also the driver's, whose user the worker shares), new processes and namespaces,
sockets, kernel objects that outlive a process, memory that no limit counts (pages kept in pipes,
timers, locks), leases and watches on files of others, and attributes of files, which Landlock does
not cover.

Numbers: the kernel's ``unistd`` tables for x86-64, and the generic table that arm64 uses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000  # plus the error number

_LOAD_WORD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name and number on x86-64 and arm64, - where there is no such call.
_ALLOWED = {
    "memory": (
        "brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233"
    ),
    "files, of which the other walls say what may be opened": (
        "read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, open "
        "2 -, openat 257 56, close 3 57, close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, "
        "lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 "
        "439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 "
        "49, fchdir 81 50, fsync 74 82, fdatasync 75 83, ftruncate 77 46, mkdir 83 -, mkdirat "
        "258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, "
        "renameat2 316 276, umask 95 166"
    ),
    "descriptors, pipes and pairs": (
        "dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, "
        "select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 "
        "-, epoll_pwait 281 22, sendto 44 206, recvfrom 45 207, getsockname 51 204, getsockopt "
        "55 209, shutdown 48 210"
    ),
    "time, and what it is": (
        "clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 "
        "101, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, sysinfo 99 179, "
        "uname 63 160, getcpu 309 168, getrandom 318 278, getpid 39 172, getppid 110 173, "
        "gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, "
        "getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid 121 "
        "155, getsid 124 156, getpriority 140 141, getrlimit 97 163, setrlimit 160 164, "
        "sched_getaffinity 204 123, sched_yield 24 124"
    ),
    "threads, signals and its end": (
        "futex 202 98, set_robust_list 273 99, rseq 334 293, rt_sigaction 13 134, "
        "rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 "
        "133, rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128, alarm 37 "
        "-, pause 34 -, getitimer 36 102, setitimer 38 103, wait4 61 260, waitid 247 95, exit "
        "60 93, exit_group 231 94"
    ),
}
# Numbers of a call, and for each argument checked: its index, the test, and the values that pass.
_BY_ARGUMENT = [
    # clone, with CLONE_THREAD
    ((56, 220), [(0, _JUMP_ANY_BIT, [0x00010000])]),
    # prlimit64, of the process itself
    ((302, 261), [(0, _JUMP_EQUAL, [0])]),
    # socketpair of AF_UNIX and SOCK_STREAM, with SOCK_NONBLOCK or SOCK_CLOEXEC: event loops need
    # them; datagrams could be sent to sockets of others
    ((53, 199), [(0, _JUMP_EQUAL, [1]), (1, _JUMP_EQUAL, [1, 0x801, 0x80001, 0x80801])]),
    # fcntl, to duplicate and for flags; leases and watches would block or observe others
    ((72, 25), [(1, _JUMP_EQUAL, [0, 1, 2, 3, 4, 1030])]),
    # ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    ((16, 29), [(1, _JUMP_EQUAL, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])]),
]


def build_program(machine: str) -> bytes:
    """Assembles the filter, instructions of 8 bytes."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine}")
    column = [*_ARCHITECTURES].index(machine)
    # Jump targets are labels until the length is known. seccomp_data holds the call's number at
    # offset 0, the architecture at 4 and the arguments, 8 bytes each, from 16 on.
    code: list[tuple[int, str, str, int]] = [
        (_LOAD_WORD, "", "", 4),
        (_JUMP_EQUAL, "", "refuse", _ARCHITECTURES[machine]),
        (_LOAD_WORD, "", "", 0),
    ]
    calls = [call.split()[1 + column] for call in ", ".join(_ALLOWED.values()).split(", ")]
    code += [(_JUMP_EQUAL, "allow", "", int(number)) for number in calls if number != "-"]
    for numbers, checks in _BY_ARGUMENT:
        body: list[tuple[int, str, str, int]] = []
        for argument, operation, values in checks:
            fits = "allow" if (argument, operation, values) == checks[-1] else ""
            body.append((_LOAD_WORD, "", "", 16 + 8 * argument))
            for left, value in zip(reversed(range(len(values))), values, strict=True):
                body.append((operation, fits or f"+{left}", "" if left else "refuse", value))
        code += [(_JUMP_EQUAL, "", f"+{len(body)}", numbers[column]), *body]
    # Any other call is absent.
    targets = {"allow": len(code) + 1, "refuse": len(code) + 2}
    code += [
        (_RETURN, "", "", _FAIL | errno.ENOSYS),
        (_RETURN, "", "", _ALLOW),
        (_RETURN, "", "", _FAIL | errno.EPERM),
    ]

    def skip(label: str, position: int) -> int:
        if not label:
            return 0
        return int(label) if label.startswith("+") else targets[label] - position - 1

    return b"".join(
        struct.pack("HBBI", operation, skip(yes, position), skip(no, position), value)
        for position, (operation, yes, no, value) in enumerate(code)
    )


def install() -> None:
    """Loads the filter into the calling process, which must have set ``no_new_privs``."""
    code = build_program(os.uname().machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")
