"""Faults through the command line: what a run loses, doubles or changes when something goes wrong.

Every case is a run in its own processes that meets one fault at a seeded moment. If the fault ends
the run, the same command is run again without the fault. The outputs are compared with those of an
undisturbed run, sample by sample and weight by weight::

    python experiments/faults.py --times 3 --out runs/faults

The jobs are small: recording 24 problems (generate), training TraceLock on them (fit), a benchmark
of 24 problems with a judge, and three RL steps of 12 responses each with a value model, unit tests
and a judge. Cases that are already in ``--out`` are not run again. ``--times 1 --only fit:SIGKILL``
runs a single case.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file

import lit_dlm.commands.trainer  # noqa: F401 - once, before the runs are forked
from lit_dlm import cli
from lit_dlm.grading import Verdict
from lit_dlm.reports.plots import read_points
from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import PromptExample
from lit_dlm.toy import PythonFunctions
from lit_dlm.trajectories.store import TrajectoryShardReader

ROOT = Path(__file__).resolve().parents[1]
ONE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false"]
TASKS = (
    "[{class_path: WordProblems, init_args: {split: %s, num_examples: 16}}, {class_path: "
    + __name__
    + ".Functions, init_args: {split: %s, num_examples: 8, allow_code_execution: true}}]"
)
ENDPOINT = "url: URL, model: judge, timeout_s: 2.0, deadline_s: 4.0"
PATIENCE_S = 60.0
"""A run counts as hung when it takes this many seconds more than ten times its usual time."""


# -- jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A command, the files that it needs from other jobs, and what it leaves."""

    command: list[str]
    left: Callable[[Path], list[tuple[str, str]]]
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)


def traces_left(folder: Path) -> list[tuple[str, str]]:
    """Returns the uids of records and digests of their contents."""
    return [
        (one.uid, f"{one.digest().hex()} {one.meta.get('correct')} {one.meta.get('reward')}")
        for name in ("traces", "trajectories", "rollouts")
        if (folder / name).is_dir()
        for one in TrajectoryShardReader(folder / name)
    ]


def weights_left(folder: Path) -> list[tuple[str, str]]:
    """Returns the names of weights and their digests."""
    return [
        (f"{path.relative_to(folder)}/{name}", hashlib.sha256(value.numpy().tobytes()).hexdigest())
        for path in sorted((folder / "policy").glob("**/*.safetensors"))
        for name, value in load_file(path).items()
    ]


def benchmark_left(folder: Path) -> list[tuple[str, str]]:
    """Returns results, their trajectories and the judge's verdicts."""
    results = ResultFolder(folder / "results")
    lines = [
        (f"{path.relative_to(folder)}/{json.loads(line)['uid']}", line)
        for path in sorted((folder / "judge").glob("*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    rows = [
        (f"{row.uid}@{row.method}", f"{row.completion} {row.verdict} {row.detail} {row.nfe}")
        for pair in results.pairs()
        for row in results.rows(*pair)
    ]
    return [*rows, *lines, *[(f"record {uid}", digest) for uid, digest in traces_left(folder)]]


def rl_left(folder: Path) -> list[tuple[str, str]]:
    """Returns rollouts, weights (best and last), the points of the reward curve and the scores."""
    points = [
        (f"{point['step']} {name}", repr(value))
        for point in read_points(folder / "reward_curve.jsonl")
        for name, value in point.items()
        if not name.startswith("time/")
    ]
    scores = ("scores", (folder / "policy" / "scores.json").read_text())
    return [*traces_left(folder), *weights_left(folder), *points, scores]


JOBS = {
    "generate": Job(
        [
            "predict", "--config=exp/generate_tiny", *ONE,
            f"--data.init_args.tasks={TASKS % ('train', 'train')}", "--data.init_args.batch_size=4",
            "--data.init_args.assignment=each", "--model.init_args.projector_prompts=8",
            "--model.init_args.decoders={entropy: {policy: EntropyPolicy}}",
            "--model.init_args.hidden_rank=8", "--model.init_args.delta_rank=4",
            "--trainer.callbacks.init_args.grade=true",
            "--trainer.callbacks.init_args.records_per_block=1",
        ],
        traces_left,
    ),
    "fit": Job(
        [
            "fit", "--config=exp/tracelock_tiny", *ONE, "--trainer.max_steps=60",
            "--trainer.val_check_interval=10", "--data.init_args.batch_size=8",
            "--data.init_args.val_fraction=0.3", "--data.init_args.num_workers=2",
            "--ckpt_path=last",
        ],
        weights_left,
        {"generate": ("traces", "projector")},
    ),
    "benchmark": Job(
        [
            "predict", "--config=exp/benchmark_tiny", *ONE,
            f"--data.init_args.tasks={TASKS % ('test', 'test')}", "--data.init_args.batch_size=4",
            "--data.init_args.methods=[entropy, threshold_09]",
            "--trainer.callbacks+={class_path: HttpJudge, init_args: {run_dir: FOLDER, "
            "tasks: [word_problems], " + ENDPOINT + "}}",
        ],
        benchmark_left,
        {"fit": ("policy",)},
    ),
    "rl": Job(
        [
            "fit", "--config=exp/tracerl_tiny", "--config=method/value_tiny", *ONE,
            "--trainer.max_epochs=3",
            "--trainer.check_val_every_n_epoch=1", "--data.filters=null",
            "--data.prompts_per_step=3", "--data.responses_per_prompt=4",
            f"--data.tasks={TASKS % ('train', 'train')}",
            "--data.val_tasks=[{class_path: WordProblems, init_args: {num_examples: 6}}]",
            "--data.rewards=[Graded, {class_path: ProcessReward, init_args: {reward_chunk_length: "
            "8, k_sample: 1, judge: {class_path: HttpStepJudge, init_args: {" + ENDPOINT + "}}}}]",
            "--ckpt_path=last",
        ],
        rl_left,
    ),
}  # fmt: skip


class Functions(PythonFunctions):
    """Problems whose grader may meet programs that request more memory than they get."""

    moment = -1.0
    """When these programs begin to appear, on the monotonic clock; negative for never."""
    marker = Path()

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Grades the model's program, after one that hoards memory if the moment has come."""
        if 0.0 <= self.moment < time.monotonic():
            hoard = "\nhoard = [bytearray(1 << 26) for _ in range(4096)]\n"
            verdict = super().grade(example, completion + hoard)
            if verdict.is_correct or "MemoryError" not in verdict.detail:
                raise AssertionError(f"{example.uid}: graded {verdict}")
            self.marker.touch()
        return super().grade(example, completion)


# -- faults ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """One run that meets a fault."""

    job: str
    folder: Path
    rng: random.Random
    seconds: float
    """Duration of the undisturbed job."""
    batches: int
    """Number of batches of the job."""
    marker: Path
    """Exists once a fault that need not end the run has struck."""

    def moment(self) -> float:
        """Draws the moment of the fault, on the monotonic clock."""
        return time.monotonic() + self.rng.uniform(0.0, self.seconds)


class Poison(Callback):
    """Counts batches, and makes a weight (``what`` is ``weights``) or the loss NaN from one on.

    The file ``marker`` holds the count, or marks that the fault has struck.
    """

    def __init__(
        self, marker: str, *, what: str | None = None, batch: int = -1, seed: int = 0
    ) -> None:
        self.marker, self.what, self.batch, self.seed = Path(marker), what, batch, seed
        self.count = 0

    def on_predict_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.on_train_batch_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.count == self.batch:
            self.marker.touch()
            if self.what == "weights":
                rng = random.Random(self.seed)
                weight = rng.choice(list(pl_module.parameters()))
                with torch.no_grad():
                    weight.view(-1)[rng.randrange(weight.numel())] = torch.nan
            else:
                module: Any = pl_module
                step = module.training_step
                module.training_step = lambda *args: step(*args) * torch.nan
        self.count += 1
        if self.what is None:
            self.marker.write_text(str(self.count))


def poison(case: Case, what: str | None) -> list[str]:
    """Returns the option that adds :class:`Poison` to a run."""
    init = {"marker": str(case.marker), "what": what, "seed": case.rng.randrange(2**32)}
    init["batch"] = case.rng.randrange(case.batches) if case.batches else -1
    callback = {"class_path": f"{__name__}.Poison", "init_args": init}
    return [f"--trainer.callbacks+={json.dumps(callback)}"]


def limit_files(case: Case) -> list[str]:
    """Limits the size of every file that the run writes."""
    limit = round(10 ** case.rng.uniform(2, 5.5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return []


def turn_clock_back(case: Case) -> list[str]:
    """Runs the clock an hour ahead, then sets it right; earlier files stay dated an hour ahead."""
    is_right, moment, now = threading.Event(), case.moment(), time.time
    ahead = 3600.0
    time.time = lambda: now() + (0.0 if is_right.is_set() else ahead)

    def put_right() -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
        for path in case.folder.glob("**/*"):
            with suppress(FileNotFoundError):
                seen = path.stat().st_mtime + ahead
                os.utime(path, (seen, seen))
        is_right.set()
        case.marker.touch()

    threading.Thread(target=put_right, daemon=True).start()
    return []


def hoard(case: Case) -> list[str]:
    """From some moment on, lets candidate programs request more memory than they get."""
    Functions.moment = time.monotonic() + case.rng.uniform(0.0, case.seconds / 2)
    Functions.marker = case.marker
    return []


Outside = Callable[[Case, int], bool]


def send(number: signal.Signals) -> Outside:
    """Returns a fault that sends the run a signal."""

    def outside(case: Case, process: int) -> bool:
        os.kill(process, number)
        return True

    return outside


def kill_child(case: Case, process: int) -> bool:
    """Kills a process that the run has started, as a machine out of memory would."""
    children = list(descendants(process))
    if children:
        with suppress(ProcessLookupError):
            os.kill(case.rng.choice(children), signal.SIGKILL)
            case.marker.touch()
            return True
    return False


def descendants(process: int) -> Iterator[int]:
    """Yields the ids of all descendants of a process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                yield child
                yield from descendants(child)


MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts, binds or moves a file system."""
    words = [None if one is None else str(one).encode() for one in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


def own_disk(folder: Path) -> None:
    """Gives this process and its children a disk in memory that no other process sees."""
    if LIBC.unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    mount("faults", folder, "tmpfs", 0, "size=1g")


def fill_disk(case: Case, process: int) -> bool:
    """Leaves only a little free space on the disk."""
    disk = os.statvfs(case.folder)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    size = used + round(10 ** case.rng.uniform(2, 5))
    with suppress(OSError):  # more has been written meanwhile
        mount("faults", case.folder, "tmpfs", MS_REMOUNT, f"size={max(size, 4096)}")
        return True
    return False


def protect_disk(case: Case, process: int) -> bool:
    """Makes the folder read-only; files that are already open stay writable.

    A disk with open files cannot be remounted, so a second, read-only view is mounted over it.
    """
    view = case.folder.with_name("view")
    view.mkdir(exist_ok=True)
    mount(str(case.folder), view, None, MS_BIND)
    mount("none", view, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    mount(str(view), case.folder, None, MS_MOVE)
    return True


def mend_disk(case: Case) -> None:
    """Undoes ``fill_disk`` and ``protect_disk``."""
    if os.statvfs(case.folder).f_flag & os.ST_RDONLY:
        LIBC.umount2(str(case.folder).encode(), 2)  # MNT_DETACH
    mount("faults", case.folder, "tmpfs", MS_REMOUNT, "size=1g")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, inside the run or from outside, and in which jobs."""

    inside: Callable[[Case], list[str]] = lambda _: []
    outside: Outside | None = None
    jobs: tuple[str, ...] = tuple(JOBS)
    elsewhere: str = ""
    """Why the other jobs are left out."""
    disk: bool = False
    """Whether it needs a disk of its own."""
    judge: str = ""
    """How the judge fails from some question on: ``silent`` never replies, ``slowly`` replies
    without an end; with ``once``, it fails at that question alone."""


GRADED: dict[str, Any] = {
    "jobs": ("generate", "benchmark", "rl"),
    "elsewhere": "it grades nothing",
}
TRAINED: dict[str, Any] = {"jobs": ("fit", "rl"), "elsewhere": "they have no loss"}
JUDGED: dict[str, Any] = {"jobs": ("benchmark", "rl"), "elsewhere": "they ask no judge"}
FAULTS = {
    "SIGKILL": Fault(outside=send(signal.SIGKILL)),
    "SIGTERM": Fault(outside=send(signal.SIGTERM)),
    "SIGINT": Fault(outside=send(signal.SIGINT)),
    "full disk": Fault(outside=fill_disk, disk=True),
    "file limit": Fault(inside=limit_files),
    "read-only disk": Fault(outside=protect_disk, disk=True),
    "clock set back": Fault(inside=turn_clock_back),
    "NaN in weights": Fault(inside=lambda case: poison(case, "weights")),
    "NaN in loss": Fault(inside=lambda case: poison(case, "loss"), **TRAINED),
    "loader worker killed": Fault(
        outside=kill_child,
        jobs=("fit",),
        elsewhere="they load in the process itself",
    ),
    "grader killed": Fault(outside=kill_child, **GRADED),
    "candidate out of memory": Fault(inside=hoard, **GRADED),
    "judge silent": Fault(judge="silent", **JUDGED),
    "judge without end": Fault(judge="slowly", **JUDGED),
    "judge silent once": Fault(judge="silent once", **JUDGED),
}


# -- the processes of a case -----------------------------------------------------------------------


@contextmanager
def judge(case: Case | None = None, how: str = "") -> Iterator[str]:
    """Runs a judge whose replies depend only on the question, and yields its address."""
    asked, since = Counter[str](), -1
    if case is not None and how:
        # A benchmark has 16 answers of each of two methods to judge; RL has some fifty per step.
        since = case.rng.randrange({"benchmark": 32, "rl": 100}[case.job])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked["times"] += 1
            number = asked["times"] - 1
            is_struck = number == since if how.endswith("once") else 0 <= since <= number
            if is_struck and case is not None:
                case.marker.touch()
            if is_struck and how.startswith("silent"):
                time.sleep(3600)
            system, user = (one["content"] for one in body["messages"])
            good = hashlib.sha256(user.encode()).digest()[0] % 3 > 0
            word = '{"verdict": "correct"}' if good else '{"verdict": "incorrect"}'
            text = word if "verdict" in system else f"\\boxed{{{1 if good else -1}}}"
            self.send_response(200)
            self.end_headers()
            if is_struck:
                with suppress(OSError):
                    while True:
                        self.wfile.write(b" ")
                        time.sleep(0.1)
            reply = {"choices": [{"message": {"content": text}}]}
            with suppress(OSError):
                self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    process = os.fork()
    if not process:
        server.serve_forever()
    server.server_close()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def run(case: Case, log: Path, name: str | None = None) -> tuple[int | None, bool]:
    """Runs a job in its own process, with or without a fault.

    Returns the exit status, ``None`` if it hung, and whether the log has a traceback.
    """
    fault = FAULTS[name] if name else Fault()
    begin = log.stat().st_size if log.exists() else 0
    with judge(case, fault.judge) as url:
        moment = case.moment() if fault.outside else float("inf")
        process = os.fork()
        if not process:
            in_job(case, log, url, fault)
        deadline = time.monotonic() + PATIENCE_S + 10 * case.seconds
        while not (found := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            if fault.outside and time.monotonic() > moment and fault.outside(case, process):
                moment = float("inf")
            time.sleep(0.002)
    status = os.waitstatus_to_exitcode(found[1]) if found[0] else None
    # Only at the start of a line: if a killed worker interrupts an import of torch's, torch itself
    # logs a traceback with a prefix. If it dies while it asks for memory, Python's own thread that
    # shares memory shows one.
    text = b"\n" + log.read_bytes()[begin:]
    traces = text.split(b"\nTraceback (most recent call last):\n")[1:]
    return status, not all(b"resource_sharer.py" in one.partition(b"\n")[0] for one in traces)


def in_job(case: Case, log: Path, url: str, fault: Fault) -> None:
    """Runs a job in this process and ends it; does not return."""
    status = 70
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        command = [
            word.replace("URL", url).replace("FOLDER", str(case.folder))
            for word in JOBS[case.job].command
        ]
        cli.main([*command, f"--run_dir={case.folder}", *fault.inside(case)])
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # shown, since the process ends here
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def struck(case: Case, name: str, base: Path, log: Path) -> dict[str, Any]:
    """Runs a job into a fault and then to its end, and compares its outputs."""
    case.folder.mkdir(parents=True)
    fault = FAULTS[name]
    if fault.disk:
        own_disk(case.folder)
    prepare(case.job, base, case.folder)
    status, is_unclear = run(case, log, name)
    facts: dict[str, Any] = {"status": status, "unclear": is_unclear or status is None}
    facts["hit"] = status != 0 or case.marker.exists()
    if fault.disk:
        mend_disk(case)
    again = status
    if facts["hit"] and status != 0:
        again, is_unclear = run(case, log)
        facts["unclear"] |= is_unclear or again is None
    facts["again"] = again
    if again == 0:
        found, wanted = (JOBS[case.job].left(one) for one in (case.folder, base / case.job))
        ours, theirs = Counter(key for key, _ in found), Counter(key for key, _ in wanted)
        facts["lost"] = (theirs - ours).total()
        facts["doubled"] = (ours - theirs).total()
        facts["changed"] = len({key for key, _ in set(found) - set(wanted)} & theirs.keys())
        facts["differ"] = sorted({key for key, _ in set(found) ^ set(wanted)})[:10]
    facts["survived"] = again == 0 and not (facts["lost"] or facts["doubled"] or facts["changed"])
    return facts


def prepare(job: str, base: Path, folder: Path) -> None:
    """Copies what a job needs from other jobs into its run folder."""
    for other, names in JOBS[job].needs.items():
        for name in names:
            shutil.copytree(base / other / name, folder / name)


def in_process(function: Callable[[], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Runs a function in its own process and returns its result."""
    process = os.fork()
    if not process:
        try:
            path.write_text(json.dumps(function()))
        except PermissionError as error:
            path.write_text(json.dumps({"skipped": str(error)}))
        except BaseException:  # shown, since the process ends here
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    facts: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return facts


# -- the table -------------------------------------------------------------------------------------


def undisturbed(job: str, out: Path) -> tuple[float, int]:
    """Returns the seconds and batches of a job without a fault, which is run only once."""
    facts, base = out / f"{job}.json", out / "base"
    if not facts.exists():
        shutil.rmtree(base / job, ignore_errors=True)
        (base / job).mkdir(parents=True)
        for other in JOBS[job].needs:
            undisturbed(other, out)
        prepare(job, base, base / job)
        count, log, began = out / "count", out / f"{job}.log", time.monotonic()
        case = Case(job, base / job, random.Random(0), 600.0, 0, count)
        FAULTS["none"] = Fault(inside=lambda case: poison(case, None))
        status, _ = run(case, log, "none")
        if status != 0:
            raise SystemExit(f"{job}: the undisturbed run failed; see {log}")
        facts.write_text(json.dumps([time.monotonic() - began, int(count.read_text())]))
        count.unlink()
    seconds, batches = json.loads(facts.read_text())
    return seconds, batches


def measured(out: Path, times: int, seed: int, only: list[str]) -> list[dict[str, Any]]:
    """Returns all cases, each fault equally often in each job; runs those not yet in the folder."""
    path = out / "cases.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wanted = [
        (name, job)
        for name, fault in FAULTS.items()
        for job in fault.jobs
        if not only or f"{job}:{name}" in only
    ]
    for turn in range(times):
        for name, job in wanted:
            of_it = [one for one in cases if (one["fault"], one["job"]) == (name, job)]
            number = len(of_it)
            while sum(one["hit"] for one in of_it) <= turn and number <= 4 * times:
                seconds, batches = undisturbed(job, out)
                folder, log = out / "case" / "run", out / f"{job}-{name}-{number}.log"
                shutil.rmtree(out / "case", ignore_errors=True)
                rng = random.Random(f"{seed} {name} {job} {number}")
                case = Case(job, folder, rng, seconds, batches, out / "case" / "marker")
                facts = in_process(partial(struck, case, name, out / "base", log), out / "facts")
                if "skipped" in facts:
                    sys.stdout.write(f"{name}: skipped, {facts['skipped']}\n")
                    break
                cases.append({"fault": name, "job": job, "number": number, **facts})
                of_it.append(cases[-1])
                number += 1
                with path.open("a") as file:
                    file.write(json.dumps(cases[-1]) + "\n")
                sys.stdout.write(json.dumps(cases[-1]) + "\n")
                sys.stdout.flush()
                if facts["survived"] and not facts["unclear"]:
                    log.unlink()
    return cases


WRONG = ("lost", "doubled", "changed", "unclear")


def table(cases: list[dict[str, Any]]) -> str:
    """Returns the table of docs/results/faults: the cases that survived, and what others did."""
    lines = [f"| fault | {' | '.join(JOBS)} |", "|---|" + "---:|" * len(JOBS)]
    hits = [case for case in cases if case["hit"]]
    for name in FAULTS:
        of_it = {job: [c for c in hits if (c["fault"], c["job"]) == (name, job)] for job in JOBS}
        if any(of_it.values()):
            lines.append(f"| {name} | {' | '.join(map(_outcome, of_it.values()))} |")
    each = Counter(case["job"] for case in hits)
    total = f"Run so far: {each.total()} ({', '.join(f'{job} {each[job]}' for job in JOBS)})."
    left_out: dict[str, list[str]] = {}
    for name, fault in FAULTS.items():
        if fault.elsewhere:
            where = ", ".join(job for job in JOBS if job not in fault.jobs)
            left_out.setdefault(f"not in {where}: {fault.elsewhere}.", []).append(name)
    rest = [f"- {', '.join(names)}: {why}" for why, names in left_out.items()]
    return "\n".join([*lines, "", total, "", *rest]) + "\n"


def _outcome(cases: list[dict[str, Any]]) -> str:
    """How many cases survived, of how many, and the sums of what went wrong."""
    wrong = {key: sum(case.get(key, 0) for case in cases) for key in WRONG}
    found = [f"{count} {key}" for key, count in wrong.items() if count]
    survived = sum(case["survived"] for case in cases)
    return ", ".join([f"{survived} of {len(cases)}", *found]) if cases else ""


def main() -> None:
    """Runs the cases and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="how often each fault in each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="job:fault, such as fit:SIGKILL")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--page", type=Path, help="file whose table is replaced")
    options = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & switches it off
    options.out.mkdir(parents=True, exist_ok=True)
    cases = measured(options.out.resolve(), options.times, options.seed, options.only)
    text = table(cases)
    (options.out / "table.md").write_text(text)
    if options.page is not None:
        before, mark, after = options.page.read_text().partition("<!-- faults -->\n")
        _, end, after = after.partition("<!-- end of faults -->")
        options.page.write_text(before + mark + text + end + after)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
