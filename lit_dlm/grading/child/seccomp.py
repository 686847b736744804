"""Refuses system calls that no solution of a programming problem needs.

A classic BPF program is loaded with ``prctl``; a refused call fails with ``EPERM`` (``clone3`` with
``ENOSYS``: the C library then falls back to ``clone``, which can be judged by its flags). It closes
what the other walls leave open: other processes (also the driver's, whose user the worker shares),
new processes and namespaces, sockets, kernel objects that outlive a process, and attributes of
files, which Landlock does not know.

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
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

_CLONE_THREAD = 0x00010000
_ALL_BITS = 0xFFFFFFFF
_ANY_BUT_STREAM = 6
_SETS_OWNER = 8
_IOCTL_OF_SOCKETS = 0x8000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Calls by what they would open: name and number on x86-64 and arm64, - where there is no such call.
_REFUSED = {
    "new processes and namespaces": (
        "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, unshare 272 97, setns 308 268"
    ),
    "other processes": (
        "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, "
        "rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424, "
        "pidfd_getfd 438 438, ptrace 101 117, process_vm_readv 310 270, "
        "process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272, "
        "setpriority 141 140, ioprio_set 251 30, sched_setaffinity 203 122, "
        "sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119, "
        "migrate_pages 256 238, move_pages 279 239, perf_event_open 298 241"
    ),
    "the signal that ends the worker with its parent, among others": "prctl 157 167",
    "the network, and what lives in the kernel": (
        "socket 41 198, io_setup 206 0, inotify_init 253 -, inotify_init1 294 26, "
        "fanotify_init 300 262, syslog 103 116, bpf 321 280, userfaultfd 323 282, "
        "io_uring_setup 425 425, keyctl 250 219, add_key 248 217, request_key 249 218"
    ),
    "not only to make them: without namespaces there are those of others": (
        "shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, "
        "semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, "
        "msgctl 71 187, mq_open 240 180, mq_unlink 241 181"
    ),
    "attributes of files, and what the first versions of Landlock leave open": (
        "truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, "
        "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, "
        "futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, "
        "fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, "
        "fremovexattr 199 16, removexattrat 466 466, file_setattr 469 469"
    ),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_PRLIMIT64 = (302, 261)
_SOCKETPAIR = (53, 199)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
# Calls from here on are newer than this table (Linux 6.18), or x32's, and said to be absent.
_FIRST_UNKNOWN = 470


def build_program(machine: str) -> bytes:
    """Assembles the filter, instructions of 8 bytes; calls it does not list are allowed."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine}")
    column = [*_ARCHITECTURES].index(machine)
    # (call, argument looked at, bits, whether any of the bits set is what makes it refused)
    by_argument = [
        (_CLONE, 0, _CLONE_THREAD, False),
        (_PRLIMIT64, 0, _ALL_BITS, True),
        # Event loops need pairs of stream sockets; a datagram could be sent to sockets of others.
        (_SOCKETPAIR, 1, _ANY_BUT_STREAM, True),
        # F_SETOWN, F_SETSIG and ioctl's FIOSETOWN: a pipe then sends a signal to anybody.
        (_FCNTL, 1, _SETS_OWNER, True),
        (_IOCTL, 1, _IOCTL_OF_SOCKETS, True),
    ]

    # Jump targets are labels until the length is known. seccomp_data holds the call's number at
    # offset 0, the architecture at 4 and the arguments, 8 bytes each, from 16 on.
    code: list[tuple[int, str, str, int]] = [
        (_LOAD_WORD, "", "", 4),
        (_JUMP_EQUAL, "", "refuse", _ARCHITECTURES[machine]),
        (_LOAD_WORD, "", "", 0),
        (_JUMP_AT_LEAST, "absent", "", _FIRST_UNKNOWN),
    ]
    calls = [call.split()[1 + column] for call in ", ".join(_REFUSED.values()).split(", ")]
    code += [(_JUMP_EQUAL, "refuse", "", int(number)) for number in calls if number != "-"]
    code += [(_JUMP_EQUAL, "absent", "", _CLONE3[column])]
    for call, argument, bits, refused_if_set in by_argument:
        set_label, clear_label = ("refuse", "allow") if refused_if_set else ("allow", "refuse")
        code += [
            (_JUMP_EQUAL, "", "+2", call[column]),
            (_LOAD_WORD, "", "", 16 + 8 * argument),
            (_JUMP_ANY_BIT, set_label, clear_label, bits),
        ]
    targets = {"allow": len(code), "refuse": len(code) + 1, "absent": len(code) + 2}
    code += [
        (_RETURN, "", "", _ALLOW),
        (_RETURN, "", "", _FAIL | errno.EPERM),
        (_RETURN, "", "", _FAIL | errno.ENOSYS),
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

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")
