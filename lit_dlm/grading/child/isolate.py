"""Puts the worker behind walls: namespaces where the kernel lets us, limits everywhere.

Two levels, chosen by the parent after a probe and never assumed:

``namespaces``
    An own user, mount, process, network, IPC and host-name namespace. The file system holds only
    the interpreter, its packages and the system libraries, all read-only; there is no ``/proc``
    and no network device. The first process of the namespace is ours: when it ends, the kernel
    kills everything in the namespace, whatever it did to its session or its parent.
``process``
    Resource limits, an own session and, where the parent is root, a user id of its own. Children
    are found through ``/proc`` and killed.

Both set ``no_new_privs`` and a system-call filter (:mod:`.seccomp`). Neither is a virtual machine.
Constants are those of the Linux kernel's user headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import seccomp

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
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture since Linux 5.12
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
_MOUNT_ATTR_NODEV = 4

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")

_THREADS = 15
"""Threads a candidate may start besides its processes; the kernel counts both alike."""

_INSIDE_ROOT = 0
_INSIDE_WORKER = 1
_OUTSIDE_WORKER = 65534
"""User id outside for the worker when a real root starts the sandbox ("nobody")."""

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(OSError):
    """A wall could not be put up; the message names the call."""


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise IsolationError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [None if s is None else os.fsencode(s) for s in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {target}")


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "fd")]


def _make_read_only(target: str) -> None:
    attr = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(result, f"mount_setattr {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> bool:
    """Moves the calling process into new namespaces (its next child is process 1 in there).

    Returns:
        Whether the worker has a user id of its own inside; only a real root may map two.

    Raises:
        OSError: If the kernel or a container policy forbids it.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID
    flags |= _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    two_users = False
    if uid == 0:
        two_users = _unshare_with_two_users(flags)
    else:
        _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
    if not two_users:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_INSIDE_ROOT} {uid} 1")
        _write("/proc/self/gid_map", f"{_INSIDE_ROOT} {gid} 1")
    return two_users


def _unshare_with_two_users(flags: int) -> bool:
    """Unshares while a child that stayed outside, and so kept its rights, writes the maps."""
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        written = 1
        try:
            os.close(go_write)
            if os.read(go_read, 1) == b"g":
                folder = f"/proc/{os.getppid()}"
                mapping = f"{_INSIDE_ROOT} 0 1\n{_INSIDE_WORKER} {_OUTSIDE_WORKER} 1\n"
                _write(f"{folder}/uid_map", mapping)
                _write(f"{folder}/gid_map", mapping)
                written = 0
        finally:
            os._exit(written)
    os.close(go_read)
    try:
        _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
        os.write(go_write, b"g")
    finally:
        os.close(go_write)
        status = os.waitpid(helper, 0)[1]
    return status == 0


def build_root(mount_point: str, *, library_folders: list[str], scratch_bytes: int) -> None:
    """Replaces the root directory by a small read-only one (process 1 of the namespace).

    Args:
        mount_point: An existing empty folder.
        library_folders: Folders of the interpreter to show besides the system's own.
        scratch_bytes: Size of the writable ``/tmp``; 0 leaves no writable file anywhere.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    options = "mode=755,size=1m,nr_inodes=2k"
    _mount("tmpfs", mount_point, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    shown: list[str] = []
    for folder in (*_SYSTEM_FOLDERS, *library_folders):
        if any(folder == parent or folder.startswith(parent + "/") for parent in shown):
            continue
        target = mount_point + folder
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), target)
        elif os.path.isdir(folder):
            os.makedirs(target, exist_ok=True)
            _mount(folder, target, None, _MS_BIND | _MS_REC, None)
            _make_read_only(target)
            shown.append(folder)
    for path in (*_SYSTEM_FILES, *(f"/dev/{name}" for name in _DEVICES)):
        if os.path.exists(path):
            target = mount_point + path
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _write(target, "")
            _mount(os.path.realpath(path), target, None, _MS_BIND, None)
    os.mkdir(f"{mount_point}/tmp")
    if scratch_bytes:
        options = f"mode=1777,size={scratch_bytes},nr_inodes=1k"
        _mount("tmpfs", f"{mount_point}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    with contextlib.suppress(OSError):  # no further namespaces inside; older kernels lack the file
        _write("/proc/sys/user/max_user_namespaces", "0")
    os.chdir(mount_point)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount2")
    os.chdir("/")
    _remount_root_read_only()
    os.chdir("/tmp")


def _remount_root_read_only() -> None:
    """Makes the small root itself read-only but leaves ``/tmp``, a mount of its own, as it is."""
    attr = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        b"/",
        ctypes.c_uint(0),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(result, "mount_setattr /")


def become_reaper() -> None:
    """Makes orphaned descendants children of the caller, so that they can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keeps processes of the same user from reading the caller's memory and descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def limit_resources(limits: dict[str, Any], *, owns_user: bool) -> None:
    """Sets the hard resource limits of the calling process.

    Args:
        limits: ``cpu_seconds``, ``memory_bytes``, ``file_bytes``, ``processes``.
        owns_user: Whether nobody else runs under the worker's user id as the kernel counts it;
            only then does a limit on their number make sense.
    """
    cpu = max(1, -(-int(limits["cpu_seconds"] * 1000) // 1000))
    values = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: int(limits["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if owns_user:
        values[resource.RLIMIT_NPROC] = int(limits["processes"]) + _THREADS
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))


def drop_privileges(user: int | None, limits: dict[str, Any]) -> None:
    """Gives up root, all capabilities, new privileges and the filtered system calls, for good.

    Args:
        user: User and group id to become, or ``None`` to keep the present one.
        limits: ``processes`` above 1 and ``file_bytes`` above 0 open the filter for these.
    """
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
    for capability in range(64):
        with contextlib.suppress(OSError):  # beyond the last capability, or not ours to drop
            _prctl(_PR_CAPBSET_DROP, capability)
    if user is not None:
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(allow_processes=limits["processes"] > 1, allow_files=limits["file_bytes"] > 0)


def run_as_process_one(main: Callable[[], NoReturn], *, keep_open: int) -> NoReturn:
    """Forks ``main`` and ends with it, which ends the namespace; also ends when the driver does.

    Args:
        main: The worker; never returns.
        keep_open: Read end of a pipe that closes when the driver is gone; unused by the worker.
    """
    hide_memory()
    worker = os.fork()
    if worker == 0:
        os.close(keep_open)
        main()
    os.set_blocking(keep_open, False)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            # The exit code is passed on so that the driver can say which limit was hit.
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            try:
                if os.read(keep_open, 1) == b"":
                    os._exit(0)
            except BlockingIOError:
                time.sleep(0.002)


def descendants(root: int) -> list[int]:
    """Process ids below ``root`` according to ``/proc`` (empty where there is no ``/proc``)."""
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                after_name = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants(*, rounds: int = 200) -> None:
    """Kills and reaps everything below the caller, which must be a reaper of orphans.

    Processes are stopped before they are killed, so that one that forks faster than we look
    cannot stay ahead.
    """
    me = os.getpid()
    for _ in range(rounds):
        living = descendants(me)
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for pid in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not living:
            return
        time.sleep(0.005)
