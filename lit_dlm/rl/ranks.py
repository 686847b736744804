"""The processes of a run, as an RL step sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Global rank and world size; by default one process alone, where everything stays as it is."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where tensors that travel between processes must lie."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, which must all call it; on the CPU."""
        if self.world_size == 1:
            return values.cpu()
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.cpu()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every process, possibly none, by rank; all must call it."""
        if self.world_size == 1:
            return [data]
        size = torch.tensor([len(data)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, size)
        lengths = [int(one) for one in sizes]
        # Buffers of one length: collectives want equal shapes.
        own = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=self.device)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffers = [torch.empty_like(own) for _ in lengths]
        torch.distributed.all_gather(buffers, own)
        pairs = zip(buffers, lengths, strict=True)
        return [buffer[:length].cpu().numpy().tobytes() for buffer, length in pairs]


ALONE = Ranks()
