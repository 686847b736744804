import pytest
import torch

from lit_dlm.ops.masking import state_at

MASK = 9
TOKENS = torch.tensor([[3, 4, 5, MASK], [6, 7, 8, 1]])
COMMIT = torch.tensor([[-1, 1, 0, -1], [2, -1, 0, 1]])


def test_a_token_shows_from_the_step_after_its_commit():
    """Row 0: prompt 3, then 5 from step 1, 4 from step 2; the last cell is never written."""
    assert state_at(TOKENS, COMMIT, 0, MASK).tolist() == [[3, 9, 9, 9], [9, 7, 9, 9]]
    assert state_at(TOKENS, COMMIT, 1, MASK).tolist() == [[3, 9, 5, 9], [9, 7, 8, 9]]
    assert state_at(TOKENS, COMMIT, 2, MASK).tolist() == [[3, 4, 5, 9], [9, 7, 8, 1]]
    assert torch.equal(state_at(TOKENS, COMMIT, 3, MASK), TOKENS)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_each_row_may_have_its_own_step(shape):
    steps = torch.tensor([2, 1]).reshape(shape)
    assert state_at(TOKENS, COMMIT, steps, MASK).tolist() == [[3, 4, 5, 9], [9, 7, 8, 9]]


def test_dtype_is_kept_and_nothing_is_changed_in_place():
    tokens = TOKENS.int()
    assert state_at(tokens, COMMIT, 0, MASK).dtype == torch.int32
    assert torch.equal(tokens, TOKENS.int())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must have one shape"):
        state_at(TOKENS, COMMIT[:1], 0, MASK)
    with pytest.raises(ValueError, match=r"a step of shape \(3,\)"):
        state_at(TOKENS, COMMIT, torch.tensor([0, 1, 2]), MASK)
