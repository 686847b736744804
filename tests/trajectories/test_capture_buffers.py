from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_dlm.trajectories.capture import HostCopies, StepBuffer

CPU = torch.device("cpu")


def _filled(steps: int, *, leave: dict[int, int], chunk_bytes: int, expected: int):
    """Random steps of 4 rows and 3 of 5 columns; rows from ``leave[step]`` on have left by then."""
    generator = torch.Generator().manual_seed(0)
    buffer = StepBuffer(
        4,
        3,
        torch.int32,
        HostCopies(CPU),
        expected_steps=expected,
        first_column=2,
        tail=3,
        max_chunk_bytes=chunk_bytes,
    )
    rows, truth = torch.arange(4), []
    for step in range(steps):
        if step in leave:
            rows = rows[rows < leave[step]]
        values = torch.randint(0, 99, (len(rows), 5), generator=generator)
        buffer.append(rows, values)
        truth.append((rows.numpy(), values[:, 2:].numpy()))
    return buffer, truth


@pytest.mark.parametrize("steps", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk_bytes", [1, 48 * 5, 48 * 16, 2**20])
@pytest.mark.parametrize("expected", [1, 16, 1000])
def test_every_step_comes_back_whatever_the_size_of_the_parts(steps, chunk_bytes, expected):
    """A step of 4 x 3 int32 takes 48 bytes; rows leave at steps 3 and 20."""
    buffer, truth = _filled(steps, leave={3: 3, 20: 1}, chunk_bytes=chunk_bytes, expected=expected)
    tail = torch.tensor([7, 8, 9])
    assert buffer.length == steps
    parts, facts = buffer.finish(tail[:1], tail[1:])
    assert facts.tolist() == [7, 8, 9]
    joined = torch.cat(parts).numpy()
    assert joined.shape == (steps, 4, 3)
    for step, (rows, values) in enumerate(truth):
        np.testing.assert_array_equal(joined[step, rows], values)
    largest = max(len(part) for part in parts)
    assert largest <= max(1, min(expected, chunk_bytes // 48))


def test_the_last_part_and_the_tail_are_one_piece_of_memory():
    """So that one copy brings them to the host."""
    buffer, _ = _filled(10, leave={}, chunk_bytes=2**20, expected=16)
    (part,), facts = buffer.finish(torch.tensor([1, 2, 3]))
    assert facts.data_ptr() == part.data_ptr() + 10 * 48


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_come_back_from_the_device_without_waiting_for_it():
    device = torch.device("cuda")
    copies = HostCopies(device)
    buffer = StepBuffer(4, 3, torch.int32, copies, expected_steps=8, tail=1, max_chunk_bytes=48 * 5)
    rows, values = torch.arange(4, device=device), torch.arange(12, device=device).view(4, 3)
    steps = [values + step for step in range(40)]
    flag = torch.ones(1, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            buffer.append(rows, step)
        parts, facts = buffer.finish(flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies.wait()
    assert facts.tolist() == [1]
    torch.testing.assert_close(torch.cat(parts), torch.stack(steps).int().cpu())
