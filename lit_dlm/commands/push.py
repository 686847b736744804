"""``lit-dlm push``: uploads an export; no other command writes to the hub."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows its name."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm push",
        description="Uploads an exported folder to the Hugging Face hub, with the token of "
        "'hf auth login' or HF_TOKEN.",
    )
    parser.add_argument("folder", type=Path, help="what 'lit-dlm export' wrote")
    parser.add_argument("hub_id", help="OWNER/NAME, created when absent")
    parser.add_argument("--public", action="store_true", help="a new repository is private without")
    options = parser.parse_args(arguments)
    # Here, behind --help: it takes a second to import.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Those of its HTTP library, too.
    failures: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, HFValidationError)
    names = {path.name for path in options.folder.glob("*")}
    if not names & {"config.json", "adapter_config.json"} or "README.md" not in names:
        raise ValueError(f"{options.folder}: expected a folder that 'lit-dlm export' wrote")
    hub = HfApi()
    try:
        hub.create_repo(options.hub_id, private=not options.public, exist_ok=True)
        done = hub.upload_folder(repo_id=options.hub_id, folder_path=options.folder)
    except failures as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(f"{options.hub_id}: the hub does not take the folder ({reason})") from None
    logger.info("%s", done)
    return 0
