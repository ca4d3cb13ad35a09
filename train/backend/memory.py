"""Memory of the devices, for words about its lack."""

from __future__ import annotations

import torch


def peak_device_bytes() -> int | None:
    """The most that PyTorch's allocator had given out on this process's device; None where there is none to ask."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
