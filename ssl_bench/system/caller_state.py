"""Leave a caller's module and process as they were: modes, memory, random numbers, precision."""

import random
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Generator[None]:
    """Switch a module to evaluation mode, and give each submodule its own mode back afterwards.

    Only the attribute `training` changes. A `train` of the module's own may do more, such as merge
    weights, and a second call need not undo that exactly.
    """
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def memory_restored(module: nn.Module) -> Generator[None]:
    """Give the tensors of a module that is moved to another device their memory back afterwards.

    The optimizer of a training and modules that share weights may hold the same tensors.
    """
    tensors = [one for p in module.parameters() for one in (p, p.grad) if one is not None]
    memory = [(one, one.data) for one in tensors]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for tensor, before in memory:
            if tensor.device != before.device:
                tensor.data = before
        for part, own in buffers:
            for name, buffer in own.items():
                now = part._buffers.get(name)
                if now is not None and buffer is not None and now.device != buffer.device:
                    part._buffers[name] = buffer


@contextmanager
def undisturbed() -> Generator[None]:
    """Compute as in a new process, and leave the caller's process as it was.

    Inside, torch records gradients and has its own defaults: no autocast, float32, the CPU.
    Afterwards these are the caller's again, as are the current GPU, TF32 and the states of all
    random number generators, so that a training goes on as if nothing had happened.
    """
    numbers = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_gpu = torch.cuda.is_initialized()
    of_gpus = torch.cuda.get_rng_state_all() if on_gpu else []
    current = torch.cuda.current_device() if on_gpu else 0
    precision = _precision()
    dtype = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            # Without its cache, which torch empties at the end of the outermost autocast alone.
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
            # Not always, because each call of torch takes longer inside.
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        for backend, name, value in precision:
            setattr(backend, name, value)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(current)
            torch.cuda.set_rng_state_all(of_gpus)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(numbers[2])


def _precision() -> list[tuple[Any, str, Any]]:
    """Return what decides on TF32 as (owner, attribute, value), in torch's old or new names.

    torch refuses to read the old names once one of the new ones was set.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    found: list[tuple[Any, str, Any]] = []
    for backend, new in ((matmul, [matmul]), (cudnn, [cudnn, cudnn.conv, cudnn.rnn])):
        try:
            found.append((backend, "allow_tf32", backend.allow_tf32))
        except RuntimeError:
            found += [(one, "fp32_precision", one.fp32_precision) for one in new]
    return found
