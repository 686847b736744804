"""``lit-dlm push``: uploads an export or a policy; no other command writes to the hub."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lit_dlm.system.files import own_file, read_json_object, write_atomically

if TYPE_CHECKING:  # torch and the hub's client take seconds to import
    from lit_dlm.tracelock.scorer import AcceptanceScorer

logger = logging.getLogger(__name__)

_POLICY_CARD = """---
{data}
---

# {name}

A commit policy (TraceLock, [arXiv 2605.24697](https://arxiv.org/abs/2605.24697)): it says at each
step of a masked diffusion language model which proposed tokens become final. It was trained for
{backbone}. Written by lit-dlm {version}. With this as `policy.yaml`

```yaml
policy: {{class_path: TraceLockPolicy, init_args: {{path: {hub_id}}}}}
quota: NoQuota
```

generate with

```
lit-dlm generate "..." --backbone MODEL --config policy.yaml
```

Training: {training}.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm push",
        description="Uploads an exported model or adapter, or a commit policy, to the Hugging Face "
        "hub, with the token of 'hf auth login' or HF_TOKEN.",
    )
    parser.add_argument(
        "folder", type=Path, help="what 'lit-dlm export' wrote, or a run's policy folder"
    )
    parser.add_argument("hub_id", help="OWNER/NAME, created when absent")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    options = parser.parse_args(arguments)
    # Imported after --help, as they take seconds to import.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from lit_dlm.tracelock.scorer import FORMAT, AcceptanceScorer

    # Links could publish files from elsewhere on this machine, such as keys.
    for path in options.folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            own_file(path)
    config = options.folder / "config.json"
    if config.is_file() and read_json_object(config).get("format") == FORMAT:
        scorer = AcceptanceScorer.load(options.folder)
        write_atomically(options.folder / "README.md", _policy_card(scorer, options.hub_id))
    # Includes the errors of the hub's HTTP library.
    failures: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, HFValidationError)
    # After the card of a policy was written, which an export has already.
    names = {path.name for path in options.folder.glob("*")}
    if not names & {"config.json", "adapter_config.json"} or "README.md" not in names:
        made = "'lit-dlm export'"
        if "adapter_config.json" in names:  # as 'fit' leaves it, without a card
            made = f"'lit-dlm export MODEL FOLDER --adapter {options.folder} --only_adapter'"
        raise ValueError(
            f"{options.folder}: expected a folder that {made} wrote, or that of a policy"
        )
    hub = HfApi()
    try:
        hub.create_repo(options.hub_id, private=not options.public, exist_ok=True)
        done = hub.upload_folder(repo_id=options.hub_id, folder_path=options.folder)
    except failures as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(f"{options.hub_id}: the hub does not take the folder ({reason})") from None
    logger.info("%s", done)
    return 0


def _policy_card(scorer: AcceptanceScorer, hub_id: str) -> str:
    from huggingface_hub import ModelCardData

    family = scorer.backbone.get("family", "any")
    data = ModelCardData(library_name="lit-dlm", tags=["masked-diffusion", "tracelock", family])
    backbone, training = (
        ", ".join(f"{key} {value}" for key, value in metadata.items())
        for metadata in (scorer.backbone, scorer.training_facts)
    )
    return _POLICY_CARD.format(
        data=data.to_yaml().strip(),
        name=hub_id.partition("/")[2],
        version=version("lit-dlm"),
        backbone=f"a backbone of {backbone or 'any kind'}",
        training=training or "not recorded",
        hub_id=hub_id,
    )
