"""Batches of samples of which only some have a decode, or a list of the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lit_dlm.modules.supervised_batch import collate_supervised, responses_of
from lit_dlm.ops.cuts import non_ltr_positions
from tests.finetuning import EOS, MASK, G, examples, small


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


def test_an_answer_without_an_end_learns_none_from_the_fill() -> None:
    """Four tokens in a region of eight, of which the third is the end of the second answer.

    The last of the third is a cell that nothing was written to. Only asked-for padding is learnt
    behind them, and a copy never learns.
    """
    spec = small().spec
    (first,) = examples(1)
    answer = np.array([5, 6, 7, 8])
    cut_off = replace(first, response_ids=answer, steps=None, decode_entropy=None)
    ended = replace(cut_off, response_ids=np.array([5, 6, EOS, EOS]))
    open_cell = replace(cut_off, response_ids=np.array([5, 6, 7, MASK]))
    copy = replace(cut_off, is_real=False)
    batch = collate_supervised([cut_off, ended, open_cell, copy], response_length=G, spec=spec)
    assert batch.answer_length.tolist() == [4, 3, 4, 0]
    assert batch.ids[0, batch.start :].tolist() == [5, 6, 7, 8, EOS, EOS, EOS, EOS]

    def maskable(num_padding: int | None) -> list[list[int]]:
        cells = responses_of(batch, spec, seed=0, num_padding=num_padding).maskable
        return [row.nonzero().flatten().tolist() for row in cells]

    assert maskable(0) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], []]
    assert maskable(2) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 4, 5], []]
    assert maskable(None) == [list(range(G)), list(range(G)), [0, 1, 2, 4, 5, 6, 7], []]
