"""Whether examples hold what a module trains on, while a sample's name is at hand.

A process that found it in the middle of an epoch would leave the others waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lit_dlm.losses.corruption import TimeDelay
from lit_dlm.modules.finetune import FinetuneModule
from lit_dlm.modules.supervised_batch import SupervisedExample, collate_supervised, responses_of
from lit_dlm.modules.tabom import TABOMModule

logger = logging.getLogger(__name__)

_ROWS = 256
"""Examples looked at together."""


def check_decodes(
    examples: Sequence[SupervisedExample], module: FinetuneModule, *, response_length: int
) -> None:
    """Refuses examples that lack the decode that the module's states or ties are made from.

    Warns of those in which its cuts leave nothing to learn.

    Args:
        examples: all examples, with responses of at most ``response_length`` tokens.
        module: what is trained.
        response_length: cells of every response.

    Raises:
        ValueError: naming the sample that has no steps or no entropies, or that no sample has a
            cut.
    """
    if isinstance(module, TABOMModule) and module.ties == "rank":
        for example in examples:
            if example.decode_entropy is None:
                raise ValueError(
                    f"{example.uid}: ties 'rank' needs the entropies of decoding; record "
                    "trajectories at level 'signals', or set other ties"
                )
    corruption = module.corruption
    if not isinstance(corruption, TimeDelay) or not examples:
        return
    for example in examples:
        if example.steps is None:
            raise ValueError(
                f"{example.uid}: TimeDelay expects responses with the steps of a decode; train on "
                "trajectories, or set the data's missing_order: ltr"
            )
    without = 0
    for first in range(0, len(examples), _ROWS):
        spec = module.backbone.spec
        batch = collate_supervised(
            examples[first : first + _ROWS], response_length=response_length, spec=spec
        )
        responses = responses_of(batch, spec, seed=0, num_padding=module.num_padding)
        without += int((corruption.last_cuts(responses) < 0).sum())
    setting = f"cut_range: {corruption.cut_range!r} with a window of {corruption.window} leaves"
    if without == len(examples):
        raise ValueError(
            f"{setting} none of the {without} samples a cut, so nothing would be learnt; expected "
            "longer decodes, a smaller window or cut_range 'full'"
        )
    if without:
        logger.warning(
            "%s %d of %d samples (%.1f %%) without a cut: nothing is learnt from them",
            setting,
            without,
            len(examples),
            100 * without / len(examples),
        )
