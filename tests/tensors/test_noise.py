import hashlib
import math

import pytest
import torch

from lit_dlm.tensors.sampling import cell_gumbel_noise, gumbel_noise, sample_seed, uniform_noise

_WORD = 2**64


def _slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _WORD
    return x ^ (x >> 31)


def _slow_uniform(seed: int, step: int, position: int, stream: int, token: int | None) -> float:
    """The same hash in Python's unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    key = _slow_mix((seed + golden * (stream + 1)) % _WORD)
    key = _slow_mix((key + golden * (step + 1)) % _WORD)
    key = _slow_mix((key + golden * (position + 1)) % _WORD)
    if token is not None:
        key = _slow_mix((key + golden * (token + 1)) % _WORD)
    return ((key >> 11) + 0.5) * 2.0**-53


def test_uniform_noise_equals_the_hash_in_unbounded_integers():
    seeds = torch.tensor([0, 1, 2**62 + 12345])
    positions = torch.tensor([[0, 5], [7, 7], [1000, 3]])
    found = uniform_noise(seeds, 9, positions, stream=1)
    per_token = uniform_noise(seeds, 9, positions, tokens=torch.arange(4))
    for row, seed in enumerate(seeds.tolist()):
        for column, position in enumerate(positions[row].tolist()):
            assert found[row, column] == _slow_uniform(seed, 9, position, 1, None)
            for token in range(4):
                expected = _slow_uniform(seed, 9, position, 0, token)
                assert per_token[row, column, token] == expected


def test_noise_of_cells_equals_one_round_in_unbounded_integers():
    seeds, steps, positions = [2**62 + 12345, 3], [0, 900], [70_000, 5]
    found = cell_gumbel_noise(*map(torch.tensor, (seeds, steps, positions)), 3)
    for cell, (seed, step, position) in enumerate(zip(seeds, steps, positions, strict=True)):
        for number in range(3):
            key = seed + 0xBF58476D1CE4E5B9 * step + 0x94D049BB133111EB * position
            key = _slow_mix((key + 0x9E3779B97F4A7C15 * (number + 1)) % _WORD)
            expected = -math.log(-math.log(((key >> 11) + 0.5) * 2.0**-53))
            assert found[cell, number].item() == pytest.approx(expected, rel=1e-12)


def test_noise_of_cells_is_independent_over_steps_positions_and_numbers():
    """10,000 pairs each: a correlation has a standard error of 0.01; the variance is pi^2 / 6."""
    counts = torch.arange(10_000)
    zeros = torch.zeros_like(counts)
    one = cell_gumbel_noise(zeros + 9, zeros, counts, 2)
    assert one.var() == pytest.approx(math.pi**2 / 6, rel=0.05)
    for other in (
        cell_gumbel_noise(zeros + 9, zeros + 1, counts, 2)[:, 0],
        cell_gumbel_noise(zeros + 9, zeros, counts + 1, 2)[:, 0],
        cell_gumbel_noise(zeros + 10, zeros, counts, 2)[:, 0],
        cell_gumbel_noise(zeros + 9, counts, zeros, 2)[:, 0],
        one[:, 1],
    ):
        assert abs(torch.corrcoef(torch.stack([one[:, 0], other]))[0, 1]) < 0.05


def test_gumbel_arg_max_draws_from_the_softmax():
    """Probabilities 0.7, 0.2, 0.1 over 20,000 draws: standard error at most 0.0033."""
    probs = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    noise = gumbel_noise(torch.arange(200), 0, torch.arange(100).expand(200, -1), torch.arange(3))
    drawn = (probs.log() + noise).argmax(-1).flatten()
    shares = torch.bincount(drawn, minlength=3) / drawn.numel()
    torch.testing.assert_close(shares.double(), probs, atol=0.012, rtol=0.0)


def test_sample_seed_is_63_bits_of_the_documented_hash():
    digest = hashlib.sha256(b"3:gsm8k/test/00001").digest()
    assert sample_seed(3, "gsm8k/test/00001") == int.from_bytes(digest[:8], "big") >> 1
    assert sample_seed(3, "a") != sample_seed(4, "a")
