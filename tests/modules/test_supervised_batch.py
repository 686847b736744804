"""Batches of samples of which only some have a decode, or a list of the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lit_dlm.modules.supervised_batch import collate_supervised, responses_of
from lit_dlm.ops.cuts import non_ltr_positions
from tests.finetuning import G, examples, small


def test_steps_of_a_sample_do_not_depend_on_its_neighbours() -> None:
    spec = small().spec
    first, second = examples(2)
    batch = collate_supervised([first, replace(second, steps=None)], response_length=G, spec=spec)
    responses = responses_of(batch, spec, seed=0, num_padding=None)
    assert responses.steps_or_ltr().tolist() == [first.steps.tolist(), list(range(G))]
    both = collate_supervised([first, second], response_length=G, spec=spec)
    assert both.has_steps is None
    assert both.steps.tolist() == [first.steps.tolist(), second.steps.tolist()]
    none = collate_supervised([replace(first, steps=None)], response_length=G, spec=spec)
    assert none.steps is None
    assert none.has_steps is None


def test_lists_of_the_data_stand_beside_what_the_steps_say() -> None:
    spec = small().spec
    first, second = examples(2)
    listed = replace(first, non_ltr=np.arange(G) == 3)
    batch = collate_supervised([listed, second], response_length=G, spec=spec)
    responses = responses_of(batch, spec, seed=0, num_padding=None)
    assert responses.non_ltr[0].nonzero().tolist() == [[3]]
    assert responses.non_ltr[1].tolist() == non_ltr_positions(batch.steps[1]).tolist()
    assert collate_supervised([first, second], response_length=G, spec=spec).non_ltr is None
