"""``lit-dlm export`` and ``merge``: folders that transformers, peft and the hub accept."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from huggingface_hub import EvalResult, ModelCardData

from lit_dlm.backbones.export import ExportLayout, export_model, own_layout, save_adapter
from lit_dlm.backbones.hf import HFBackbone, load_backbone
from lit_dlm.backbones.loading import DType
from lit_dlm.backbones.location import is_local, locate, unpinned
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.summary import MethodSummary, markdown_tables, summarise_run
from lit_dlm.system.files import read_json_object, write_atomically, write_json
from lit_dlm.system.options import one_of, refuse
from lit_dlm.training.checkpoint import copy_tokenizer
from lit_dlm.vision.base import VisionSettings

logger = logging.getLogger(__name__)

_WRITTEN_BY = "Written by lit-dlm"
_DECIDING = ("weights_sha256", "adapter_sha256", "config_sha256", "load_in_4bit", "spec_overrides")
"""What of a backbone's description decides its results."""
_CARD = f"""---
{{data}}
---

# {{name}}

{{what}}. {_WRITTEN_BY} {{version}}.

A masked diffusion language model: it fills a row of masks (id {{mask_id}}) in any order, several
tokens a step. Generate with

```
lit-dlm generate "..." {{options}} {{name}}
```

{{measured}}"""


def main(arguments: Sequence[str], command: str = "export") -> int:
    """Runs ``lit-dlm export``, or ``merge`` if that is the ``command``."""
    purposes = {
        "export": "Writes a model as a folder: configuration, weights, tokenizer, card.",
        "merge": "Adds a low-rank adapter to the weights and writes the model.",
    }
    parser = argparse.ArgumentParser(prog=f"lit-dlm {command}", description=purposes[command])
    parser.add_argument("model", help="embedded name, folder or hub id")
    parser.add_argument("folder", type=Path, help="receives the files")
    parser.add_argument(
        "--adapter",
        required=command == "merge",
        help="low-rank adapter in PEFT layout, folder or hub id",
    )
    if command == "export":
        parser.add_argument(
            "--only_adapter", action="store_true", help="write the adapter alone, for peft"
        )
    parser.add_argument(
        "--layout",
        choices=get_args(ExportLayout),
        help="original: names and configuration of the family's own code, the default where there "
        "is one; hf: a plain decoder of transformers",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(DType),
        help="of the weights; that of the model's files by default",
    )
    parser.add_argument(
        "--results", type=Path, help="run folder of a benchmark of this model, for the card"
    )
    parser.add_argument(
        "--force", action="store_true", help="write into a folder that holds other files"
    )
    parser.set_defaults(only_adapter=False)
    options = parser.parse_args(arguments)
    if options.only_adapter and not options.adapter:
        parser.error("--only_adapter: expected an --adapter to write")
    if not options.force:
        other = "config.json" if options.only_adapter else "adapter_config.json"
        _require_own(options.folder, other=other)
    # The dtype of an export is that of the files unless one is asked for: float32 would double
    # them.
    stored = read_json_object(path := locate(options.model, weights=False) / "config.json")
    dtype: Any = options.dtype or stored.get("dtype") or stored.get("torch_dtype") or "float32"
    one_of(*get_args(DType), of=f"{path}: ", dtype=dtype)
    # Without its tower a model with vision would lose the tower's weights in the export.
    sees = "siglip" in str(stored.get("mm_vision_tower"))
    backbone = load_backbone(
        options.model,
        dtype=dtype,
        adapter=options.adapter,
        vision=VisionSettings() if sees else None,
    )
    folder: Path = options.folder
    layout = options.layout or own_layout(backbone)
    summaries = _measured(options.results, backbone) if options.results else []
    if options.only_adapter:
        save_adapter(backbone, folder, layout=layout)
    else:
        export_model(backbone, folder, layout=layout)
        copy_tokenizer(options.model, folder)
        write_json(folder / "generation_config.json", _generation_config(backbone))
    write_atomically(folder / "README.md", _card(options, backbone, summaries))
    logger.info("%s: %s", folder, ", ".join(sorted(path.name for path in folder.iterdir())))
    return 0


merge = partial(main, command="merge")


def _require_own(folder: Path, *, other: str) -> None:
    """Refuses a folder with files unless its card says that lit-dlm wrote it, or with ``other``."""
    card = folder / "README.md"
    is_own = card.is_file() and _WRITTEN_BY in card.read_text(errors="replace")
    # A model beside an adapter would be loaded with it.
    is_own = is_own and not (folder / other).exists()
    if not is_own and folder.exists() and any(folder.iterdir()):
        wanted = "a new one or one that 'lit-dlm export' wrote"
        refuse("folder", wanted, f"{folder} with other files", "; --force writes among them")


def _measured(run: Path, backbone: HFBackbone) -> list[MethodSummary]:
    results, ours = ResultFolder(run / "results"), backbone.describe()
    for task, method in results.pairs():
        theirs = results.settings(task, method)["backbone"]
        # A card must not show another model's numbers; what only changes speed may differ.
        for key in _DECIDING:
            if theirs.get(key) != ours.get(key):
                raise ValueError(f"results: {task}, {method} in {run} has another {key}")
    return summarise_run(run)


def _generation_config(backbone: HFBackbone) -> dict[str, Any]:
    spec = backbone.spec
    ids = {"bos_token_id": spec.bos_id, "pad_token_id": spec.pad_id, "mask_token_id": spec.mask_id}
    # One end is a number, as releases write it.
    eos = list(spec.eos_ids) if len(spec.eos_ids) > 1 else spec.eos_ids[0]
    return {"eos_token_id": eos, **{key: value for key, value in ids.items() if value is not None}}


def _card(
    options: argparse.Namespace, backbone: HFBackbone, summaries: Sequence[MethodSummary]
) -> str:
    name, what, where = options.folder.resolve().name, f"`{options.model}`", "--backbone"
    if options.adapter:
        verb = "An adapter for" if options.only_adapter else "An adapter merged into"
        what = f"{verb} {what} (`{options.adapter}`)"
    if options.only_adapter:
        where = f"--backbone {options.model} --adapter"
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=one.task,
            dataset_name=one.task,
            metric_type="accuracy",
            metric_name=f"accuracy, {one.method}, {one.nfe:.1f} steps",
            metric_value=round(100.0 * one.accuracy, 2),
        )
        for one in summaries
        if one.accuracy is not None
    ]
    data = ModelCardData(
        base_model=None if is_local(options.model) else unpinned(options.model),
        library_name="peft" if options.only_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["masked-diffusion", "lit-dlm", backbone.spec.family],
        model_name=name,
        eval_results=results or None,
    )
    tables = markdown_tables(summaries)
    return _CARD.format(
        data=data.to_yaml().strip(),
        name=name,
        what=what,
        version=version("lit-dlm"),
        mask_id=backbone.spec.mask_id,
        options=where,
        measured=f"Measured by `lit-dlm predict`:\n\n{tables}" if tables else "Not measured.\n",
    )
