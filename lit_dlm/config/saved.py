"""The saved configuration of a run, by which a run folder belongs to one set of settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lit_dlm.config.files import mapping, resolved, setting_differences
from lit_dlm.system.files import write_atomically
from lit_dlm.system.locks import state_file

_REFERENCE = re.compile(r"\$\{((trainer\.default_root|run)_dir\}|oc\.env:)")
_WITH_DEFAULT = re.compile(r"\$\{oc\.env:(\w+),[^{}]*\}")
LAST = "last"
"""Stem of the checkpoint that a run resumes from; the one before it is kept."""
_COMPARED = re.compile(
    r"(model|data|seed_everything|tf32)\b"
    r"|trainer\.(precision|gradient_clip_val|accumulate_grad_batches)\b"
)
NOT_COMPARED = {
    *("num_workers", "compile", "gradient_checkpointing", "attn_implementation", "cuda_graphs"),
    "export_dir",
    "total_steps",  # of a schedule, which follows the trainer's max_steps
    *("batch_size", "rollout_batch_size", "val_batch_size"),  # checkpoints refuse what matters
    *("device", "url", "timeout_s", "deadline_s", "api_key_env"),  # of learned rewards and judges
}
"""Options, wherever they are, that may differ where a fit goes on."""


def claim(config: dict[str, Any], document: dict[str, Any]) -> None:
    """Refuses a ``fit`` in the folder of one with other settings, or whose checkpoints it ignores.

    The folder is the trainer's ``default_root_dir``; the settings are those that decide weights. As
    in the file, they have the references of the document.
    """
    folder = Path(config["trainer"]["default_root_dir"])
    path = folder / "fit.yaml"
    if not path.exists():
        return
    theirs, ours = mapping(str(path), path.read_bytes()), with_references(config, document)
    changes = filter(_decides, setting_differences(_anywhere(theirs), _anywhere(ours)))
    if changed := [change.replace("init_args.", "")[:160] for change in changes]:
        raise ValueError(
            f"run_dir: {folder} holds a fit of other settings ({'; '.join(changed[:3])}"
            f"{'; ...' * bool(changed[3:])}); choose another --run_dir, or remove {path}"
        )
    # Folders below with a file of their own are other runs, such as further steps of a method.
    others = [path.parent for path in folder.glob("*/**/fit.yaml")]
    checkpoints = [
        one for one in folder.rglob("*.ckpt") if not any(map(one.is_relative_to, others))
    ]
    has_last = any(one.name.startswith(LAST) for one in checkpoints)
    if checkpoints and (
        config["ckpt_path"] is None or (config["ckpt_path"] == LAST and not has_last)
    ):
        raise ValueError(
            f"run_dir: {folder} holds a fit, which goes on with --ckpt_path "
            f"{LAST if has_last else checkpoints[-1]}; a new one needs another --run_dir"
        )


def _decides(change: str) -> bool:
    # Rates, data and seeds decide weights; how fast or where they are computed does not.
    key = change.partition(":")[0]
    return bool(_COMPARED.match(key)) and not NOT_COMPARED.intersection(key.split("."))


def _anywhere(config: dict[str, Any]) -> Any:
    """Returns a configuration as it would be in another run folder."""
    # Without the closing quotation mark, so that paths below the folder are found as well.
    run_dir = json.dumps(config.get("run_dir"))[:-1]
    return json.loads(re.sub(rf'{re.escape(run_dir)}(?=[/"])', '"${run_dir}', json.dumps(config)))


def with_references(config: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Returns a parsed configuration with references put back, so that it can run elsewhere.

    These are paths in the run's folder and texts from the environment; they are recognised by name
    and text, since parsing gives short forms their ``class_path`` and ``init_args``.
    """
    given = dict(_references(document, resolved(document)))
    return {**_put_back(config, given), "run_dir": config["run_dir"]}


def _references(document: Any, values: Any, key: str = "") -> Iterator[tuple[Any, str]]:
    if isinstance(document, dict | list):
        for one in document if isinstance(document, dict) else range(len(document)):
            name = key if isinstance(document, list) else str(one)
            yield from _references(document[one], values[one], name)
    elif isinstance(document, str) and _REFERENCE.search(document):
        yield (key, values), _WITH_DEFAULT.sub(_with_value, document)


def _with_value(found: re.Match[str]) -> str:
    """Names the value that was read as the default; what has none may be a secret."""
    if (value := os.environ.get(found[1])) is None:
        return found[0]
    return f"${{oc.env:{found[1]},{json.dumps(value, ensure_ascii=False)}}}"


def _put_back(value: Any, given: dict[Any, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _put_back(item, given, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, given, key) for item in value]
    return given.get((key, value), value)


class RunConfigCallback(SaveConfigCallback):
    """Saves the configuration as ``{default_root_dir}/{subcommand}.yaml``."""

    def __init__(self, *args: Any, document: dict[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._document = document

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes a file that can be run again as is (the base class calls this on rank 0 only)."""
        assert trainer.state.fn is not None
        path = Path(trainer.default_root_dir) / f"{trainer.state.fn.value}.yaml"
        # Written when the trainer is set up: a run that is refused before leaves the former file,
        # and with it the former claim.
        text = self.parser.dump(self.config, skip_none=False, skip_validation=True)  # it was parsed
        config = with_references(yaml.safe_load(text), self._document)
        write_atomically(path, yaml.safe_dump(config, allow_unicode=True, sort_keys=False))
        write_atomically(state_file(path), "begun")
