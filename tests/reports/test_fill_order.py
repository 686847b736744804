import numpy as np
import pytest

from lit_dlm.reports.order import (
    Region,
    fill_rate,
    last_writes,
    left_to_rightness,
    text_positions,
    writes_per_step,
)
from tests.reports.sample_sets import EOS, MASK, ids_of, record, tiny_pieces


def test_tau_equals_counting_pairs():
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 9, 40)
    steps[:9] = range(9)
    one = record([7] * 40, steps.tolist())
    signs = [np.sign(int(steps[j]) - int(steps[i])) for i in range(40) for j in range(i + 1, 40)]
    untied = sum(sign != 0 for sign in signs)
    assert left_to_rightness(one) == pytest.approx(sum(signs) / np.sqrt(len(signs) * untied))


def test_tau_is_undefined_for_one_step_and_for_one_token():
    assert left_to_rightness(record([7] * 4, [0, 0, 0, 0])) is None
    assert left_to_rightness(record([7, MASK], [0, -1])) is None
    assert left_to_rightness(record([], [], num_steps=0)) is None


def test_tau_of_the_text_leaves_the_end_of_text_fill_out():
    """The fill is written first; the text itself is strictly left to right."""
    ids = ids_of("8-4=4")
    one = record([*ids, EOS, EOS], [*range(1, len(ids) + 1), 0, 0])
    text = text_positions(one, tiny_pieces())
    assert text.tolist() == [True] * len(ids) + [False, False]
    assert left_to_rightness(one, positions=text) == pytest.approx(1.0)
    whole = left_to_rightness(one)
    assert whole is not None
    assert whole < 0.5


def remasked():
    """Place 0: written at 0, masked at 1, written at 3. Place 1 is given. Place 2 stays a mask."""
    return record(
        [8, 9, MASK],
        [3, -1, -1],
        num_steps=4,
        given=np.array([False, True, False]),
        superseded=np.array([[0, 0, 7], [1, 0, MASK]]),
    )


def test_last_writes_follow_masking_again_and_given_tokens():
    assert last_writes(remasked()).tolist() == [
        [-1, -2, -1],
        [0, -2, -1],
        [-1, -2, -1],
        [-1, -2, -1],
        [3, -2, -1],
    ]


def test_pace_and_fill_count_tokens_and_not_masking_again():
    one, whole = remasked(), Region("all", 0, 3)
    assert writes_per_step(one, whole).tolist() == [1, 0, 0, 1]
    assert fill_rate(one, whole) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3, 2 / 3])
    assert fill_rate(one, Region("end", 2, 3)) == pytest.approx([0, 0, 0, 0, 0])
