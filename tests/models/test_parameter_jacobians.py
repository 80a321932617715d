"""Test the Jacobians of a ViT with respect to attention weights."""

import pytest
import torch
from torch.func import functional_call, jacrev

from probes.conditioning.jacobians import differentiable_attention, exact_jacobian
from ssl_bench.models.vit import Block
from tests.benchmarks.parameter_jacobians import VARIANTS, by_parameters, encoder


@pytest.mark.parametrize("name", VARIANTS)
def test_the_jacobian_by_parameters_is_the_product_of_the_paper(name):
    model = encoder(VARIANTS[name], seed=1)
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    with torch.no_grad():
        x = entering = model.embed(images)
        points = []
        for block in blocks:
            update = block.attn(block.norm1(x))
            between = update + x if block.skip_attention else update
            points.append((x, between))
            x = block(x)

    # The expected Jacobians follow equations 8 and 9 of "Cutting the Skip".
    size = entering.numel()
    identity = torch.eye(size, dtype=torch.float64)
    for layer in range(len(blocks)):
        product = identity
        for number in reversed(range(layer, len(blocks))):
            block, (before, between) = blocks[number], points[number]
            k_hat = exact_jacobian(lambda t, b=block: b.mlp(b.norm2(t[None]))[0], between[0])
            k = exact_jacobian(lambda t, b=block: b.attn(b.norm1(t[None]))[0], before[0])
            skip_mlp, skip_attention = block.skip_mlp, block.skip_attention
            product = product @ (k_hat + skip_mlp * identity)
            if number > layer:
                product = product @ (k + skip_attention * identity)
        attention, normed = blocks[layer].attn, blocks[layer].norm1(points[layer][0])
        weights = {n: p.detach() for n, p in attention.named_parameters()}
        with differentiable_attention():
            own = jacrev(lambda w, a=attention, t=normed: functional_call(a, w, (t,)).flatten())(
                weights
            )
        expected = product @ torch.cat([part.flatten(1) for part in own.values()], dim=1)

        jacobian = by_parameters(model, entering, layer)
        torch.testing.assert_close(jacobian, expected, rtol=1e-9, atol=1e-12)
