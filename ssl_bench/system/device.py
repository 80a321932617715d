"""The device of the work, tensors on their way there and back, half precision, provenance."""

import os
import platform
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system.process import get_process_info


def choose_device(name: str | None) -> torch.device:
    """The asked device, or a GPU if there is one; it is the current one from here on.

    Float32 is float32 there: without TF32, which torch allows in convolutions unless told, and
    which some containers switch on for products (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).

    Raises:
        ConfigurationError: torch does not know the name, or `get_process_info` this process.
        MachineError: the device is not there.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    place = get_process_info()
    if name.split(":")[0] == "cuda" and place.count > 1:
        # Without a number of its own every process would take memory of the first device.
        if place.local_rank is None:
            raise ConfigurationError(
                f"LOCAL_RANK expects the GPU of each of {place.count} processes, and is not set; "
                "start them with torchrun"
            )
        name = f"cuda:{place.local_rank}"
    device = _usable(name)
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        if device.index is not None:
            # Events and streams that name no device are those of the current one.
            torch.cuda.set_device(device)
    return device


def parse_device(name: str) -> torch.device:
    """The device of a name, whether it is there or not.

    Raises:
        ConfigurationError: torch does not know the name.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"expected cpu, cuda or cuda:N, got the device {name!r}", hint=("--device", "cpu")
        ) from error


def _usable(name: str) -> torch.device:
    device = parse_device(name)
    try:
        # The device "meta" makes tensors, but none that holds a number.
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError) as error:
        raise MachineError(f"device {name} is not usable here", hint=("--device", "cpu")) from error
    return device


def float64_device(device: torch.device) -> torch.device:
    """Where float64 is computed for a device: there, or on the CPU for MPS, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    """A tensor in float64, where `float64_device` says."""
    return tensor.to(float64_device(tensor.device)).double()


def visible_devices() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    What the user, SLURM or a container set there counts, whether numbers or names.
    """
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else named.split(",")
    return [name.strip() for name in names][:count]


def free_gpu_memory(device: torch.device) -> int:
    """Bytes that tensors may still take on a GPU, those among them that torch keeps for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without a wait for what the device was given before.

    What comes from memory that is not pinned would wait; a pinned copy costs the host less.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in host memory, with one wait for all of them; those that are there stay."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    found = []
    for tensor in tensors:
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found.append(host.copy_(tensor, non_blocking=True))
        else:
            found.append(tensor.cpu())
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return found


_PRODUCTS = frozenset(
    (
        *(functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.einsum),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm),
        *(torch.addmm, torch.baddbmm, functional.scaled_dot_product_attention),
    )
)
# torch's names of processors whose bfloat16 oneDNN does not multiply.
_WITHOUT = ("DEFAULT", "NO AVX", "AVX2")


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products keep the precision of their factors meanwhile."""
    # Tensors without values, on which FLOPs are counted, have none.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Generator[None]:
    """Products in a precision below float32, as `torch.autocast` has them; float32 switches it off.

    Where a processor has no bfloat16, factors are rounded to it, multiplied in float32, and the
    result is rounded, which spares torch's slow products there. The two differ in the order of
    sums alone.
    """
    rounded = autocast_dtype(device, dtype) != dtype
    with (
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        RoundedProducts() if rounded else nullcontext(),
    ):
        yield


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In what `autocast` multiplies: float32 where a processor has no bfloat16."""
    without = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _WITHOUT
    return torch.float32 if without and dtype == torch.bfloat16 else dtype


class RoundedProducts(TorchFunctionMode):
    """Products of factors rounded to bfloat16, computed in float32 and rounded again.

    Only inside of `torch.autocast`, and not where that is switched off. Gradients are rounded
    where those of `torch.autocast` are, as every cast rounds what flows back through it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        if func not in _PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*given[0], **given[1])
        with torch.autocast("cpu", enabled=False):
            factors, options = tree_map_only(Tensor, _rounded, given)
            product = func(*factors, **options)
        return product.to(torch.bfloat16) if product.dtype == torch.float32 else product


def _rounded(factor: Tensor) -> Tensor:
    # As autocast: no indices, masks or float64.
    if not factor.is_floating_point() or factor.dtype == torch.float64:
        return factor
    return factor.to(torch.bfloat16).float()


def describe_device(device: torch.device) -> str:
    """The hardware and how it computes: "cuda: NVIDIA H200, TF32 off", "cpu: x86_64, 2 threads"."""
    if device.type == "cuda":
        tf32 = "on" if torch.backends.cudnn.allow_tf32 else "off"
        return f"cuda: {torch.cuda.get_device_name(device)}, TF32 {tf32}"
    return f"{device.type}: {platform.machine()}, {torch.get_num_threads()} threads"


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
def restore_tensor_storage(module: nn.Module) -> Generator[None]:
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
def preserve_process_state() -> Generator[None]:
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
