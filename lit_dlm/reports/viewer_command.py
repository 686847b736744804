"""``lit-dlm view``: decodes as a page for the browser, or as pictures."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_dlm.reports.pieces import TokenPieces, tokenizer_of
from lit_dlm.reports.samples import load_samples
from lit_dlm.reports.viewer import ViewedSet, write_viewer
from lit_dlm.system.options import at_least
from lit_dlm.system.terminal import printable
from lit_dlm.trajectories.store.provenance import run_of_shard

logger = logging.getLogger(__name__)

KINDS = ("gif", "fill_order", "order", "statistics")
MAX_TOGETHER = 3  # maximum number of decodes in one animation

_OPTIONS: dict[str, dict[str, Any]] = {
    "--out": {"type": Path, "metavar": "PAGE", "help": "the page to write, or its folder "
              "(default: traces.html beside what is shown)"},
    "--compare": {"type": Path, "metavar": "OTHER", "help": "another shard or run; its decodes of "
                  "the same prompts stand beside"},
    "--limit": {"type": int, "default": 1000, "help": "most samples of each source, 0 for all "
                "(default: 1000)"},
    "--sample": {"nargs": "+", "default": [], "metavar": "UID", "help": "only these: uids of "
                 "decodes, or of prompts for all decodes of them"},
    "--method": {"nargs": "+", "default": [], "help": "only these decoding methods"},
    "--tokenizer": {"help": "embedded name, folder or hub id (default: that of the run; 'none' "
                    "shows token ids, as does a run that has none)"},
}  # fmt: skip
_PICTURES: dict[str, dict[str, Any]] = {
    "--gif": {"help": "animation of the decode"},
    "--heatmap": {"dest": "fill_order", "help": "fill order: position by step"},
    "--order": {"help": "commit step against position, Kendall's tau"},
    "--statistics": {"help": "commits per step, fill of the regions, confidences"},
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name; returns the exit status."""
    command = argparse.ArgumentParser(
        prog="lit-dlm view",
        description="Writes one HTML file that shows decodes step by step. It holds everything and "
        "needs no network. With --gif, --heatmap, --order or --statistics it writes pictures of "
        "one decode instead (and the page too, if --out is given).",
    )
    command.add_argument(
        "source",
        type=Path,
        metavar="SHARD_OR_RESULTS",
        help="a shard, a folder of shards, or a run folder whose results name their trajectories",
    )
    for flag, settings in _OPTIONS.items():
        command.add_argument(flag, **settings)
    drawn = command.add_argument_group(
        "pictures of the first prompt that fits",
        "its first decode; with --method, the animation shows these methods below each other",
    )
    for flag, settings in _PICTURES.items():
        drawn.add_argument(flag, type=Path, **settings)
    drawn.add_argument("--theme", choices=("light", "dark"), default="light")
    options = command.parse_args(arguments)
    at_least(0, of="--", limit=options.limit)
    limit, methods = options.limit or None, options.method
    sources = [load_samples(options.source, limit=limit, names=options.sample, methods=methods)]
    if options.compare is not None:
        # The limit has chosen the prompts already; another one here could leave some without pair.
        examples = {sample.example for sample in sources[0].samples}
        sources.append(load_samples(options.compare, methods=methods, examples=examples))
    sets = [ViewedSet(one, pieces_of(one.shards, options.tokenizer)) for one in sources]
    pictures = {kind: path for kind in KINDS if (path := getattr(options, kind)) is not None}
    if pictures:
        _write_pictures(sets[0], pictures, options)
    if options.out is not None or not pictures:
        path = _page_path(options)
        write_viewer(path, sets, title=f"Decodes of {sources[0].label}")
        counts = [f"{len(one.samples):,} of {one.num_available:,} samples" for one in sources]
        print(f"{path}: {', '.join(counts)}, {path.stat().st_size / 1e6:.1f} MB")  # noqa: T201
    return 0


def _page_path(options: argparse.Namespace) -> Path:
    path: Path = options.out or options.source
    if path != options.source and not path.is_dir():
        return path
    return (path if path.is_dir() else path.parent) / "traces.html"


def _write_pictures(viewed: ViewedSet, files: dict[str, Path], options: argparse.Namespace) -> None:
    # Imported here, as matplotlib and torchmetrics take seconds to import.
    from lit_dlm.reports.pictures import write_pictures

    shown, pieces = viewed
    first = shown.samples[0]
    requested = options.method or [first.method]
    decodes = [
        one for one in shown.samples if one.example == first.example and one.method in requested
    ]
    decodes = sorted(decodes, key=lambda sample: requested.index(sample.method))[:MAX_TOGETHER]
    method = shown.methods.get(decodes[0].method)
    write_pictures(decodes, pieces, files, method=method, theme=options.theme)
    for kind, path in files.items():
        names = decodes if kind == "gif" else decodes[:1]
        print(printable(f"{path}: {', '.join(one.record.uid for one in names)}"))  # noqa: T201


def pieces_of(shards: Sequence[Path], tokenizer: str | None) -> TokenPieces:
    """Texts of a set's tokens; ``tokenizer`` is ``"none"`` for ids, ``None`` for the run's own."""
    if (loaded := tokenizer_of(shards, tokenizer)) is None:
        return TokenPieces(None)
    run, vision = run_of_shard(shards[0])[0], None
    if (settings := run.model.get("vision")) is not None:
        from lit_dlm.backbones.resolution import resolve
        from lit_dlm.backbones.vision import token_vision
        from lit_dlm.vision.base import VisionSettings

        path = tokenizer or run.tokenizer["path"]
        if resolve(path).spec.text_vocab_size is not None:  # the model draws pictures
            # The picture tokenizer may be missing here, where the texts can still be read.
            try:
                vision = token_vision(path, VisionSettings(**settings))
            except ValueError as error:
                logger.warning("drawn pictures are shown as tokens: %s", error)
    return TokenPieces(loaded, vision)
