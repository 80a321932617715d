"""What `torch.cuda` and `torch.accelerator` say of the machine."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.simulated_cuda.asking import CURRENT
from tests.support.simulated_cuda.ledger import LEDGER
from tests.support.simulated_cuda.places import KIND, names_device

NAME = "simulated CUDA device"
MEMORY_BYTES = 80 * 2**30
_PROPERTIES = SimpleNamespace(
    name=NAME, total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132,
    L2_cache_size=50 * 2**20,
)  # fmt: skip


class Generator(torch.Generator):
    """Draws on the host and says it is where it was asked to be."""

    _place: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]
        made._place = torch.device(KIND[0] if names_device(device) else "cpu")
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._place


class Stream:
    """The only one; everything in it is done as soon as it is asked for."""

    cuda_stream, device, device_index = 0, torch.device("cuda", 0), 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        LEDGER.wait("Stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or CudaEvent()

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True


class CudaEvent:
    """Waiting for it is waiting for what was asked for before it, not for all."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None:
        LEDGER.wait_for_event()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _set_device(device: Any) -> None:
    CURRENT[0] = device if isinstance(device, int) else torch.device(device).index or 0


def _set_sync_debug_mode(mode: int | str) -> None:
    LEDGER.forbids_waits = mode in (2, "error")


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _true(*_: Any, **__: Any) -> bool:
    return True


def _false(*_: Any, **__: Any) -> bool:
    return False


CUDA: dict[str, Any] = {
    "is_available": _true,
    "is_initialized": _true,
    "is_bf16_supported": _true,
    "_is_in_bad_fork": _false,
    "is_current_stream_capturing": _false,
    "device_count": lambda: 1,
    "current_device": lambda: CURRENT[0],
    "set_device": _set_device,
    "get_device_name": lambda *_: NAME,
    "get_device_properties": lambda *_: _PROPERTIES,
    "get_device_capability": lambda *_: (9, 0),
    "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
    "synchronize": lambda *_: LEDGER.wait("torch.cuda.synchronize"),
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: 2 if LEDGER.forbids_waits else 0,
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "current_stream": lambda *_: Stream(),
    "default_stream": lambda *_: Stream(),
    "stream": lambda *_: contextlib.nullcontext(),
    "Stream": Stream,
    "Event": CudaEvent,
    **dict.fromkeys(
        ("init", "_lazy_init", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all",
         "set_rng_state", "reset_peak_memory_stats"), _nothing,
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), _zero),
}  # fmt: skip
ACCELERATOR: dict[str, Any] = {
    "is_available": _true,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": lambda: CURRENT[0],
    "device_count": lambda: 1,
    "set_device_index": _nothing,
    "synchronize": lambda *_: LEDGER.wait("torch.accelerator.synchronize"),
    "current_stream": lambda *_: Stream(),
}
