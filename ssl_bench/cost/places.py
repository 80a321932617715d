"""Where a unit of work is made: on a device, or on one that has shapes and no values."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ssl_bench.system import transfers

T = TypeVar("T")


@runtime_checkable
class Place(Protocol):
    """A device to make things on."""

    @property
    def device(self) -> torch.device:
        """Of the tensors that are made."""
        ...

    def built(
        self, make: Callable[[torch.device], T], modules: Callable[[T], Sequence[nn.Module]]
    ) -> T:
        """What is made on the device that it is given, with its modules where they belong."""
        ...

    def sent(self, tensor: Tensor) -> Tensor:
        """From the host's memory."""
        ...

    def fetched(self, tensors: Sequence[Tensor]) -> None:
        """To the host's memory, with one wait."""
        ...


@dataclass(frozen=True)
class RealPlace:
    """A device that is there."""

    device: torch.device

    def built(
        self, make: Callable[[torch.device], T], modules: Callable[[T], Sequence[nn.Module]]
    ) -> T:
        made = make(self.device)
        for module in modules(made):
            module.to(self.device)
        return made

    def sent(self, tensor: Tensor) -> Tensor:
        return transfers.sent(tensor, self.device)

    def fetched(self, tensors: Sequence[Tensor]) -> None:
        transfers.fetched(tensors)


@dataclass(frozen=True)
class HollowPlace:
    """A device of which only the shapes are there, inside `hollow`.

    Attributes:
        device: "cuda", or "cpu" where something is differentiated, for autograd asks for a real
            device.
    """

    device: torch.device

    def built(
        self, make: Callable[[torch.device], T], modules: Callable[[T], Sequence[nn.Module]]
    ) -> T:
        """A copy without values of what is made with them: some initialisers look at them."""
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            made = make(torch.device("cpu"))
        tensors = chain.from_iterable((*m.parameters(), *m.buffers()) for m in modules(made))
        found = copy.deepcopy(made, {id(tensor): self._emptied(tensor) for tensor in tensors})
        for module in modules(found):
            # Where they are already; torch cannot always swap what has no values.
            vars(module)["to"] = lambda *_, here=module: here
        return found

    def sent(self, tensor: Tensor) -> Tensor:
        return transfers.sent(tensor, self.device)

    def fetched(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.to("cpu")

    def _emptied(self, tensor: Tensor) -> Tensor:
        wanted = tensor.requires_grad
        empty = torch.empty_like(tensor, device=self.device, requires_grad=wanted)
        return nn.Parameter(empty, wanted) if isinstance(tensor, nn.Parameter) else empty


@contextmanager
def hollow() -> Iterator[None]:
    """Tensors that are made meanwhile have a shape, a type and a device, and no values."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        yield
