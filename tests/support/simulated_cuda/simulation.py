"""Begins and ends the simulation in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._decomp.decompositions_for_jvp
import torch._dynamo
import torch.distributed as dist

from pretrain.crops import augmentation
from tests.support.simulated_cuda import machine
from tests.support.simulated_cuda.asking import Asking
from tests.support.simulated_cuda.autocasting import (
    autocast_of_cuda,
    patched_question,
    patched_start,
)
from tests.support.simulated_cuda.ledger import LEDGER, Ledger
from tests.support.simulated_cuda.operators import Operators
from tests.support.simulated_cuda.places import Place, names_device, put, tensors_in

# It relies on what torch does inside; other versions may do it otherwise.
TESTED_TORCH = "2.15"


def why_not() -> str | None:
    """Why this process cannot have the device; None if it can."""
    if torch.__version__.split(".")[:2] != TESTED_TORCH.split("."):
        return f"the simulated device is made for torch {TESTED_TORCH}, this is {torch.__version__}"
    if torch.version.cuda is None:
        return "the simulated device asks torch which CUDA kernels there are, this build has none"
    return None


def is_simulated() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_name() == machine.NAME


@contextmanager
def simulation() -> Iterator[Ledger]:
    """A process with a CUDA device, in this thread and in those that start meanwhile."""
    with ExitStack() as stack:
        library = autocast_of_cuda()
        stack.callback(library._destroy)
        for owner, name, value in _patches():
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(_modes())
        LEDGER.reset()
        yield LEDGER


@contextmanager
def _modes() -> Iterator[None]:
    with Operators(), Asking():
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    for name, value in machine.CUDA.items():
        yield torch.cuda, name, value
    for name, value in machine.ACCELERATOR.items():
        yield torch.accelerator, name, value
    yield torch, "Generator", machine.Generator
    yield torch, "load", loading(torch.load)
    yield torch.autocast, "__init__", patched_start(torch.autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, patched_question(getattr(torch, name))
    available = torch.amp.is_autocast_available
    yield torch.amp, "is_autocast_available", patched_question(available)
    group = "_group_tensors_by_device_and_dtype"
    yield torch._C, group, grouping(getattr(torch._C, group))
    yield torch.nn.Module, "compile", _compile
    yield augmentation, "_jitter_compiled", lambda: augmentation.jitter_all
    yield threading.Thread, "run", running(threading.Thread.run)
    yield dist, "init_process_group", _joining(dist.init_process_group)


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or not names_device(map_location):
            return load(file, map_location=map_location, **options)
        found = load(file, map_location="cpu", **options)
        for tensor in tensors_in(found):
            put(tensor, Place.DEVICE)
        return found

    return loaded


def grouping(group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of tensors by device and type, under the device that they say."""

    def grouped(tensors: Any, *options: Any) -> Any:
        found = group(tensors, *options)
        return {
            (next(tensors_in(members[0])).device, dtype): (members, indices)
            for (_, dtype), (members, indices) in found.items()
        }

    return grouped


def _compile(self: torch.nn.Module, *_: Any, **__: Any) -> None:
    LEDGER.compiled[type(self).__name__] += 1


def running(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def run_in_modes(self: threading.Thread) -> None:
        with _modes():
            run(self)

    return run_in_modes


def _joining(join: Callable[..., None]) -> Callable[..., None]:
    """Processes that would speak NCCL speak gloo; their tensors are on the host."""

    def joining(backend: str | None = None, *more: Any, **options: Any) -> None:
        join("gloo" if backend == "nccl" else backend, *more, **options)

    return joining
