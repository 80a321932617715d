"""Test that a probe changes neither the user's model nor the settings of PyTorch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ssl_bench
from tests.support import own_module

FEW: dict[str, Any] = {"dataset.num_train": 6, "dataset.num_val": 4}
MODES = {"trunk.1", "trunk.1.mlp", "dropout"}
"""Submodules in evaluation mode. All others are in training mode."""


def module_in_training() -> own_module.Own:
    module = own_module.own().train()
    for name in MODES:
        module.get_submodule(name).training = False
    return module


def training_modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}


def count_hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "from_module": lambda module, _: ssl_bench.Encoder.from_module(module),
    "probe": lambda module, out: ssl_bench.probe(module, task="geometry", layer=-1, out=out, **FEW),
    "extract features": lambda module, _: ssl_bench.extract_features(
        ssl_bench.Encoder.from_module(module), torch.rand(2, 3, 32, 32), layers=[0]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_submodule_keeps_its_mode(tmp_path, call):
    module = module_in_training()
    before = training_modes(module)

    CALLS[call](module, tmp_path)

    assert training_modes(module) == before
    assert count_hooks(module) == 0
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_an_interrupted_pass_restores_modes_and_hooks():
    module = module_in_training()
    before = training_modes(module)
    encoder = ssl_bench.Encoder.from_module(module)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.get_submodule("trunk.1.mlp").register_forward_hook(interrupt)
    for call in (
        lambda: ssl_bench.Encoder.from_module(module),
        lambda: ssl_bench.extract_features(encoder, torch.rand(2, 3, 32, 32)),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert training_modes(module) == before
        assert count_hooks(module) == 1
    handle.remove()


def test_no_forward_pass_is_in_training_mode(tmp_path):
    module = own_module.own()
    encoder, observed = ssl_bench.Encoder.from_module(module), set[bool]()
    module.train()
    module.embed.register_forward_hook(lambda part, *_: observed.add(part.training))
    module.trunk[0].register_forward_hook(lambda part, *_: observed.add(part.training))

    ssl_bench.extract_features(encoder, torch.rand(2, 3, 32, 32))
    ssl_bench.probe(encoder, task="conditioning", layer=0, out=tmp_path, **FEW)

    assert observed == {False}


def train(between: Callable[[nn.Module, int], Any]) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module = own_module.Own().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        images = torch.rand(4, 3, 32, 32) + float(np.random.rand()) + random.random()
        module(images).square().mean().backward()
        between(module, step)
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    # The random numbers show whether `between` has changed the random state.
    return [*weights, torch.rand(2), torch.tensor([np.random.rand(), random.random()])]


@pytest.mark.slow
def test_training_continues_with_bitwise_identical_weights_after_a_probe(tmp_path):
    def between(module: nn.Module, step: int) -> None:
        # After step 0, run all tasks that generated scenes support, with the module itself. After
        # step 1, run the tasks of generated objects, with an encoder made from the module.
        encoder = ssl_bench.Encoder.from_module(module, epoch=step) if step else module
        dataset, task = ("toy_objects", "knn,classification,clustering") if step else ("toy", "all")
        ssl_bench.probe(encoder, task=task, dataset=dataset, layer=1, out=tmp_path, **FEW)

    unprobed, probed = train(lambda *_: None), train(between)

    assert all(map(torch.equal, unprobed, probed))


class RandomAndStoring(own_module.Own):
    def forward(self, images: Tensor) -> Tensor:
        output = super().forward(images + 0 * torch.rand(1) * float(np.random.rand()))
        self.outputs = [output * 1]
        return output


@pytest.mark.slow
def test_a_module_may_draw_random_numbers_and_store_activations(tmp_path):
    module = RandomAndStoring().train()
    module(torch.rand(2, 3, 32, 32)).mean().backward()
    torch.manual_seed(0)
    np.random.seed(0)
    expected = (torch.rand(1), np.random.rand())
    torch.manual_seed(0)
    np.random.seed(0)

    encoder = ssl_bench.Encoder.from_module(module)
    ssl_bench.extract_features(encoder, torch.ones(1, 3, 32, 32))
    assert ssl_bench.probe(encoder, task="conditioning", layer=-1, out=tmp_path, **FEW).records

    assert (torch.rand(1), np.random.rand()) == expected


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def torch_settings() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    ]


def scores(module: nn.Module, out: Any) -> list[float]:
    settings: dict[str, Any] = {"dataset": "toy_objects", "task": "classification,geometry"}
    return [r.value for r in ssl_bench.probe(module, layer=1, out=out, **settings, **FEW)]


@pytest.mark.slow
def test_torch_settings_change_no_score_and_are_restored(tmp_path):
    expected = scores(own_module.own(), tmp_path / "plain")
    for name, setting in {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "dtype": lambda: default_dtype(torch.float64),
        "default device": lambda: torch.device("meta"),
    }.items():
        module = own_module.own().train()
        with setting():
            before = torch_settings()
            found = scores(module, tmp_path / name)
            assert torch_settings() == before, name
        # A default device disables the fast path of attention, which changes the order of sums.
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True), name


@pytest.mark.slow
def test_figures_of_the_caller_stay_open(tmp_path):
    from matplotlib import get_backend, pyplot

    before = get_backend()
    pyplot.switch_backend("svg")
    figure = pyplot.figure()
    try:
        ssl_bench.probe(own_module.own(), task="pca", layer=-1, out=tmp_path, **FEW)

        assert get_backend() == "svg"
        assert pyplot.get_fignums() == [figure.number]
    finally:
        pyplot.close(figure)
        pyplot.switch_backend(before)
