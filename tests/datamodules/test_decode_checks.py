"""Samples that lack a decode, or leave nothing to learn, are told before training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lit_dlm.datamodules.supervised import check_decodes
from lit_dlm.losses.corruption import TimeDelay, TraceMasking
from lit_dlm.modules.finetune import SFTModule
from lit_dlm.modules.supervised_batch import SupervisedExample
from lit_dlm.modules.tabom import TABOMModule
from tests.finetuning import G, examples, small


def tabom(**options: Any) -> TABOMModule:
    return TABOMModule(small(), **{"tokenizer": "tiny", "window": 4, "rank_window": 4, **options})


def without(name: str) -> list[SupervisedExample]:
    """The third of four lacks a field."""
    given = examples(4)
    given[2] = replace(given[2], **{name: None})
    return given


def test_a_sample_without_steps_is_named_where_cuts_need_them() -> None:
    sft = SFTModule(small(), tokenizer="tiny", corruption=TimeDelay(window=4))
    for module in (tabom(), sft):
        with pytest.raises(ValueError, match="fake/train/00002: TimeDelay needs"):
            check_decodes(without("steps"), module, response_length=G)
    other = SFTModule(small(), tokenizer="tiny", corruption=TraceMasking())
    check_decodes(without("steps"), other, response_length=G)


def test_a_sample_without_entropies_is_named_where_ties_need_them() -> None:
    with pytest.raises(ValueError, match="fake/train/00002: ties 'rank' needs"):
        check_decodes(without("decode_entropy"), tabom(ties="rank"), response_length=G)
    check_decodes(without("decode_entropy"), tabom(), response_length=G)


def test_samples_without_a_cut_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Eight steps, the last of them 7: a reference window of 7 leaves a cut at 0, one of 8 none.
    One sample in four was never written."""
    given = examples(4, never=(1,))
    check_decodes(examples(4), tabom(window=7, cut_range="reference"), response_length=G)
    assert "without a cut" not in caplog.text
    check_decodes(given, tabom(window=7, cut_range="reference"), response_length=G)
    assert "leaves 1 of 4 samples without a cut" in caplog.text
    with pytest.raises(ValueError, match="window of 8 leaves 4 of 4 samples without a cut"):
        check_decodes(given, tabom(window=8, cut_range="reference"), response_length=G)
    check_decodes(examples(4), tabom(window=8), response_length=G)
