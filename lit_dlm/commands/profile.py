"""``lit-dlm profile``: ``lit-dlm predict`` with a grid of methods, and their speed and quality."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_dlm.commands import run
from lit_dlm.config.files import decoder_options, find, load
from lit_dlm.system.files import write_atomically

DEFAULT_STEPS: tuple[int | str, ...] = (5, 10, 20, 50)
CACHES = {"none": None, "prefix": "PrefixCache", "dual": "DualCache", "block": "BlockCache"}
ADAPTIVE = "adaptive"
"""In place of a number of steps: keeps the decode file's quota, so that a threshold decides."""


def grid(
    policies: Mapping[str, Path], steps: Sequence[int | str], caches: Sequence[str] = ()
) -> dict[str, Any]:
    """The part of a configuration that adds the methods of a grid and runs only them."""
    # Imported here, as torch takes seconds to import.
    from lit_dlm.decoding.decoder import method_name

    decoders: dict[str, Any] = {}
    sweeps: dict[str, Any] = {}
    methods: list[str] = []
    budgets = [value for value in steps if value != ADAPTIVE]
    for policy, path in policies.items():
        for cache in caches or [""]:
            name = policy if cache in ("", "none") else f"{policy}-{cache}"
            decoder = decode_arguments(path)
            # A cache of the grid replaces that of the decode file, also by none.
            if cache:
                decoder.pop("cache", None)
            if kind := CACHES.get(cache):
                decoder["cache"] = {"class_path": kind}
            if ADAPTIVE in steps:
                decoders[f"{name}_{ADAPTIVE}"] = decoder
                methods.append(f"{name}_{ADAPTIVE}")
            if budgets:
                # A budget is a sweep of one decoder, so all its values are one curve in the report.
                quota = {"class_path": "BudgetQuota", "init_args": {"steps": budgets[0]}}
                swept = {"option": "quota.steps", "values": budgets}
                sweeps[name] = {"decoder": {**decoder, "quota": quota}, **swept}
                methods += [method_name(name, value) for value in budgets]
    model = {"decoders": decoders, "sweep": sweeps}
    return {"model": {"init_args": model}, "data": {"init_args": {"methods": methods}}}


def policy_files(given: Sequence[str]) -> dict[str, Path]:
    """Decode files by method name: the file's name without suffix, or as in ``name=path``."""
    files: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        file = find(path if equals else text)
        name = name if equals else file.stem
        if name in files:
            raise ValueError(f"policies: {file} and {files[name]} are both named '{name}'")
        files[name] = file
    return files


def decode_arguments(path: Path) -> dict[str, Any]:
    """What a decode file sets, with the contents of files that it names."""
    content = decoder_options(load(str(path)))
    if "policy" not in content:
        raise ValueError(f"{path}: expected a decode file with a policy, got {content!r:.60}")
    return dict(content)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; options that it does not know go to ``lit-dlm predict``."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm profile",
        description="Speed and quality of policies, budgets of steps and caches on one task. "
        "Further options go to 'lit-dlm predict'.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        help="experiment with a DecodeModule, a task and a DecodeWriter; may be repeated",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[],
        metavar="[NAME=]FILE",
        help="decode files to cross with --steps and --caches (default: the methods of the config)",
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        type=_steps,
        default=list(DEFAULT_STEPS),
        help=f"budgets of forwards, or '{ADAPTIVE}' for the quota of the decode file "
        "(default: 5 10 20 50)",
    )
    parser.add_argument(
        "--caches", nargs="+", default=[], choices=list(CACHES), help="caches to cross with"
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/profile"), help="run folder")
    options, rest = parser.parse_known_args(list(arguments))
    run_dir: Path = options.run_dir
    files = list(options.config)
    if options.policies:
        methods = grid(policy_files(options.policies), options.steps, options.caches)
        path = run_dir / "grid.yaml"
        write_atomically(path, yaml.safe_dump(methods, sort_keys=False))
        files.append(str(path))
    elif options.caches or options.steps != list(DEFAULT_STEPS):
        parser.error("--steps and --caches apply to the files of --policies")
    configs = (f"--config={file}" for file in files)
    # The run itself, with its resuming, is `predict`: what is there already is not decoded again.
    if status := run.main(["predict", *configs, f"--run_dir={run_dir}", *rest]):
        return status
    # Imported after the run's names are known, as matplotlib and Lightning take seconds to import.
    from lightning.pytorch.utilities import rank_zero_only

    from lit_dlm.reports.profile import write_profile
    from lit_dlm.reports.summary import summarise_run

    # Processes that the trainer has started come here, too.
    if getattr(rank_zero_only, "rank", 0) == 0:  # set by the trainer
        write_profile(summarise_run(run_dir), run_dir)
        print(f"Profile: {run_dir / 'profile.md'}, profile.csv, profile.png")  # noqa: T201
    return 0


def _steps(text: str) -> int | str:
    if text == ADAPTIVE or (text.isdecimal() and int(text)):
        return text if text == ADAPTIVE else int(text)
    raise argparse.ArgumentTypeError(f"expected numbers of at least 1 or '{ADAPTIVE}', got {text}")
