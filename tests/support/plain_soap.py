"""SOAP restated in NumPy, and weights with gradients to try it on."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.optimizers.soap import SOAP

# Of the mean gradient, of its square and of the statistics.
BETAS = (0.9, 0.97, 0.8)


class PlainSoap:
    """The algorithm for one parameter, one matrix at a time, the mean gradient never rotated."""

    def __init__(self, weight: np.ndarray, *, limit: int, frequency: int, phase: int = 0) -> None:
        self.weight, self.frequency, self.phase = weight, frequency, phase
        self.steps = -1
        self.mean, self.square = np.zeros_like(weight), np.zeros_like(weight)
        sizes = weight.shape if weight.ndim > 1 else ()
        self.moments = {i: np.zeros((n, n)) for i, n in enumerate(sizes) if n <= limit}
        self.bases: dict[int, np.ndarray] = {}

    def turned(self, tensor: np.ndarray, *, back: bool = False) -> np.ndarray:
        for axis, basis in self.bases.items():
            matrix = basis if back else basis.T
            tensor = np.moveaxis(np.tensordot(matrix, tensor, axes=(1, axis)), 0, axis)
        return tensor

    def learn(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.steps += 1
        if self.steps > 0:
            self.move(gradient, lr, decay)
        for axis, moment in self.moments.items():
            flat = np.moveaxis(gradient, axis, 0).reshape(gradient.shape[axis], -1)
            moment *= BETAS[2]
            moment += (1 - BETAS[2]) * flat @ flat.T
        if self.steps == 0:
            self.bases = {i: np.linalg.eigh(m)[1][:, ::-1] for i, m in self.moments.items()}
        elif (self.steps + self.phase) % self.frequency == 0:
            self.renew()

    def move(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * self.turned(gradient) ** 2
        mean = self.turned(self.mean) / (1 - BETAS[0] ** self.steps)
        # The published code adds epsilon before it corrects the square for its bias.
        unbiased = np.sqrt(1 - BETAS[1] ** self.steps)
        direction = mean / ((np.sqrt(self.square) + 1e-8) / unbiased)
        self.weight = (self.weight - lr * self.turned(direction, back=True)) * (1 - lr * decay)

    def renew(self) -> None:
        for axis, basis in self.bases.items():
            values = np.einsum("ij,ik,kj->j", basis, self.moments[axis], basis)
            order = np.argsort(-values)
            self.square = np.take(self.square, order, axis=axis)
            self.bases[axis] = np.linalg.qr(self.moments[axis] @ basis[:, order])[0]


# Square, or long enough on the other axes: the first statistics then have full rank, and their
# eigenbasis is unique. 40 is above the limit; equal shapes are stacked.
SHAPES = [(12, 12), (8, 8), (12, 12), (40, 12), (12, 40), (7,), (7,), (), (12, 12), (4, 3, 2, 2)]
SHAPES += [(1, 6, 6)]
LATE = {2: 7, 6: 3, 9: 1}
LIMIT, FREQUENCY = 20, 10


def weights_and_gradients(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    draws = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(steps + 1)
    ]
    return draws[0], draws[1:]


def schedule(step: int) -> tuple[float, float]:
    return 1e-2 * (1 + step % 7), 0.05 * (step % 4)


def has_gradient(index: int, step: int) -> bool:
    """Some start late, and one pauses in between."""
    return step >= LATE.get(index, 0) and not (index == 8 and 20 <= step < 23)


def optimise(optimizer: SOAP, parameters: Sequence[nn.Parameter], noise: Sequence) -> None:
    for step, gradients in enumerate(noise):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"] = schedule(step)
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            coupled = gradient + 0.3 * parameter.detach()
            parameter.grad = coupled if has_gradient(index, step) else None
        optimizer.step()
