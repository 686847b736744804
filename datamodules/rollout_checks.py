"""Whether the settings of rollouts make sense, before any time is spent on them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from datamodules.rollout_collection import EncodedPrompt
from lit_dlm.modules.tracerl import TraceRLModule

if TYPE_CHECKING:
    from datamodules.rollouts import RolloutDataModule

logger = logging.getLogger(__name__)

_POSITIVE = (
    "prompts_per_step",
    "responses_per_prompt",
    "response_length",
    "max_prompt_length",
    "rollout_batch_size",
    "batch_size",
    "max_rollout_rounds",
    "passes",
    "val_responses",
    "val_response_length",
)
_OF_NEW_ROLLOUTS = (
    "prompts_per_step",
    "responses_per_prompt",
    "filters",
    "max_rollout_rounds",
    "overlong_is_wrong",
    "overlong_margin",
)


def check_settings(data: RolloutDataModule) -> None:
    """Refuses settings that are out of range or would train on nothing.

    Args:
        data: the data module.

    Raises:
        ValueError: naming the setting.
    """
    if data.source not in ("online", "shards"):
        raise ValueError(f"source: expected 'online' or 'shards', got {data.source!r}")
    if (data.source == "shards") != (data.shards is not None):
        raise ValueError(
            "shards: needed with source 'shards' and only there, "
            f"got {data.shards!r} with {data.source!r}"
        )
    if not data.tasks:
        raise ValueError("tasks: expected at least one task, got none")
    for name in _POSITIVE:
        if getattr(data, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(data, name)}")
    if data.advantage not in ("group_zscore", "leave_one_out", "none"):
        raise ValueError(
            f"advantage: expected 'group_zscore', 'leave_one_out' or 'none', got {data.advantage!r}"
        )
    if data.source == "online" and data.responses_per_prompt == 1 and data.advantage != "none":
        raise ValueError(
            f"responses_per_prompt: expected at least 2 with advantage {data.advantage!r}, which "
            "compares the responses to a prompt and gives 0 to one alone, got 1; use 'none'"
        )
    if not 0.0 <= data.smoothing < 1.0:
        raise ValueError(f"smoothing: expected a number in [0, 1), got {data.smoothing}")


def warn_of_unused(data: RolloutDataModule) -> None:
    """Names the settings of new rollouts that are set, though stored ones are trained on.

    Args:
        data: the data module.
    """
    defaults = inspect.signature(type(data)).parameters
    given = [
        name for name in _OF_NEW_ROLLOUTS if getattr(data, name) not in (defaults[name].default, [])
    ]
    if given:
        logger.warning(
            "source 'shards' takes rewards and kept groups as they are stored in %s: not read are "
            "the settings %s",
            data.shards,
            ", ".join(given),
        )


def warn_of_long_rows(
    module: TraceRLModule, prompts: Sequence[EncodedPrompt], *, response_length: int, option: str
) -> None:
    """Tells how many prompts and responses reach beyond what the backbone has seen.

    Args:
        module: whose backbone has a greatest length.
        prompts: the prompts.
        response_length: cells of their responses.
        option: what the length is called.
    """
    most = module.backbone.architecture.max_positions
    num_long = sum(len(prompt.ids) + response_length > most for prompt in prompts)
    if num_long:
        logger.warning(
            "%s: %d of %d prompts have, with a response of %d tokens, more than the %d positions "
            "that the backbone was made for",
            option,
            num_long,
            len(prompts),
            response_length,
            most,
        )
