"""Prints the bytes that a process grows by at the peak of loading a model, and its weights' own.

In a process of its own: what others have allocated and freed decides where the allocator puts
tensors, and with it how much of their memory is new.
"""

import ctypes
import gc
import sys
from pathlib import Path

import torch

from lit_dlm.backbones import load_backbone


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def main(folder: str) -> None:
    torch.use_deterministic_algorithms(True)  # as a trainer that is deterministic leaves them
    load_backbone(folder)  # what the first load allocates once is not counted
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide a peak
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    backbone = load_backbone(folder)
    sys.stdout.write(f"{memory('VmHWM') - before} {sum(p.nbytes for p in backbone.parameters())}")


if __name__ == "__main__":
    main(sys.argv[1])
