"""Choose the device and the precision of computations, and restore the caller's torch state."""

import os
import platform
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system.process import get_process_info, return_freed_memory

# Mask of the bits that hold the exponent of a float32.
_EXPONENT_BITS = 0x7F800000
# Functions that autocast computes in bfloat16.
_PRODUCTS = frozenset(
    (
        *(functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.einsum),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm),
        *(torch.addmm, torch.baddbmm, functional.scaled_dot_product_attention),
    )
)
# CPU capabilities, as torch names them, for which oneDNN has no bfloat16 matrix product.
_CPUS_WITHOUT_BFLOAT16 = ("DEFAULT", "NO AVX", "AVX2")


def choose_device(name: str | None) -> torch.device:
    """Return the requested device. If it is a GPU, make it the current GPU and turn TF32 off.

    By default torch uses TF32 in convolutions, which lowers the precision of float32. Some
    containers set the environment variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which turns TF32 on
    for matrix products too.

    Args:
        name: Name as in torch, such as "cpu" or "cuda:1". The default is a GPU if the machine has
            one, and the CPU otherwise. If torchrun started several processes on GPUs, each process
            uses the GPU with the number LOCAL_RANK.

    Raises:
        ConfigurationError: The name is unknown, or torchrun's variables have wrong values.
        MachineError: The device is not available on this machine.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    process = get_process_info()
    if name.split(":")[0] == "cuda" and process.world_size > 1:
        # Each process needs its own GPU, because all of them would otherwise use the first GPU.
        if process.local_rank is None:
            raise ConfigurationError(
                f"a run of {process.world_size} processes (WORLD_SIZE) needs the environment "
                "variable LOCAL_RANK, the number of this process's GPU. Start the processes with "
                "torchrun"
            )
        name = f"cuda:{process.local_rank}"
    device = _require_usable(name)
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        if device.index is not None:
            # CUDA events and streams use the current GPU if they are created without a device.
            torch.cuda.set_device(device)
    return device


def parse_device(name: str) -> torch.device:
    """Return the torch device with this name. The device need not exist on this machine."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"unknown device {name!r}, expected cpu, cuda or cuda:N", hint=("--device", "cpu")
        ) from error


def _require_usable(name: str) -> torch.device:
    device = parse_device(name)
    try:
        # Read a number, because tensors on the device "meta" contain no numbers.
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError) as error:
        raise MachineError(
            f"device {name} is not available on this machine", hint=("--device", "cpu")
        ) from error
    return device


def visible_devices() -> list[str]:
    """Return the names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES.

    If this variable is not set, the names are the numbers "0", "1" and so on.
    """
    count, variable = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if variable is None else variable.split(",")
    return [name.strip() for name in names][:count]


def describe_device(device: torch.device) -> str:
    """Return a text such as "cuda: NVIDIA H200, TF32 off" or "cpu: x86_64, 2 threads"."""
    if device.type == "cuda":
        tf32 = "on" if torch.backends.cudnn.allow_tf32 else "off"
        return f"cuda: {torch.cuda.get_device_name(device)}, TF32 {tf32}"
    return f"{device.type}: {platform.machine()}, {torch.get_num_threads()} threads"


class PeakMemory:
    """Measurement of the peak memory use of this process, which starts with the constructor.

    For a GPU, the memory of tensors on the GPU is measured. For the CPU, the resident memory of the
    process is measured, which is only possible on Linux.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._can_read = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        return_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._can_read = False

    def read(self) -> int | None:
        """Return the peak memory use in bytes so far, or None if it is unknown."""
        if not self._can_read:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError, StopIteration, ValueError):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
        return None


def free_gpu_memory(device: torch.device) -> int:
    """Return the number of free bytes on a GPU, including unused memory that torch has reserved."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device.

    If the device is a CUDA GPU, the CPU does not wait until the GPU has finished earlier work. The
    copy goes through pinned memory, which the GPU can read while the CPU continues.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """Copy a tensor to a device, without waiting for earlier work of a GPU.

    The GPU copies the tensor in a separate stream. Work that is queued after this function waits
    for the copy.

    Args:
        tensor: A tensor. If it is not in pinned memory, use `to_device`, because the CPU would wait
            for the copy.
        device: The target device.
        copy: Whether to return a copy even if the tensor is already on the device.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device, copy=copy)
    computing = torch.cuda.current_stream(device)
    copying = _copy_stream(torch.cuda.current_device() if device.index is None else device.index)
    with torch.cuda.stream(copying):
        copied = tensor.to(device, non_blocking=True)
    computing.wait_stream(copying)
    # The memory of the copy must not be reused before the computations that read it.
    copied.record_stream(computing)
    return copied


@cache
def _copy_stream(gpu: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(gpu)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to CPU memory.

    The CPU waits once for all copies, and not once for each tensor.
    """
    copies = [
        torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
        if one.is_cuda
        else one.cpu()
        for one in tensors
    ]
    for device in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def float64_device(device: torch.device) -> torch.device:
    """Return the given device, or the CPU instead of MPS, which does not support float64."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    return tensor.to(float64_device(tensor.device)).double()


def floor_to_power_of_two(numbers: Float[Tensor, "*some"]) -> Float[Tensor, "*some"]:
    """Round each non-negative number down to a power of two, but not below 2^-126.

    The numbers must lie in the range of float32.
    """
    positive = numbers.float().clamp(min=torch.finfo(torch.float32).tiny)
    # Clearing the mantissa is exact on every device. Logarithms would not be exact.
    power = (positive.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power.to(numbers.dtype)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Generator[None]:
    """Compute matrix products and convolutions in `dtype`, as `torch.autocast` does.

    If `dtype` is float32, autocast is turned off. On a CPU without bfloat16 instructions, torch's
    bfloat16 products are slow, so `RoundedProducts` replaces them. The results of `RoundedProducts`
    differ from torch's only because sums are computed in another order.
    """
    is_emulated = autocast_dtype(device, dtype) != dtype
    with (
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        RoundedProducts() if is_emulated else nullcontext(),
    ):
        yield


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off, so products have the dtype of their factors."""
    # torch has no autocast for the device "meta", on which FLOPs are counted.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `autocast` computes products.

    The result is `dtype`. For bfloat16 on a CPU without bfloat16 instructions, the result is
    float32.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return dtype
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.float32 if capability in _CPUS_WITHOUT_BFLOAT16 else dtype


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether a CPU has instructions for bfloat16 products (AVX512-BF16 or AMX-BF16)."""
    # Older versions of torch do not have this function.
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, Any])()
    names = ("avx512_bf16", "amx_bf16")
    return device.type == "cpu" and any(capabilities.get(name) for name in names)


class RoundedProducts(TorchFunctionMode):
    """Emulation of bfloat16 products: round the factors, multiply in float32, round the product.

    The class has no effect where autocast is off. Gradients are rounded as with `torch.autocast`,
    because the backward pass of a cast is also a cast.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = (tuple(args), dict(kwargs or {}))
        if func not in _PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*inputs[0], **inputs[1])
        with torch.autocast("cpu", enabled=False):
            rounded_args, rounded_kwargs = tree_map_only(Tensor, _round_factor, inputs)
            product = func(*rounded_args, **rounded_kwargs)
        return product.to(torch.bfloat16) if product.dtype == torch.float32 else product


def _round_factor(factor: Tensor) -> Tensor:
    # As in autocast, indices, masks and float64 tensors are not rounded.
    if not factor.is_floating_point() or factor.dtype == torch.float64:
        return factor
    return factor.to(torch.bfloat16).float()


@contextmanager
def evaluation_mode(module: nn.Module) -> Generator[None]:
    """Switch a module to evaluation mode in this context, then restore the mode of each submodule.

    The method `train` is not called, because a module may override this method, for example to
    merge weights, which cannot be undone exactly.
    """
    submodules = [submodule for submodule in module.modules() if submodule.training]
    try:
        for part in submodules:
            part.training = False
        yield
    finally:
        for part in submodules:
            part.training = True


@contextmanager
def restore_tensor_storage(module: nn.Module) -> Generator[None]:
    """Move the tensors of a module back to their original device and memory on exit.

    In the context, the module may be moved to another device. Each tensor gets its original memory
    again, because an optimizer or another module may share this memory.
    """
    tensors = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
    previous_data = [(tensor, tensor.data) for tensor in tensors]
    previous_buffers = [(part, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for tensor, data in previous_data:
            if tensor.device != data.device:
                tensor.data = data
        for part, buffers in previous_buffers:
            for name, buffer in buffers.items():
                current = part._buffers.get(name)
                if current is not None and buffer is not None and current.device != buffer.device:
                    part._buffers[name] = buffer


@contextmanager
def preserve_process_state() -> Generator[None]:
    """Use torch's default settings in this context, then restore the settings of the caller.

    In the context, gradients are recorded, autocast is off, the default dtype is float32 and the
    default device is the CPU. Afterwards these settings, the current GPU, TF32 and the states of
    all random number generators are restored. A training loop that calls a probe therefore
    continues with bitwise identical results.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    has_cuda = torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if has_cuda else []
    current_gpu = torch.cuda.current_device() if has_cuda else 0
    tf32_settings = _tf32_settings()
    dtype = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            # Autocast does not use its cache, which torch clears only at the end of the outermost
            # context.
            for device_type in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device_type, enabled=False, cache_enabled=False))
            # Enter this context only if needed, because it makes each call of torch slower.
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        for backend, name, value in tf32_settings:
            setattr(backend, name, value)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(current_gpu)
            torch.cuda.set_rng_state_all(cuda_states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _tf32_settings() -> list[tuple[Any, str, Any]]:
    """Return torch's TF32 settings as tuples of the owning object, attribute name and value.

    Torch has old and new attributes for TF32. After a new attribute has been set, reading an old
    attribute raises an error. The new attributes are only returned in this case.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = []
    for backend, owners in ((matmul, [matmul]), (cudnn, [cudnn, cudnn.conv, cudnn.rnn])):
        try:
            settings.append((backend, "allow_tf32", backend.allow_tf32))
        except RuntimeError:
            settings += [(owner, "fp32_precision", owner.fp32_precision) for owner in owners]
    return settings


def value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Return how often each number from 0 to `size` - 1 occurs in `values`.

    With `weights`, return the sum of the weights for each number instead. `torch.bincount` is only
    used on a CPU, because on a GPU it would make the CPU wait for the GPU.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, weights, size)
    return scatter_value_counts(values, size, weights)


def scatter_value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Return how often each number from 0 to `size` - 1 occurs in `values`.

    With `weights`, return the sum of the weights for each number instead. Unlike `torch.bincount`,
    this function does not make the CPU wait for a GPU.
    """
    if weights is None:
        ones = torch.ones(1, dtype=torch.int64, device=values.device)
        return ones.new_zeros(size).scatter_add_(0, values.long(), ones.expand(len(values)))
    exact = to_float64(weights)
    return exact.new_zeros(size).scatter_add_(0, values.long().to(exact.device), exact)
