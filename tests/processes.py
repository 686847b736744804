"""Some communicating processes inside a test, forked so that nothing is imported twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the hostile set runs under interpreters without torch
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
"""Forks of a process that has imported everything and has no threads, so that none can hang."""
FORKS.set_forkserver_preload(
    [
        *("lit_dlm.commands.trainer", "lit_dlm.datamodules", "lit_dlm.rl", "lit_dlm.toy"),
        *("tests.e2e.runs", "torch._dynamo"),
    ]
)


def fork(folder: Path, function: Callable[..., Any], *args: object) -> BaseProcess:
    """Starts a function in a process group of its own; what it writes: ``out`` and ``err``."""
    folder.mkdir(exist_ok=True)
    process = FORKS.Process(target=_forked, args=(folder, function, args))
    with contextlib.chdir(ROOT):
        process.start()
    return process


def _forked(folder: Path, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    import torch

    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody forked
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    function(*args)


def in_two_processes(
    function: Callable[..., Any], *args: object, seconds: float = 600
) -> list[Any]:
    """:func:`in_processes` with two of them."""
    return in_processes(2, function, *args, seconds=seconds)


def in_processes(
    count: int, function: Callable[..., Any], *args: object, seconds: float = 600
) -> list[Any]:
    """Runs ``function(rank, *args)`` in some processes that Lightning takes for torchrun's.

    Returns:
        What every rank returned (pickled on the way).

    Raises:
        AssertionError: one of them failed or took too long; with its traceback.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    links, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, function, rank, count, port, args))
        process.start()
        theirs.close()
        links.append(ours)
        processes.append(process)
    try:
        results = []
        for link in links:
            assert link.poll(seconds), f"no answer within {seconds} s"
            text, value = link.recv()
            assert not text, text
            results.append(value)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    """A port that nobody gets by chance before it is used: the system gives those from 32768 on."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _child(
    link: Connection,
    function: Callable[..., Any],
    rank: int,
    count: int,
    port: int,
    args: tuple[object, ...],
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    from lightning.pytorch.utilities import rank_zero_only  # hostile.py does without Lightning

    rank_zero_only.rank = rank  # it read the environment when it was imported
    try:
        link.send(("", function(rank, *args)))
    except BaseException:
        link.send((f"rank {rank}:\n{traceback.format_exc()}", None))


@contextlib.contextmanager
def no_sandbox_left() -> Iterator[None]:
    """Fails if a process of a sandbox outlives the block."""
    before = set(_sandbox_processes())
    yield
    deadline = time.monotonic() + 60
    while (left := set(_sandbox_processes()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _sandbox_processes() -> Iterator[int]:
    # Other test processes use sandboxes, too; the settings of ours name us.
    ours = f'"parent": {os.getpid()},'.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if ours in (entry / "cmdline").read_bytes():
                    yield int(entry.name)


def own_megabytes() -> float:
    """Memory of this process that it shares with no file."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def mapping_of(tensor: Tensor) -> tuple[Path, int]:
    """The file whose mapping holds a tensor's data, and the bytes there that were written to."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for number, line in enumerate(lines):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +(\S.*)", line):
            start, end, path = found.groups()
            if int(start, 16) <= tensor.data_ptr() < int(end, 16):
                written = next(text for text in lines[number:] if text.startswith("Anonymous:"))
                return Path(path), int(written.split()[1]) * 1024
    raise AssertionError("the tensor lies in no file's mapping")
