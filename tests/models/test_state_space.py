"""Mamba 1 and 2: their scans, mixers and initialisation, compared with plain code."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.models import (
    StateSpaceConfig,
    StateSpaceModel,
    build_encoder,
    identify_encoder,
    load_encoder,
    save_encoder,
)
from ssl_bench.models.loading.checkpoint import load_checkpoint
from ssl_bench.models.state_space import (
    Mamba1Mixer,
    Mamba2Mixer,
    Mixer,
    StateSpaceBlock,
    causal_convolution,
    channel_mixing,
    scan_channels,
    scan_heads,
)
from tests.support.matrices import normal as drawn

VERSIONS = ("mamba1", "mamba2")
PIECES = ("decay", "step", "correlation", "convolution")
SMALL = StateSpaceConfig(dim=8, depth=2, num_states=3, head_width=4, num_tokens=7)


def built(version="mamba2", *pieces, seed=0, **changes) -> StateSpaceModel:
    model = build_encoder(replace(SMALL, version=version, mimetic=pieces, **changes), seed=seed)
    assert isinstance(model, StateSpaceModel)
    return model


def mixer_of(model: StateSpaceModel, layer=0) -> Mixer:
    block = model.blocks[layer]
    assert isinstance(block, StateSpaceBlock)
    return block.mixer


def recurrence(inputs, steps, decay, keys, queries) -> Tensor:
    """Compute `scan` token by token and channel by channel, as its docstring defines it."""
    out = torch.zeros_like(inputs)
    for item in range(inputs.shape[0]):
        for channel in range(inputs.shape[2]):
            state = torch.zeros(keys.shape[2], dtype=torch.float64)
            for token in range(inputs.shape[1]):
                step = steps[item, token, channel]
                news = step * inputs[item, token, channel] * keys[item, token]
                state = (step * decay[channel]).exp() * state + news
                out[item, token, channel] = queries[item, token] @ state
    return out


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_both_scans_are_the_recurrence_whatever_the_chunk(chunk):
    inputs, keys, queries = drawn(2, 7, 4), drawn(2, 7, 3, seed=1), drawn(2, 7, 3, seed=2)
    steps, decay = drawn(2, 7, 4, seed=3).exp(), -drawn(4, 3, seed=4).exp()

    found = scan_channels(inputs, steps, decay, keys, queries, chunk=chunk)
    torch.testing.assert_close(found, recurrence(inputs, steps, decay, keys, queries))
    matrices = channel_mixing(steps, decay, keys, queries)
    torch.testing.assert_close(torch.einsum("bcij,bjc->bic", matrices, inputs), found)

    # Two heads of two channels, all of whose states share a decay.
    steps, shared = steps[..., :2], decay[:2, 0]
    found = scan_heads(inputs.unflatten(-1, (2, 2)), steps, shared, keys, queries, chunk=chunk)
    each = (steps.repeat_interleave(2, -1), shared.repeat_interleave(2)[:, None].expand(4, 3))
    torch.testing.assert_close(found.flatten(-2), recurrence(inputs, *each, keys, queries))


def test_a_growth_over_later_tokens_that_no_float_holds_leaves_gradients_finite():
    inputs = torch.ones(1, 40, 1, 1, requires_grad=True)
    steps, keys = torch.full((1, 40, 1), 100.0, requires_grad=True), torch.ones(1, 40, 1)

    scan_heads(inputs, steps, torch.tensor([-1.0]), keys, keys, chunk=40).sum().backward()

    assert steps.grad is not None
    assert steps.grad.isfinite().all()


def convolution(mixer, values) -> Tensor:
    """Compute the convolution; the last tap is for the token itself."""
    taps, out = mixer.conv.weight[:, 0], mixer.conv.bias.expand_as(values).clone()
    for lag in range(4):
        out[:, lag:] += values[:, : values.shape[1] - lag] * taps[:, 3 - lag]
    return F.silu(out)


def restated(mixer: Mixer, tokens: Tensor) -> Tensor:
    """Return the output of a mixer by the papers' equations."""
    decay = -mixer.log_decay.exp()
    if isinstance(mixer, Mamba1Mixer):
        values, gate = (tokens @ half.T for half in mixer.in_proj.weight.split(16))
        values = convolution(mixer, values)
        low, keys, queries = (values @ w.T for w in mixer.selection.weight.split((1, 3, 3)))
        steps = F.softplus(low @ mixer.step.weight.T + mixer.step.bias)
        mixed = recurrence(values, steps, decay.view(16, 3), keys, queries)
        mixed += values * mixer.scan_skip
        return mixed * F.silu(gate) @ mixer.out_proj.weight.T
    matrices = mixer.in_proj.weight.split((16, 16, 3, 3, 4))
    gate, values, keys, queries, steps = (tokens @ w.T for w in matrices)
    inside = convolution(mixer, torch.cat([values, keys, queries], -1))
    values, keys, queries = inside.split((16, 3, 3), -1)
    steps = F.softplus(steps + mixer.step_bias).repeat_interleave(4, -1)
    states = decay.repeat_interleave(4)[:, None].expand(16, 3)
    mixed = recurrence(values, steps, states, keys, queries)
    mixed = (mixed + values * mixer.scan_skip.repeat_interleave(4)) * F.silu(gate)
    scale = (mixed.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return mixed * scale * mixer.norm.weight @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_a_mixer_is_what_its_paper_writes(version):
    mixer = mixer_of(built(version))
    for parameter in (mixer.log_decay, mixer.scan_skip):
        parameter.copy_(drawn(*parameter.shape, seed=len(parameter)))
    if isinstance(mixer, Mamba2Mixer):
        mixer.norm.weight.copy_(drawn(16))
    tokens = drawn(2, 6, 8, seed=9)

    wanted = restated(copy.deepcopy(mixer).double(), tokens)
    torch.testing.assert_close(mixer(tokens.float()).double(), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_a_block_adds_to_its_normalised_input_and_names_tokens_by_their_embedding(version):
    model, tokens = built(version), torch.tensor([[0, 3, 6, 3]])
    hidden = model.embedding.weight[tokens]
    for layer in range(2):
        scale = (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        hidden = hidden + mixer_of(model, layer)(hidden * scale)
    scale = (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    torch.testing.assert_close(model(tokens), hidden * scale @ model.embedding.weight.T)


def test_without_pieces_it_starts_as_the_architectures_do():
    config = StateSpaceConfig(dim=64, num_states=32, head_width=32)
    # Embedding; in_proj, convolution, three vectors of heads, norm, out_proj, norm; norm.
    weights = 64 * (2 * 128 + 2 * 32 + 4) + 5 * 192 + 3 * 4 + 128 + 128 * 64 + 64
    parameters = build_encoder(config, seed=0).parameters()
    assert sum(value.numel() for value in parameters) == 28 * 64 + 2 * weights + 64 == 62_040
    one, two = (mixer_of(built(version, dim=64)) for version in VERSIONS)
    assert isinstance(one, Mamba1Mixer)
    # The rank of the steps is the width / 16, rounded up.
    uneven = mixer_of(built("mamba1", dim=40))
    assert isinstance(uneven, Mamba1Mixer)
    assert (one.rank, uneven.rank) == (4, 3)

    torch.testing.assert_close(one.log_decay.view(128, 3).exp()[5], torch.tensor([1.0, 2.0, 3.0]))
    assert 1 <= two.log_decay.exp().min() < two.log_decay.exp().max() <= 16
    # The largest of 512 steps is near the bound of 0.1, above log(1 + 0.1) = 0.0953.
    many = F.softplus(mixer_of(built("mamba2", dim=256, head_width=1)).step_bias)
    assert 0.096 < many.max() <= 0.1
    for mixer in (one, two):
        steps = F.softplus(mixer.step_bias)
        assert 0.001 <= steps.min() < 0.003
        assert 0.03 < steps.max() <= 0.1
        assert torch.equal(mixer.scan_skip, torch.ones_like(mixer.scan_skip))
        # Uniform within 1 / sqrt(128) and the square root of the depth.
        largest = mixer.out_proj.weight.detach().abs().max().item()
        assert largest == pytest.approx(1 / 16, rel=0.01)


def selections(mixer: Mixer) -> tuple[Tensor, ...]:
    """Return the weights of keys, queries and steps."""
    if isinstance(mixer, Mamba1Mixer):
        return *mixer.selection.weight.split((1, 3, 3))[1:], mixer.step.weight
    return mixer.in_proj.weight.split((16, 16, 3, 3, 4))[2:]


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_changes_its_own_weights_alone(version, piece):
    plain, mixer = (mixer_of(built(version, *pieces), 1) for pieces in ((), (piece,)))
    keys, queries, steps = selections(plain)
    if piece == "correlation":
        queries = (queries + keys) / 2
    if piece == "step":
        steps = steps / 100
        ones = torch.ones_like(plain.step_bias)
        torch.testing.assert_close(F.softplus(mixer.step_bias), ones)
    else:
        assert torch.equal(mixer.step_bias, plain.step_bias)
    for found, expected in zip(selections(mixer), (keys, queries, steps), strict=True):
        torch.testing.assert_close(found, expected)
    values = torch.randn(2, 5, 16 if version == "mamba1" else 22)
    expected = values if piece == "convolution" else causal_convolution(values, plain.conv)
    assert torch.equal(causal_convolution(values, mixer.conv), expected)
    assert torch.equal(mixer.log_decay, plain.log_decay) is (piece != "decay")
    assert torch.equal(mixer.out_proj.weight, plain.out_proj.weight)


def test_a_decay_to_the_power_of_minus_eight_forgets_nothing_but_where_it_was_one():
    one, two = (mixer_of(built(version, "decay")) for version in VERSIONS)
    wanted = torch.tensor([1.0, 2.0**-8, 3.0**-8])

    torch.testing.assert_close(one.log_decay.view(16, 3).exp()[5], wanted)
    before = mixer_of(built("mamba2")).log_decay.exp()
    torch.testing.assert_close(two.log_decay.exp(), before**-8)
    for version in VERSIONS:
        decays = mixer_of(built(version, "decay", state_decay="constant")).log_decay.exp()
        assert decays.tolist() == pytest.approx([math.exp(-8)] * len(decays))


def test_layers_that_are_not_chosen_start_as_without():
    plain, last, both = (
        built("mamba2", *pieces, mimetic_layers=layers).state_dict()
        for pieces, layers in (((), None), (PIECES, [1]), (PIECES, None))
    )

    for name, value in last.items():
        assert torch.equal(value, (both if name.startswith("blocks.1") else plain)[name]), name


@pytest.mark.parametrize("load", [load_encoder, identify_encoder])
def test_no_probe_takes_a_model_that_reads_tokens(tmp_path, load):
    save_encoder(tmp_path / "last.safetensors", built("mamba1", "step", "decay"), {})
    again, _ = load_checkpoint(tmp_path / "last.safetensors")
    # Pieces are the same in any order.
    assert again.config == replace(SMALL, version="mamba1", mimetic=["decay", "step"])
    with pytest.raises(CheckpointError, match="mamba1 that reads tokens"):
        load(str(tmp_path))
