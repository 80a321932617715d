"""Test the state-space layers Mamba 1 and Mamba 2."""

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
from tests.support.matrices import normal

VERSIONS = ("mamba1", "mamba2")
PIECES = ("decay", "step", "correlation", "convolution")
SMALL = StateSpaceConfig(dim=8, depth=2, num_states=3, head_width=4, num_tokens=7)


def build_model(version="mamba2", *pieces, seed=0, **changes) -> StateSpaceModel:
    model = build_encoder(replace(SMALL, version=version, mimetic=pieces, **changes), seed=seed)
    assert isinstance(model, StateSpaceModel)
    return model


def mixer_of(model: StateSpaceModel, layer=0) -> Mixer:
    block = model.blocks[layer]
    assert isinstance(block, StateSpaceBlock)
    return block.mixer


def recur(inputs, steps, decay, keys, queries) -> Tensor:
    """Compute a state-space scan with loops over images, channels and tokens."""
    out = torch.zeros_like(inputs)
    for item in range(inputs.shape[0]):
        for channel in range(inputs.shape[2]):
            state = torch.zeros(keys.shape[2], dtype=torch.float64)
            for token in range(inputs.shape[1]):
                step = steps[item, token, channel]
                update = step * inputs[item, token, channel] * keys[item, token]
                state = (step * decay[channel]).exp() * state + update
                out[item, token, channel] = queries[item, token] @ state
    return out


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_both_scans_equal_the_recurrence_for_every_chunk_size(chunk):
    inputs, keys, queries = normal(2, 7, 4), normal(2, 7, 3, seed=1), normal(2, 7, 3, seed=2)
    steps, decay = normal(2, 7, 4, seed=3).exp(), -normal(4, 3, seed=4).exp()
    outputs = scan_channels(inputs, steps, decay, keys, queries, chunk=chunk)
    torch.testing.assert_close(outputs, recur(inputs, steps, decay, keys, queries))
    matrices = channel_mixing(steps, decay, keys, queries)
    torch.testing.assert_close(torch.einsum("bcij,bjc->bic", matrices, inputs), outputs)
    # There are two heads of two channels. All states of a head have the same decay.
    steps, shared = steps[..., :2], decay[:2, 0]
    outputs = scan_heads(inputs.unflatten(-1, (2, 2)), steps, shared, keys, queries, chunk=chunk)
    each = (steps.repeat_interleave(2, -1), shared.repeat_interleave(2)[:, None].expand(4, 3))
    torch.testing.assert_close(outputs.flatten(-2), recur(inputs, *each, keys, queries))


def test_gradients_are_finite_although_inverse_decays_overflow():
    inputs = torch.ones(1, 40, 1, 1, requires_grad=True)
    steps, keys = torch.full((1, 40, 1), 100.0, requires_grad=True), torch.ones(1, 40, 1)
    scan_heads(inputs, steps, torch.tensor([-1.0]), keys, keys, chunk=40).sum().backward()
    assert steps.grad is not None
    assert steps.grad.isfinite().all()


def convolve(mixer, values) -> Tensor:
    taps, out = mixer.conv.weight[:, 0], mixer.conv.bias.expand_as(values).clone()
    for lag in range(4):
        out[:, lag:] += values[:, : values.shape[1] - lag] * taps[:, 3 - lag]
    return F.silu(out)


def mix_by_the_paper(mixer: Mixer, tokens: Tensor) -> Tensor:
    """Compute the output of a Mamba layer from the equations of the paper."""
    decay = -mixer.log_decay.exp()
    if isinstance(mixer, Mamba1Mixer):
        values, gate = (tokens @ half.T for half in mixer.in_proj.weight.split(16))
        values = convolve(mixer, values)
        low, keys, queries = (values @ w.T for w in mixer.selection.weight.split((1, 3, 3)))
        steps = F.softplus(low @ mixer.step.weight.T + mixer.step.bias)
        mixed = recur(values, steps, decay.view(16, 3), keys, queries)
        mixed += values * mixer.scan_skip
        return mixed * F.silu(gate) @ mixer.out_proj.weight.T
    matrices = mixer.in_proj.weight.split((16, 16, 3, 3, 4))
    gate, values, keys, queries, steps = (tokens @ w.T for w in matrices)
    inside = convolve(mixer, torch.cat([values, keys, queries], -1))
    values, keys, queries = inside.split((16, 3, 3), -1)
    steps = F.softplus(steps + mixer.step_bias).repeat_interleave(4, -1)
    states = decay.repeat_interleave(4)[:, None].expand(16, 3)
    mixed = recur(values, steps, states, keys, queries)
    mixed = (mixed + values * mixer.scan_skip.repeat_interleave(4)) * F.silu(gate)
    scale = (mixed.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return mixed * scale * mixer.norm.weight @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_a_mixer_follows_its_paper(version):
    mixer = mixer_of(build_model(version))
    for parameter in (mixer.log_decay, mixer.scan_skip):
        parameter.copy_(normal(*parameter.shape, seed=len(parameter)))
    if isinstance(mixer, Mamba2Mixer):
        mixer.norm.weight.copy_(normal(16))
    tokens = normal(2, 6, 8, seed=9)
    expected = mix_by_the_paper(copy.deepcopy(mixer).double(), tokens)
    torch.testing.assert_close(mixer(tokens.float()).double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_are_pre_norm_and_output_weights_are_tied(version):
    model, tokens = build_model(version), torch.tensor([[0, 3, 6, 3]])
    hidden = model.embedding.weight[tokens]
    for layer in range(2):
        scale = (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        hidden = hidden + mixer_of(model, layer)(hidden * scale)
    scale = (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(model(tokens), hidden * scale @ model.embedding.weight.T)


def test_the_default_initialisation_is_that_of_the_architectures():
    config = StateSpaceConfig(dim=64, num_states=32, head_width=32)
    # A block has in_proj, a convolution, three vectors of heads, a norm, out_proj and a norm.
    weights = 64 * (2 * 128 + 2 * 32 + 4) + 5 * 192 + 3 * 4 + 128 + 128 * 64 + 64
    parameters = build_encoder(config, seed=0).parameters()
    assert sum(value.numel() for value in parameters) == 28 * 64 + 2 * weights + 64 == 62_040
    one, two = (mixer_of(build_model(version, dim=64)) for version in VERSIONS)
    assert isinstance(one, Mamba1Mixer)
    # The rank of the steps is the width / 16, rounded up.
    uneven = mixer_of(build_model("mamba1", dim=40))
    assert isinstance(uneven, Mamba1Mixer)
    assert (one.rank, uneven.rank) == (4, 3)

    torch.testing.assert_close(one.log_decay.view(128, 3).exp()[5], torch.tensor([1.0, 2.0, 3.0]))
    assert 1 <= two.log_decay.exp().min() < two.log_decay.exp().max() <= 16
    # The largest of 512 steps is near the bound of 0.1, above log(1 + 0.1) = 0.0953.
    many = F.softplus(mixer_of(build_model("mamba2", dim=256, head_width=1)).step_bias)
    assert 0.096 < many.max() <= 0.1
    for mixer in (one, two):
        steps = F.softplus(mixer.step_bias)
        assert 0.001 <= steps.min() < 0.003
        assert 0.03 < steps.max() <= 0.1
        assert torch.equal(mixer.scan_skip, torch.ones_like(mixer.scan_skip))
        # The weights are uniform within 1 / sqrt(128), divided by the square root of the depth.
        largest = mixer.out_proj.weight.detach().abs().max().item()
        assert largest == pytest.approx(1 / 16, rel=0.01)


def selection_weights(mixer: Mixer) -> tuple[Tensor, ...]:
    """Return the weights that compute B, C and delta in a Mamba layer."""
    if isinstance(mixer, Mamba1Mixer):
        return *mixer.selection.weight.split((1, 3, 3))[1:], mixer.step.weight
    return mixer.in_proj.weight.split((16, 16, 3, 3, 4))[2:]


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_changes_only_its_own_weights(version, piece):
    plain, mixer = (mixer_of(build_model(version, *pieces), 1) for pieces in ((), (piece,)))
    keys, queries, steps = selection_weights(plain)
    if piece == "correlation":
        queries = (queries + keys) / 2
    if piece == "step":
        steps = steps / 100
        ones = torch.ones_like(plain.step_bias)
        torch.testing.assert_close(F.softplus(mixer.step_bias), ones)
    else:
        assert torch.equal(mixer.step_bias, plain.step_bias)
    for actual, expected in zip(selection_weights(mixer), (keys, queries, steps), strict=True):
        torch.testing.assert_close(actual, expected)
    values = torch.randn(2, 5, 16 if version == "mamba1" else 22)
    expected = values if piece == "convolution" else causal_convolution(values, plain.conv)
    assert torch.equal(causal_convolution(values, mixer.conv), expected)
    assert torch.equal(mixer.log_decay, plain.log_decay) is (piece != "decay")
    assert torch.equal(mixer.out_proj.weight, plain.out_proj.weight)


def test_the_decay_part_raises_decays_to_power_minus_8():
    one, two = (mixer_of(build_model(version, "decay")) for version in VERSIONS)
    expected = torch.tensor([1.0, 2.0**-8, 3.0**-8])
    torch.testing.assert_close(one.log_decay.view(16, 3).exp()[5], expected)
    before = mixer_of(build_model("mamba2")).log_decay.exp()
    torch.testing.assert_close(two.log_decay.exp(), before**-8)
    for version in VERSIONS:
        decays = mixer_of(build_model(version, "decay", state_decay="constant")).log_decay.exp()
        assert decays.tolist() == pytest.approx([math.exp(-8)] * len(decays))


def test_only_the_chosen_layers_have_the_mimetic_initialisation():
    plain, last, both = (
        build_model("mamba2", *pieces, mimetic_layers=layers).state_dict()
        for pieces, layers in (((), None), (PIECES, [1]), (PIECES, None))
    )
    for name, value in last.items():
        assert torch.equal(value, (both if name.startswith("blocks.1") else plain)[name]), name


@pytest.mark.parametrize("load", [load_encoder, identify_encoder])
def test_a_model_that_reads_tokens_is_no_encoder_for_probes(tmp_path, load):
    save_encoder(tmp_path / "last.safetensors", build_model("mamba1", "step", "decay"), {})
    again, _ = load_checkpoint(tmp_path / "last.safetensors")
    # The order of the pieces does not matter.
    assert again.config == replace(SMALL, version="mamba1", mimetic=["decay", "step"])
    with pytest.raises(CheckpointError, match="mamba1 that reads tokens"):
        load(str(tmp_path))
