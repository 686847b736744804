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
    assert buffer.length == steps
    parts = buffer.parts()
    for place in range(4):
        there = [values[place] for rows, values in truth if place < len(rows)]
        np.testing.assert_array_equal(
            parts.of(place, slice(0, len(there))), np.array(there).reshape(-1, 3)
        )
    largest = max((len(part) for part in parts.parts), default=0)
    assert largest <= max(1, min(expected, chunk_bytes // 48))


def test_steps_are_sent_as_they_come_and_forgotten_in_whole_parts():
    """Parts end where they were asked for, after 5 and 9 steps, and where 4 steps fill a chunk."""
    buffer, truth = _filled(5, leave={}, chunk_bytes=48 * 4, expected=16)
    first = buffer.parts()
    assert [len(part) for part in first.parts] == [4, 1]
    rows, values = torch.arange(4), torch.arange(12).view(4, 3)
    for step in range(4):
        buffer.append(rows, values + step)
    buffer.forget(4)
    buffer.forget(4)
    second = buffer.parts()
    assert second.first_step == 4
    assert [len(part) for part in second.parts] == [1, 3, 1]
    np.testing.assert_array_equal(second.of(1, slice(4, 5))[0], truth[4][1][1])
    np.testing.assert_array_equal(second.of(1, slice(6, 9))[:, 0], [4, 5, 6])
    np.testing.assert_array_equal(first.of(2, slice(0, 5)), [values[2] for _, values in truth])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_come_back_from_the_device_without_waiting_for_it():
    device = torch.device("cuda")
    copies = HostCopies(device)
    buffer = StepBuffer(4, 3, torch.int32, copies, expected_steps=8, max_chunk_bytes=48 * 5)
    rows, values = torch.arange(4, device=device), torch.arange(12, device=device).view(4, 3)
    steps = [values + step for step in range(40)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            buffer.append(rows, step)
        parts = buffer.parts()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies.wait()
    torch.testing.assert_close(torch.cat(parts.parts), torch.stack(steps).int().cpu())
