import pytest
import torch

from lit_dlm.ops.scores import arg_max


@pytest.mark.parametrize("vocab_size", [3, 256, 257, 700, 1024, 131_073])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_arg_max_of_torch(vocab_size, dtype):
    """Values rounded to halves give many ties, forbidden ids are minus infinity."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(2, 3, vocab_size, generator=generator) * 4).round() / 2
    logits = logits.to(dtype)
    logits[..., 1] = -torch.inf
    assert torch.equal(arg_max(logits), logits.argmax(-1))


def test_ties_go_to_the_lowest_id_in_every_part_of_the_vocabulary():
    logits = torch.zeros(3, 600)
    logits[0, [300, 590]] = 1.0
    logits[1, [520, 599]] = 1.0
    logits[2, 599] = 1.0
    assert arg_max(logits).tolist() == [300, 520, 599]
