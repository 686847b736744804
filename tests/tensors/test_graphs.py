"""What only a GPU can show of graphs; tests/decoding/test_graphed.py emulates them on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_dlm.tensors.graphs import Graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def called_on_rising_numbers(function: Callable[[Tensor], Tensor]) -> list[float]:
    graphs, memory = Graphs("a function"), torch.ones(3, device="cuda")
    results = []
    for number in range(5):
        memory.fill_(number)
        results.append(graphs.run("key", lambda: function(memory)).item())
    return results


def test_a_replay_reads_what_is_in_memory_by_then():
    assert called_on_rising_numbers(lambda memory: memory.sum() * 2) == [0, 6, 12, 18, 24]


def test_a_broken_recording_leaves_torch_as_it_was(caplog: pytest.LogCaptureFixture):
    stream = torch.cuda.current_stream()
    for _ in range(2):
        found = called_on_rising_numbers(lambda memory: memory.sum() * memory[0].item())
        assert found == [0, 3, 12, 27, 48]
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
    assert ["a function: no CUDA graph" in line for line in caplog.messages] == [True, True]
    test_a_replay_reads_what_is_in_memory_by_then()
