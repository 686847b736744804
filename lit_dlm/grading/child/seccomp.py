"""Refuses system calls that no solution of a programming problem needs.

A classic BPF program is loaded with ``prctl``; a refused call fails with ``EPERM`` (``ENOSYS``
where the C library then falls back to an older call that can be judged by its flags). It closes
what neither resource limits nor, at the lower isolation level, missing namespaces close: sockets,
signals, other processes' memory, new namespaces, kernel objects that outlive a process and, unless
they are allowed, new processes and any change of the file system.

Numbers: the kernel's ``unistd`` tables for x86-64, and the generic table that arm64 uses.
"""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000  # plus the error number
_EPERM = 1
_ENOSYS = 38

_LOAD_WORD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

_CLONE_THREAD = 0x00010000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # and O_TMPFILE
_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 0, "aarch64": 1}

# name: (x86-64, arm64); None where the architecture lacks the call.
_ALWAYS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_NEW_PROCESSES: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
}
_FILE_CHANGES: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_OPEN = (2, None)
_OPENAT = (257, 56)
_OPENAT2 = (437, 437)
_CLONE = (56, 220)
_CLONE3 = (435, 435)


def is_supported() -> bool:
    """Whether this machine's architecture has a table here."""
    return os.uname().machine in _ARCHITECTURES


def build_program(machine: str, *, allow_processes: bool, allow_files: bool) -> bytes:
    """Assembles the filter; calls it does not list are allowed.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        allow_processes: Let the candidate start processes (threads are always allowed).
        allow_files: Let it change files where permissions and limits do.

    Returns:
        The instructions, 8 bytes each.
    """
    column = _COLUMNS[machine]
    refused = dict(_ALWAYS)
    # (call, argument looked at, bits, whether any of the bits set is what makes it refused)
    by_flags: list[tuple[tuple[int | None, int | None], int, int, bool]] = []
    absent: list[tuple[int | None, int | None]] = []
    if not allow_processes:
        refused |= _NEW_PROCESSES
        by_flags.append((_CLONE, 0, _CLONE_THREAD, False))
        absent.append(_CLONE3)
    if not allow_files:
        refused |= _FILE_CHANGES
        by_flags += [(_OPEN, 1, _WRITE_FLAGS, True), (_OPENAT, 2, _WRITE_FLAGS, True)]
        absent.append(_OPENAT2)

    # Jump targets are labels until the length is known. seccomp_data holds the call's number at
    # offset 0, the architecture at 4 and the arguments, 8 bytes each, from 16 on.
    code: list[tuple[int, str, str, int]] = [
        (_LOAD_WORD, "", "", 4),
        (_JUMP_EQUAL, "", "refuse", _ARCHITECTURES[machine]),
        (_LOAD_WORD, "", "", 0),
        (_JUMP_AT_LEAST, "refuse", "", _X32_BIT),
    ]
    for label, calls in (("refuse", refused.values()), ("absent", absent)):
        numbers = (call[column] for call in calls)
        code += [(_JUMP_EQUAL, label, "", number) for number in numbers if number is not None]
    for call, argument, bits, refused_if_set in by_flags:
        if (number := call[column]) is not None:
            set_label, clear_label = ("refuse", "allow") if refused_if_set else ("allow", "refuse")
            code += [
                (_JUMP_EQUAL, "", "+2", number),
                (_LOAD_WORD, "", "", 16 + 8 * argument),
                (_JUMP_ANY_BIT, set_label, clear_label, bits),
            ]
    targets = {"allow": len(code), "refuse": len(code) + 1, "absent": len(code) + 2}
    code += [
        (_RETURN, "", "", _ALLOW),
        (_RETURN, "", "", _FAIL | _EPERM),
        (_RETURN, "", "", _FAIL | _ENOSYS),
    ]

    def skip(label: str, position: int) -> int:
        if not label:
            return 0
        return int(label) if label.startswith("+") else targets[label] - position - 1

    return b"".join(
        struct.pack("HBBI", operation, skip(yes, position), skip(no, position), value)
        for position, (operation, yes, no, value) in enumerate(code)
    )


def install(*, allow_processes: bool, allow_files: bool) -> bool:
    """Loads the filter into the calling process, which must have set ``no_new_privs``.

    Args:
        allow_processes: See :func:`build_program`.
        allow_files: See :func:`build_program`.

    Returns:
        Whether a filter was loaded: ``False`` on an architecture without a table.

    Raises:
        OSError: If the kernel refuses the filter.
    """
    if not is_supported():
        return False
    code = build_program(
        os.uname().machine, allow_processes=allow_processes, allow_files=allow_files
    )

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")
    return True
