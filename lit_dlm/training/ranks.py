"""What processes of a run tell each other outside of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """Global rank and world size; by default a single process, which communicates nothing."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU  # where tensors that are sent between processes must be

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of a tensor over all processes, on the CPU; all must call it."""
        if self.world_size == 1:
            return values.cpu()
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.cpu()

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every process, possibly none, by rank; all must call it."""
        if self.world_size == 1:
            return [data]
        size = torch.tensor([len(data)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, size)
        lengths = [int(one) for one in sizes]
        # Buffers of one length: collectives need equal shapes.
        own = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=self.device)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffers = [torch.empty_like(own) for _ in lengths]
        torch.distributed.all_gather(buffers, own)
        pairs = zip(buffers, lengths, strict=True)
        return [buffer[:length].cpu().numpy().tobytes() for buffer, length in pairs]


ALONE = Ranks()
