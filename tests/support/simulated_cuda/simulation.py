"""Start and end the simulation of a CUDA device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo

from pretrain.crops import augmentation
from probes.heads import losses
from tests.support.simulated_cuda.device import (
    CURRENT,
    KIND,
    LEDGER,
    Operators,
    Place,
    TorchFunctions,
    names_device,
    record_place,
    tensors_in,
)

NAME = "simulated CUDA device"
MEMORY_BYTES = 80 * 2**30
_PROPERTIES = SimpleNamespace(
    name=NAME, total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132,
    L2_cache_size=50 * 2**20,
)  # fmt: skip


class Generator(torch.Generator):
    """A random generator on the CPU that can pretend to be on the GPU."""

    _place: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        generator = super().__new__(cls, "cpu")  # pyrefly: ignore[bad-argument-count]
        # pyrefly: ignore[read-only]
        generator._place = torch.device(KIND[0] if names_device(device) else "cpu")
        return generator

    @property
    def device(self) -> torch.device:
        return self._place


class Stream:
    """A CUDA stream of the simulated device."""

    def __init__(self, _: Any = None) -> None: ...

    def wait_stream(self, other: "Stream") -> None:
        LEDGER.complete_early_uploads(other)

    def synchronize(self) -> None:
        LEDGER.count_wait("Stream.synchronize")

    def is_capturing(self) -> bool:
        return False


class CudaEvent:
    """A simulated CUDA event."""

    def record(self, _: Any = None) -> None: ...

    def synchronize(self) -> None:
        LEDGER.complete_copies()


def _set_device(device: Any) -> None:
    CURRENT[0] = device if isinstance(device, int) else torch.device(device).index or 0


CUDA: dict[str, Any] = {
    "is_available": lambda *_, **__: True,
    "is_initialized": lambda *_, **__: True,
    "is_bf16_supported": lambda *_, **__: True,
    "_is_in_bad_fork": lambda *_, **__: False,
    "is_current_stream_capturing": lambda *_, **__: False,
    "device_count": lambda: 1,
    "current_device": lambda: CURRENT[0],
    "set_device": _set_device,
    "get_device_name": lambda *_: NAME,
    "get_device_properties": lambda *_: _PROPERTIES,
    "get_device_capability": lambda *_: (9, 0),
    "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
    "synchronize": lambda *_: LEDGER.count_wait("torch.cuda.synchronize"),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "current_stream": lambda *_: Stream(),
    "Stream": Stream,
    "stream": LEDGER.uploading_early,
    "Event": CudaEvent,
    **dict.fromkeys(
        ("init", "_lazy_init", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all",
         "set_rng_state", "reset_peak_memory_stats", "set_sync_debug_mode"), lambda *_, **__: None,
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0),
}  # fmt: skip
ACCELERATOR: dict[str, Any] = {
    "is_available": lambda *_, **__: True,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": lambda: CURRENT[0],
    "device_count": lambda: 1,
    "set_device_index": lambda _: None,
    "current_stream": lambda *_: Stream(),
}


def patched_autocast(start: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `autocast.__init__` that replaces the device "cuda" with "cpu"."""

    def begin(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *more: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        start(self, device_type, dtype, *more, **options)

    return begin


def patched_autocast_query(query: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a function that reads the autocast state of "cpu" instead of "cuda"."""
    return lambda device="cuda": query("cpu" if device == "cuda" else device)


# The simulation relies on internals of torch, which differ between versions.
TESTED_TORCH = "2.15"


def reason_to_skip() -> str | None:
    """Return why this process cannot simulate a CUDA device, or None if it can."""
    if torch.__version__.split(".")[:2] != TESTED_TORCH.split("."):
        return f"the simulated device is made for torch {TESTED_TORCH}, this is {torch.__version__}"
    if torch.version.cuda is None:
        return "the simulated device asks torch which CUDA kernels there are, this build has none"
    return None


def is_simulated() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_name() == NAME


@contextmanager
def simulation() -> Iterator[None]:
    """Simulate a CUDA device inside a `with` block."""
    with ExitStack() as stack:
        for owner, name, value in _patches():
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(_modes())
        yield


@contextmanager
def _modes() -> Iterator[None]:
    with Operators(), TorchFunctions():
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    for name, value in CUDA.items():
        yield torch.cuda, name, value
    for name, value in ACCELERATOR.items():
        yield torch.accelerator, name, value
    yield torch, "Generator", Generator
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch, "load", patched_load(torch.load)
    yield torch.autocast, "__init__", patched_autocast(torch.autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, patched_autocast_query(getattr(torch, name))
    available = torch.amp.is_autocast_available
    yield torch.amp, "is_autocast_available", patched_autocast_query(available)
    group = "_group_tensors_by_device_and_dtype"
    yield torch._C, group, patched_grouping(getattr(torch._C, group))
    yield torch.nn.Module, "compile", lambda *_, **__: None
    yield augmentation, "_compiled_jitter", lambda: augmentation.apply_one_jitter
    # Without Triton, pixel losses use the same operators as on a CPU.
    yield losses, "find_spec", lambda _: None
    yield threading.Thread, "run", patched_run(threading.Thread.run)


def patched_load(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or not names_device(map_location):
            return load(file, map_location=map_location, **options)
        content = load(file, map_location="cpu", **options)
        for tensor in tensors_in(content):
            record_place(tensor, Place.DEVICE)
        return content

    return loaded


def patched_grouping(group: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that groups tensors by simulated device and dtype."""

    def grouped(tensors: Any, *options: Any) -> Any:
        groups = group(tensors, *options)
        return {
            (tensors_in(members[0])[0].device, dtype): (members, indices)
            for (_, dtype), (members, indices) in groups.items()
        }

    return grouped


def patched_run(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def run_in_modes(self: threading.Thread) -> None:
        with _modes():
            run(self)

    return run_in_modes
