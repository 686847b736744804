"""Which of the trainer's precisions a run may have."""

from __future__ import annotations

from lightning.pytorch import Trainer


def check_precision(trainer: Trainer) -> None:
    """Refuses "true" precisions other than 32 bits.

    They set torch's default dtype and cast every module: heads and their optimisers would be
    rounded along with the decoder, whose dtype is a setting of its own.

    Args:
        trainer: the run's.

    Raises:
        ValueError: the precision is one of them.
    """
    precision = str(trainer.precision)
    if precision.endswith("-true") and precision != "32-true":
        raise ValueError(
            f"trainer.precision: expected 32-true, bf16-mixed or 16-mixed, got {precision}; "
            "decoders have a dtype of their own (backbone: dtype: bfloat16)"
        )
