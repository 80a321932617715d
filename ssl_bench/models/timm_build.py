"""From the configuration of a model of timm and a seed to its initial weights."""

import torch
from torch import Generator, nn

from ssl_bench.models.initialisers.blocks import initialiser_of, set_block
from ssl_bench.models.initialisers.convolutions import (
    FILTER_INITIALISERS,
    draw_filters,
    draw_uniform,
    filter_initialiser_of,
)
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.models.timm_model import TimmEncoder, depthwise_filters


@torch.no_grad()
def build_timm(config: TimmConfig, *, seed: int) -> TimmEncoder:
    """An encoder whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    What the initialiser does not draw stays as timm draws it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TimmEncoder(config)
    generator = Generator().manual_seed(seed)
    if config.init in FILTER_INITIALISERS:
        _draw_convolutions(model, config, generator)
    elif config.init != "default":
        initialiser = initialiser_of(config.init, config.init_options)
        for block in model.blocks:
            set_block(block, initialiser, generator)
    return model


def _draw_convolutions(model: TimmEncoder, config: TimmConfig, generator: Generator) -> None:
    """All layers as PyTorch draws them; then the depthwise filters, so that the rest is the same.

    LayerScale stays. Which layers the thesis means by "uniform" it does not say.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw_uniform(module, generator)
    initialiser = filter_initialiser_of(config.init, config.init_options)
    draw_filters(depthwise_filters(model.model), initialiser, generator)
