"""Profiles in experiment trackers, through Lightning's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from matplotlib import image

from lit_dlm.profile.points import ProfilePoint, markdown_table

LoggerName = Literal["csv", "tensorboard", "wandb"]
LOGGERS: tuple[str, ...] = get_args(LoggerName)

_NEEDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
_LOGGED = (
    "accuracy",
    "nfe",
    "tokens_per_forward",
    "tokens_per_second",
    "useful_tokens_per_second",
    "ms_per_sample",
    "policy_share",
    "lockstep",
)


def check_installed(names: Sequence[str]) -> None:
    """Refuses loggers whose package is missing, before anything is decoded.

    Raises:
        ValueError: names the package.
    """
    for name in names:
        packages = _NEEDS.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            raise ValueError(
                f"loggers: '{name}' needs the package {packages[0]}, which is not installed: "
                f"pip install {packages[0]}"
            )


def make_logger(
    name: str, folder: Path, *, project: str = "lit-dlm", offline: bool = False
) -> Logger:
    """One of Lightning's loggers.

    Args:
        name: of :data:`LOGGERS`.
        folder: the run's folder, whose name is the run's.
        project: of W&B.
        offline: W&B writes to the folder only; ``wandb sync`` sends it later.

    Raises:
        ValueError: the name is unknown, or its package is not installed.
    """
    check_installed([name])
    if name == "csv":
        return CSVLogger(str(folder), name="profile_csv", version="")
    if name == "tensorboard":
        return TensorBoardLogger(str(folder), name="tensorboard", version="")
    if name == "wandb":
        folder.mkdir(parents=True, exist_ok=True)
        return WandbLogger(
            name=folder.resolve().name, project=project, save_dir=str(folder), offline=offline
        )
    raise ValueError(f"loggers: expected some of {', '.join(LOGGERS)}, got {name!r}")


def log_profile(logger: Logger, points: Sequence[ProfilePoint], picture: Path) -> None:
    """Logs all points, the table and the picture, and closes the logger.

    A metric's name is ``{task}/{curve}/{metric}`` and its step the rounded number of forwards, so
    that a tracker draws quality and speed over forwards, curve by curve.

    Args:
        logger: of Lightning.
        points: at least one.
        picture: the plot, a PNG file.
    """
    for point in sorted(points, key=lambda one: one.nfe):
        facts = asdict(point)
        prefix = f"{point.task}/{point.curve}"
        metrics = {f"{prefix}/{name}": facts[name] for name in _LOGGED if facts[name] is not None}
        logger.log_metrics(metrics, step=round(point.nfe))
    if isinstance(logger, TensorBoardLogger):
        writer: Any = logger.experiment
        writer.add_text("profile", markdown_table(points))
        writer.add_image("profile", image.imread(picture)[..., :3], dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        rows = [list(asdict(point).values()) for point in points]
        logger.log_table("profile", columns=list(asdict(points[0])), data=rows)
        logger.log_image("profile_plot", [str(picture)])
    logger.finalize("success")
    if isinstance(logger, WandbLogger):
        # Lightning leaves the run open for what comes after a fit; here nothing does.
        logger.experiment.finish()
