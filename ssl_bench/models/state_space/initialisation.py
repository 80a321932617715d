"""How a Mamba starts: as its authors let it, and the four pieces of mimetic initialisation.

The pieces make a layer similar to linear attention whose queries are its keys:

1. decay: A = -a^-8 instead of -a, so that next to nothing is forgotten. Where a is 1, which is one
   state of N in Mamba 1 and heads near it in Mamba 2, A stays at -1; `state_decay=constant` has
   A = -exp(-8) everywhere.
2. step: Delta = softplus(b) = 1 with b = log(e - 1), and weights of a hundredth.
3. correlation: W_C becomes the mean of W_C and W_B.
4. convolution: the last tap is 1, all others and the bias 0. The first tap would delay by three.

Source: section 3.3.2 of Trockman's thesis (2025), c = 8. Guesses: the thesis writes
A = -exp(-c A_log), which could stay so while A_log is trained; here A_log is changed once. "W_Delta
near 0" is a hundredth of what was drawn, in Mamba 1 of the factor next to Delta alone, since two
factors of zero would never be trained.
"""

import math
from typing import get_args

import torch
from torch import Generator, Tensor, nn

from ssl_bench.models.state_space.config import Piece, StateSpaceConfig
from ssl_bench.models.state_space.mixers import Mamba1Mixer, Mixer
from ssl_bench.models.state_space.model import StateSpaceBlock, StateSpaceModel

_DECAY, _STEP, _CORRELATION, _CONVOLUTION = get_args(Piece)
_EXPONENT = 8.0
_EMBEDDING_STD = 0.02
# Of what is drawn for the weights of the steps.
_STEP_SHARE = 0.01
# softplus of it is 1.
_UNIT_STEP_BIAS = math.log(math.e - 1)
_LEAST_STEP, _LARGEST_STEP = 0.001, 0.1
# Heads of Mamba 2 have decays from 1 to this.
_LARGEST_DECAY = 16.0


@torch.no_grad()
def build_state_space_model(config: StateSpaceConfig, *, seed: int) -> StateSpaceModel:
    """A Mamba whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    The pieces change what was drawn, so that everything else is the same with them and without.
    """
    with torch.random.fork_rng(devices=[]):
        model = StateSpaceModel(config)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(model.embedding.weight, std=_EMBEDDING_STD, generator=generator)
    for block, pieces in zip(model.blocks, config.pieces, strict=True):
        assert isinstance(block, StateSpaceBlock)
        _draw(block.mixer, config.depth, generator)
        _mimic(block.mixer, pieces, constant=config.state_decay == "constant")
    return model


def _draw(mixer: Mixer, depth: int, generator: Generator) -> None:
    """The start of the architectures' authors; what writes into the skip shrinks with depth."""
    for matrix in (mixer.in_proj.weight, mixer.out_proj.weight):
        _draw_uniform(matrix, matrix.shape[1], generator)
    mixer.out_proj.weight.div_(math.sqrt(depth))
    for parameter in mixer.conv.parameters():
        _draw_uniform(parameter, mixer.conv.weight[0].numel(), generator)
    if isinstance(mixer, Mamba1Mixer):
        _draw_uniform(mixer.selection.weight, mixer.selection.in_features, generator)
        _draw_uniform(mixer.step.weight, mixer.rank, generator)
        decays = torch.arange(1.0, mixer.states + 1).repeat(len(mixer.scan_skip))
    else:
        decays = torch.empty(mixer.heads).uniform_(1, _LARGEST_DECAY, generator=generator)
    mixer.log_decay.copy_(decays.log())
    low, high = math.log(_LEAST_STEP), math.log(_LARGEST_STEP)
    steps = torch.empty_like(mixer.step_bias).uniform_(low, high, generator=generator).exp()
    mixer.step_bias.copy_(steps.expm1().log())
    mixer.scan_skip.fill_(1)


def _draw_uniform(parameter: Tensor, inputs: int, generator: Generator) -> None:
    """As PyTorch draws weights of so many inputs by default."""
    bound = inputs**-0.5
    nn.init.uniform_(parameter, -bound, bound, generator=generator)


def _mimic(mixer: Mixer, pieces: frozenset[str], *, constant: bool) -> None:
    if _DECAY in pieces:
        mixer.log_decay.mul_(-_EXPONENT)
        if constant:
            mixer.log_decay.fill_(-_EXPONENT)
    if _STEP in pieces:
        mixer.step_weight.mul_(_STEP_SHARE)
        mixer.step_bias.fill_(_UNIT_STEP_BIAS)
    if _CORRELATION in pieces:
        mixer.queries_weight.add_(mixer.keys_weight).div_(2)
    if _CONVOLUTION in pieces:
        for parameter in mixer.conv.parameters():
            parameter.zero_()
        mixer.conv.weight[..., -1].fill_(1)
