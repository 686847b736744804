"""Puts a sample's processes behind walls: namespaces or Landlock, and limits everywhere.

The walls are around both processes of a sample. :func:`confine` applies to the worker alone, with
resource limits and the system-call filter (:mod:`.seccomp`).

- Namespaces: :func:`enter_namespaces` makes what bubblewrap makes where it is installed. This is a
  read-only file system of the interpreter, its packages and the system libraries, no ``/proc``, no
  network device, no other process in sight; when the first process ends, so do all others.
- Landlock: the same files and no others can be opened; other processes cannot be traced.

Root never runs a sample: :func:`become` takes a user id that owns nothing. Constants are those of
the Linux kernel's user headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import struct
from collections.abc import Sequence
from typing import Any

from . import seccomp

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
TEMPORARY = "/tmp"
FILE_BYTES = 1 << 23
"""Most bytes of a file, of the temporary folder that namespaces have, and of a program's output."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000

_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOUNT_ATTR_READ_ONLY = 1
_MOUNT_ATTR_NOSUID = 2

# The same numbers on every architecture.
_SYS_MOUNT_SETATTR = 442  # since Linux 5.12
_SYS_LANDLOCK_CREATE_RULESET = 444  # since Linux 5.13
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446

# Number of file rights by version of the interface; 16 from version 5 on.
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_LANDLOCK_READ = 0b1101  # execute, read file, read folder
_LANDLOCK_READ_FILE = 0b0100
_LANDLOCK_WRITE_FILE = 0b0010

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38

MOST_THREADS = 16
# Where the user id is that of the run, the kernel counts all threads of that user: its limit then
# stops only what grows faster than the driver looks.
_TASKS_OF_A_PERSON = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _system_call(what: str, number: int, *arguments: Any) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *wide), what)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if s is None else os.fsencode(s) for s in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {target}")


def _make_read_only(target: str, *, recursive: bool) -> None:
    attributes = struct.pack("4Q", _MOUNT_ATTR_READ_ONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _system_call(
        f"mount_setattr {target}",
        *(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes)),
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def put_up_walls(level: str, *, folders: Sequence[str], user: int | None, parent: int) -> None:
    """Puts the calling process behind the walls of a level, for good; it may continue as a child.

    bubblewrap has put them up already. ``folders`` are shown besides the system's own, as real
    paths; ``user`` is a user and group id to become; the process ends with ``parent``.
    """
    if level == "namespaces":
        _die_with(parent)
        enter_namespaces(folders)
        parent = 1
    # Landlock comes later: it requires a process that can gain no new privileges.
    become(user)
    if level == "landlock":
        restrict_files(folders)
    if level != "bubblewrap":
        _die_with(parent)  # again: changing the user id resets it
    # The worker, of the same user, must not read the driver's memory or descriptors.
    _prctl(_PR_SET_DUMPABLE, 0)


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespaces(folders: Sequence[str]) -> None:
    """Continues as a grandchild of the caller in new namespaces, with a small root directory."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if uid != 0:
        flags |= _CLONE_NEWUSER
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
    if uid != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _go_on_in_child()
    # Now process 1: the kernel ends all others with it. It only waits, because the signals that
    # limits send would spare it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(folders)
    _go_on_in_child()


def _go_on_in_child() -> None:
    """Forks and continues in the child; the caller waits, ends as the child did, never returns."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


def _build_root(folders: Sequence[str]) -> None:
    """Replaces the root directory by a small read-only one, built on ``/proc``."""
    os.umask(0o022)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = "/proc"
    options = "mode=755,size=1m,nr_inodes=2k"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.mkdir(root + TEMPORARY)
    options = f"mode=1777,size={FILE_BYTES},nr_inodes=1k"
    _mount("tmpfs", root + TEMPORARY, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for folder in (*SYSTEM_FOLDERS, *folders):
        target = root + folder
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), target)
        elif os.path.isdir(folder):
            os.makedirs(target, exist_ok=True)
            _mount(folder, target, None, _MS_BIND | _MS_REC)
            _make_read_only(target, recursive=True)
    for path in (*SYSTEM_FILES, *DEVICES):
        if os.path.exists(path):
            target = root + path
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _write(target, "")
            _mount(os.path.realpath(path), target, None, _MS_BIND)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount2")
    os.chdir("/")
    _make_read_only("/", recursive=False)


def restrict_files(folders: Sequence[str]) -> None:
    """Lets the calling process open only the system's and the given folders, for reading."""
    version = _system_call("Landlock", _SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)
    # Later versions also block the network, abstract sockets and signals to other processes.
    rights = (1 << _LANDLOCK_RIGHTS.get(version, 16)) - 1
    handled = struct.pack("3Q", rights, 3 * (version >= 4), 3 * (version >= 6))
    ruleset = _system_call("Landlock", _SYS_LANDLOCK_CREATE_RULESET, handled, len(handled), 0)
    rules = [(folder, _LANDLOCK_READ) for folder in (*SYSTEM_FOLDERS, *folders)]
    rules += [(path, _LANDLOCK_READ_FILE) for path in (*SYSTEM_FILES, *DEVICES)]
    rules += [("/dev/null", _LANDLOCK_WRITE_FILE)]
    for path, rights in rules:
        with contextlib.suppress(FileNotFoundError):
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except PermissionError:
                raise PermissionError(f"{path} is closed to all users but root") from None
            rule = struct.pack("=Qi", rights, descriptor)
            _system_call(f"Landlock {path}", _SYS_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
            os.close(descriptor)
    _system_call("Landlock", _SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def become(user: int | None) -> None:
    """Gives up root, all capabilities and new privileges, for good; see :func:`put_up_walls`."""
    # The order matters: without root, groups cannot be given up.
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def confine(*, cpu_seconds: float, memory_bytes: int, others_tasks: int | None) -> None:
    """Limits the calling process, the worker, which ends with the driver and can start no other.

    ``others_tasks`` are threads that its user may have already; ``None`` if the kernel counts
    nothing else under its user id.
    """
    # A session of its own: signals to its process group reach no other process.
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {
        resource.RLIMIT_CPU: math.ceil(cpu_seconds),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        # The driver, the worker and its threads.
        resource.RLIMIT_NPROC: MOST_THREADS + 2
        if others_tasks is None
        else others_tasks + _TASKS_OF_A_PERSON,
    }
    for kind, value in limits.items():
        set_limit(kind, value)
    seccomp.install()


def set_limit(kind: int, value: int) -> None:
    """Sets a hard limit of the calling process, or keeps a lower one that it has already."""
    # The run itself may be under limits, which cannot be raised.
    hard = resource.getrlimit(kind)[1]
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bounded, bounded))
