"""``lit-dlm export``, ``merge`` and ``push``: folders that transformers, peft and the hub take."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lit_dlm.backbones.decoder import DType
from lit_dlm.backbones.hf import ExportLayout, HFBackbone, load_backbone
from lit_dlm.backbones.resolution import is_local, locate, read_json_object
from lit_dlm.heads.scorer import FORMAT, AcceptanceScorer
from lit_dlm.modules.checkpoint import copy_tokenizer
from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.results import ResultFolder, write_json
from lit_dlm.reports.summary import MethodSummary, markdown_tables, summarise_run
from lit_dlm.vision.base import VisionSettings

logger = logging.getLogger(__name__)

_CARD = """---
{data}
---

# {name}

{what}. Written by lit-dlm {version}.

A masked diffusion language model: it fills a row of masks (id {mask_id}) in any order, several
tokens a step. Generate with

```
lit-dlm generate "..." {options} {name}
```

{measured}"""

_POLICY_CARD = """---
{data}
---

# {name}

A commit policy (TraceLock, [arXiv 2605.24697](https://arxiv.org/abs/2605.24697)): it says at each
step of a masked diffusion language model which proposed tokens become final. It was trained for
{backbone}. Written by lit-dlm {version}. With this as `policy.yaml`

```yaml
policy: {{class_path: TraceLockPolicy, init_args: {{path: {hub_id}, threshold: 0.99}}}}
quota: NoQuota
```

generate with

```
lit-dlm generate "..." --backbone MODEL --config policy.yaml
```

Training: {training}.
"""


def main(arguments: Sequence[str], command: str = "export") -> int:
    """Runs ``lit-dlm export``."""
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
    parser.set_defaults(only_adapter=False)
    options = parser.parse_args(arguments)
    if options.only_adapter and not options.adapter:
        parser.error("--only_adapter: expected an --adapter to write")
    stored = read_json_object(locate(options.model, weights=False) / "config.json")
    dtype: Any = options.dtype or stored.get("dtype") or stored.get("torch_dtype") or "float32"
    sees = "siglip" in str(stored.get("mm_vision_tower"))
    backbone = load_backbone(
        options.model,
        dtype=dtype,
        adapter=options.adapter,
        vision=VisionSettings() if sees else None,
    )
    folder: Path = options.folder
    layout = options.layout or backbone.own_layout
    summaries = _measured(options.results, backbone) if options.results else []
    if options.only_adapter:
        backbone.save_adapter(folder, layout=layout)
    else:
        backbone.export(folder, layout=layout)
        copy_tokenizer(options.model, folder)
        write_json(folder / "generation_config.json", _generation_config(backbone))
        if not is_local(options.model):
            _name_code(folder / "config.json", options.model)
    write_atomically(folder / "README.md", _card(options, backbone, summaries))
    logger.info("%s: %s", folder, ", ".join(sorted(path.name for path in folder.iterdir())))
    return 0


def merge(arguments: Sequence[str]) -> int:
    """Runs ``lit-dlm merge``: an export with the adapter added to the weights."""
    return main(arguments, "merge")


def push(arguments: Sequence[str]) -> int:
    """Runs ``lit-dlm push``: uploads an export; no other command writes to the hub."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm push",
        description="Uploads an exported model or adapter, or a commit policy, to the Hugging Face "
        "hub, with the token of 'hf auth login' or HF_TOKEN.",
    )
    parser.add_argument(
        "folder", type=Path, help="what 'lit-dlm export' wrote, or a run's policy folder"
    )
    parser.add_argument("hub_id", help="OWNER/NAME, created when absent")
    parser.add_argument("--public", action="store_true", help="a new repository is private without")
    options = parser.parse_args(arguments)
    config = options.folder / "config.json"
    if config.is_file() and read_json_object(config).get("format") == FORMAT:
        scorer = AcceptanceScorer.load(options.folder)
        write_atomically(options.folder / "README.md", _policy_card(scorer, options.hub_id))
    names = {path.name for path in options.folder.glob("*")}
    if not names & {"config.json", "adapter_config.json"} or "README.md" not in names:
        raise ValueError(
            f"{options.folder}: expected a folder that 'lit-dlm export' wrote, or that of a policy"
        )
    hub = HfApi()
    try:
        hub.create_repo(options.hub_id, private=not options.public, exist_ok=True)
        done = hub.upload_folder(repo_id=options.hub_id, folder_path=options.folder)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(f"{options.hub_id}: the hub does not take the folder ({reason})") from None
    logger.info("%s", done)
    return 0


def _policy_card(scorer: AcceptanceScorer, hub_id: str) -> str:
    family = scorer.backbone.get("family", "any")
    data = ModelCardData(library_name="lit-dlm", tags=["masked-diffusion", "tracelock", family])
    backbone, training = (
        ", ".join(f"{key} {value}" for key, value in facts.items())
        for facts in (scorer.backbone, scorer.training_facts)
    )
    return _POLICY_CARD.format(
        data=data.to_yaml().strip(),
        name=hub_id.partition("/")[2],
        version=version("lit-dlm"),
        backbone=f"a backbone of {backbone or 'any kind'}",
        training=training or "not recorded",
        hub_id=hub_id,
    )


def _measured(run: Path, backbone: HFBackbone) -> list[MethodSummary]:
    """Summaries of a run, which must be of this model."""
    results, ours = ResultFolder(run / "results"), backbone.describe()
    for task, method in results.pairs():
        theirs = results.settings(task, method)["backbone"]
        for key in ("weights_sha256", "adapter_sha256"):
            if theirs[key] != ours[key]:
                raise ValueError(f"results: {task}, {method} in {run} has another {key}")
    return summarise_run(run)


def _generation_config(backbone: HFBackbone) -> dict[str, Any]:
    spec = backbone.spec
    ids = {"bos_token_id": spec.bos_id, "pad_token_id": spec.pad_id, "mask_token_id": spec.mask_id}
    eos = list(spec.eos_ids) if len(spec.eos_ids) > 1 else spec.eos_ids[0]
    return {"eos_token_id": eos, **{key: value for key, value in ids.items() if value is not None}}


def _name_code(config: Path, hub_id: str) -> None:
    """Makes a configuration name the family's own code where it lies, as it was not copied."""
    content = read_json_object(config)
    for name, place in content.get("auto_map", {}).items():
        if "--" not in place:
            content["auto_map"][name] = f"{hub_id.partition('@')[0]}--{place}"
    write_json(config, content)


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
        **({} if is_local(options.model) else {"base_model": options.model}),
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
