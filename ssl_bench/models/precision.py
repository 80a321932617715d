"""The precision in which matrices are decomposed."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products keep the precision of their factors meanwhile."""
    # Tensors without values, on which FLOPs are counted, have none.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
