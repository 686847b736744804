"""Batches of samples of which only some have a decode, or a list of the data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_dlm.tensors.order import non_ltr_positions
from lit_dlm.training.masking import RandomMasking, SemiAutoregressive, TraceMasking
from lit_dlm.training.states import Masking
from lit_dlm.vision.base import PromptPictures
from tests.finetuning.runs import EOS, MASK, VOCAB, G, examples, small
from tests.training.supervised import BLOCK, batch_of, sft


def test_a_row_without_a_decode_or_a_list_of_the_data_is_like_no_other_row() -> None:
    """It goes from the left; a list of the data stands instead of what its steps say."""
    first, second = examples(2)
    model = small()
    batch = batch_of(model, [first, replace(second, steps=None, decode_entropy=None)])
    assert batch.steps.tolist() == [first.steps.tolist(), list(range(G))]
    assert batch.decode_entropy is None
    second_pass = batch_of(model, [replace(one, epoch=1) for one in examples(2)])
    assert len({*batch.seeds.tolist(), *second_pass.seeds.tolist()}) == 4
    batch = batch_of(model, [replace(first, non_ltr=np.arange(G) == 3), second])
    assert batch.non_ltr[0].nonzero().tolist() == [[3]]
    assert batch.non_ltr[1].tolist() == non_ltr_positions(batch.steps[1]).tolist()
    assert batch_of(model, [first, second]).non_ltr is None


def test_an_answer_without_an_end_learns_none_from_the_fill() -> None:
    """Four tokens in a region of eight, of which the third is the end of the second answer.

    The last of the third is a cell that nothing was written to. Only asked-for padding is learnt
    behind them, and a copy never learns.
    """
    model = small()
    (first,) = examples(1)
    answer = np.array([5, 6, 7, 8])
    cut_off = replace(first, response_ids=answer, steps=None, decode_entropy=None)
    ended = replace(cut_off, response_ids=np.array([5, 6, EOS, EOS]))
    open_cell = replace(cut_off, response_ids=np.array([5, 6, 7, MASK]))
    given = [cut_off, ended, open_cell, replace(cut_off, is_real=False)]
    for num_padding, wanted in {
        0: [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], []],
        2: [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 4, 5], []],
        None: [list(range(G)), list(range(G)), [0, 1, 2, 4, 5, 6, 7], []],
    }.items():
        batch = batch_of(model, given, num_padding=num_padding)
        assert batch.ids[0, batch.start :].tolist() == [5, 6, 7, 8, EOS, EOS, EOS, EOS]
        assert [row.nonzero().flatten().tolist() for row in batch.maskable] == wanted


def test_an_end_before_a_marker_ends_its_part_alone() -> None:
    """Markers at 0 and 4; the part between them ends at 2, the last one at 6."""
    response = np.array([9, 5, EOS, EOS, 8, 7, EOS, EOS])
    given = np.isin(np.arange(8), [0, 4])
    (one,) = examples(1)
    one = replace(one, response_ids=response, given=given, steps=None, decode_entropy=None)
    for num_padding, wanted in {
        0: [1, 2, 5, 6],
        1: [1, 2, 5, 6, 7],
        None: [1, 2, 3, 5, 6, 7],
    }.items():
        (positions,) = batch_of(small(), [one], num_padding=num_padding).maskable
        assert positions.nonzero().flatten().tolist() == wanted


@pytest.mark.parametrize(
    ("changes", "num_padding", "cells"),
    [
        # Prompts of 1 and 2 tokens, answers of 2 and 4 cells: blocks of 3 that hold cells 1 and 3
        # end, counted from the first token, before columns 3 and 6, which are cells 2 and 4.
        (BLOCK, 0, 4),
        # Counted from the response, behind cells 3 and 6.
        ({**BLOCK, "block_origin": "response"}, 0, 6),
        # With 3 cells of fill, targets end at cells 4 and 6: columns 6 and 9, cells 5 and 7.
        (BLOCK, 3, 7),
        (BLOCK, 7, G),
        (BLOCK, None, G),
        ({}, 0, G),
    ],
)
def test_blocks_behind_the_last_targets_are_left_out(
    changes: dict[str, object], num_padding: int | None, cells: int
) -> None:
    first, second = examples(2)
    given = [
        replace(first, response_ids=np.array([5, EOS, EOS, EOS, EOS, EOS, EOS, EOS])),
        replace(second, response_ids=np.array([5, 6, 7, 8]), steps=None, decode_entropy=None),
    ]
    batch = batch_of(small(**changes), given, num_padding=num_padding, cut=True)
    assert batch.ids.shape == (2, 2 + cells)
    assert batch.steps[0].tolist() == first.steps[:cells].tolist()


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize(
    "masking",
    [
        RandomMasking(copies=3, weight="1/t", min_t=0.2, level="block"),
        SemiAutoregressive(weight="1/length"),
        TraceMasking(shrink=2, rows_per_sample=2, padding="replayed"),
    ],
    ids=lambda masking: type(masking).__name__,
)
def test_what_is_left_out_changes_no_loss_and_no_noise(
    masking: Masking, origin: str, padding: int
) -> None:
    """Answers of 2, 3, 4 and 2 of 8 cells, a batch at full length and one that was cut."""
    model = sft(masking, small(**{**BLOCK, "block_origin": origin}), num_padding=padding)
    ended = np.full(G, EOS)
    given = [
        replace(
            example,
            response_ids=np.where(np.arange(G) < 1 + number % 3, example.response_ids, ended),
        )
        for number, example in enumerate(examples(4))
    ]
    whole, cut = (batch_of(model, given, seed=3, cut=cut) for cut in (False, True))
    assert cut.ids.shape[1] < whole.ids.shape[1]
    expected, found = (model.terms(batch) for batch in (whole, cut))
    torch.testing.assert_close(found.total, expected.total)
    assert found.means()["num_supervised"] == expected.means()["num_supervised"] > 0


PICTURES = {
    number: PromptPictures(digests=names, first_id=VOCAB)
    for number, names in {1: ("a",), 2: ("b", "c"), 3: ("a",), 5: ("d",)}.items()
}


@pytest.mark.parametrize("changes", [{}, BLOCK, {**BLOCK, "block_origin": "response"}])
@pytest.mark.parametrize("rows", [[0, 4], [2, 5], [5, 3, 2], [4], [1, 0, 1]])
def test_rows_that_are_taken_are_as_if_they_alone_had_been_collated(
    changes: dict[str, object], rows: list[int]
) -> None:
    """Of prompts of one to four tokens, four of them with pictures; two answers have given tokens.

    No padding that none of them needs, pictures numbered anew, ``None`` where none has any.
    """
    given = []
    for number, example in enumerate(examples(6)):
        if pictures := PICTURES.get(number):
            ids = np.array([5, *range(VOCAB, VOCAB + len(pictures.digests)), 6], np.int32)
            example = replace(example, prompt_ids=ids, pictures=pictures)
        if number in (2, 4):
            example = replace(example, given=np.arange(G) == number)
        given.append(example)
    model = small(**changes)
    some = batch_of(model, given, num_padding=0).take(torch.tensor(rows))
    alone = batch_of(model, [given[row] for row in rows], num_padding=0)
    for name, value in vars(alone).items():
        found = getattr(some, name)
        if name == "blocks" and value is not None:  # of no use but to compare them within a row
            found, value = (one - one.amin(1, keepdim=True) for one in (found, value))
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype
            assert found.equal(value), name
        elif name != "first_picture":
            assert found == value, name


def test_noise_of_a_sample_does_not_depend_on_the_length_of_its_batch() -> None:
    """Neither that of its first copy nor that of its second."""
    model = small(**BLOCK)
    first, second = (replace(e, response_ids=e.response_ids[:3], steps=None) for e in examples(2))
    long = replace(second, response_ids=np.full(G, 5))
    masking = RandomMasking(copies=2, level="token")
    hidden = []
    for other in (second, long):
        batch = batch_of(model, [first, other], num_padding=0, cut=True)
        states = masking.states(batch)
        hidden.append(states.hidden[:2, :3].tolist())
    assert hidden[0] == hidden[1]
