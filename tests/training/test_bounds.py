"""Views of evidence bounds: what they hide, and that their weights make an unbiased mean."""

from functools import partial
from typing import Any

import pytest
import torch

from lit_dlm.training.bounds import BoundViews
from tests.training.reference import responses as answers

N, ANSWER = 4000, 5
responses = partial(answers, B=2, G=8, answer=ANSWER)
BLOCKS = torch.tensor([[3, 3, 4, 4, 4, 5, 5, 5]] * 2)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_weights_of_every_token_add_up_to_its_share_of_a_mean(coupled: bool, blocks: Any) -> None:
    """Over many levels. ``l`` of a segment of ``s`` cells are hidden, each of them ``s / l`` times;
    in a pair, ``(s + 1) / 2 l`` and ``(s + 1) / 2 (s - l)``, and each token is hidden in one half.
    """
    given = responses(blocks=blocks)
    states = BoundViews(num_states=N, coupled=coupled).states(given)
    maskable = given.maskable[states.response]
    assert states.hidden.equal(states.supervised | ~maskable)
    total = states.coefficient.double().unflatten(0, (2, -1)).sum(1)
    expected = given.maskable.double() / ANSWER
    torch.testing.assert_close(total, expected, rtol=0.08, atol=0)
    for part in (slice(0, 5),) if blocks is None else (slice(0, 2), slice(2, 5)):
        size, count = part.stop - part.start, states.supervised[:, part].sum(1, keepdim=True)
        times = (size + 1) / (2 * count) if coupled else size / count
        wanted = torch.where(states.supervised[:, part], times / (N * ANSWER), 0.0)
        torch.testing.assert_close(states.coefficient[:, part], wanted, rtol=1e-6, atol=0)
        hidden = count.unique().tolist()
        assert hidden == list(range(0 if coupled else 1, size + 1))
    if coupled:
        pairs = states.supervised.unflatten(0, (-1, 2)).sum(1)
        assert pairs.equal(given.maskable.long().repeat_interleave(N, 0))


def test_a_block_is_hidden_in_part_and_all_behind_it() -> None:
    """Blocks of 2, 2 and 1 cells; three states of a response are in different ones."""
    states = BoundViews(num_states=3, block_size=2).states(responses())
    for of_sample in states.supervised.unflatten(0, (2, 3)):
        firsts = []
        for row in of_sample:
            block = int(row.nonzero()[0, 0]) // 2
            assert row[2 * block + 2 : ANSWER].all()
            firsts.append(block)
        assert sorted(firsts) == [0, 1, 2]
    count = states.supervised.sum(1, keepdim=True)
    torch.testing.assert_close(states.coefficient, states.supervised / (3.0 * count))


def test_wrong_options_are_named() -> None:
    for options, given in (
        ({"block_size": 2, "coupled": True}, {}),
        ({"block_size": 0}, {}),
        ({"block_size": 2}, {"blocks": BLOCKS}),
    ):
        with pytest.raises(ValueError, match="block_size"):
            BoundViews(**options).states(responses(**given))
    with pytest.raises(ValueError, match="num_states"):
        BoundViews(num_states=0)
