r"""Reproduce equations 5, 8 and 9 and figure 5 of the paper "Cutting the Skip".

    OMP_NUM_THREADS=1 python -m tests.benchmarks.parameter_jacobians \
        --json results/benchmarks/parameter_jacobians-cpu.json

Each Jacobian contains the derivatives of all output tokens with respect to the attention weights of
one block. The ViT is so small that exact Jacobians in float64 are affordable. The images are
random. Figure 5 uses the softmax of random 10 x 10 logits instead of a ViT.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.func import functional_call, jacrev

from probes.conditioning.jacobians import differentiable_attention
from ssl_bench.models import VisionTransformer, ViTConfig, build_vit
from tests.benchmarks.provenance import provenance

SKIP = ViTConfig(image_size=16, patch_size=8, dim=16, depth=3, num_heads=2)
BARE = replace(SKIP, skip_attention=False, skip_mlp=False)
VARIANTS = {
    "skip, default": SKIP,
    "skipless, default": BARE,
    "skipless, proposed": replace(BARE, init="skipless"),
}
SEEDS, IMAGES, DRAWS = 5, 4, 1001
PEAK, DIFFUSE = (0.1, 5.0), (0.1, 0.0)
"""Values of (alpha, beta) in figure 5. The paper prints condition numbers of 1.1 and 730.1."""


def encoder(config: ViTConfig, seed: int) -> VisionTransformer:
    return build_vit(config, seed=seed).eval().double()


def by_parameters(
    model: VisionTransformer, tokens: Float64[Tensor, "1 tokens dim"], layer: int
) -> Float64[Tensor, "outputs parameters"]:
    """Return the Jacobian of the output tokens with respect to one block's attention weights."""
    attention = dict(model.blocks[layer].get_submodule("attn").named_parameters())

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        x = tokens
        for number, block in enumerate(model.blocks):
            own = {f"attn.{name}": value for name, value in parameters.items()}
            x = functional_call(block, own if number == layer else {}, (x,))
        return x.flatten()

    with differentiable_attention():
        parts = jacrev(outputs)({name: value.detach() for name, value in attention.items()})
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1)


def condition_number(matrix: Float64[Tensor, "rows cols"], rank: int) -> float:
    values = torch.linalg.svdvals(matrix.detach())
    return float(values[0] / values[rank - 1])


def simulated(alpha: float, beta: float, seed: int) -> float:
    """Return the condition number of softmax(alpha Z + beta I) for a random 10 x 10 matrix Z."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(10, 10, dtype=torch.float64)
    # Truncated at two standard deviations.
    torch.nn.init.trunc_normal_(noise, generator=generator)
    logits = alpha * noise + beta * torch.eye(10, dtype=torch.float64)
    return condition_number(logits.softmax(1), 10)


def measure() -> dict[str, Any]:
    """Measure the condition numbers of Jacobians and attention maps."""
    rows = []
    for name, config in VARIANTS.items():
        for seed in range(SEEDS):
            model = encoder(config, seed)
            generator = torch.Generator().manual_seed(seed)
            images = torch.randn(IMAGES, 3, 16, 16, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                entering = model.embed(images)
            for layer in range(config.depth):
                parts = [by_parameters(model, tokens[None], layer) for tokens in entering]
                # A LayerNorm removes two directions of each token, its mean and its length.
                rank = entering.shape[1] * (config.dim - 2)
                worst = max(condition_number(part, rank) for part in parts)
                whole = condition_number(torch.cat(parts), IMAGES * rank)
                row = {"variant": name, "seed": seed, "layer": layer}
                rows.append({**row, "all": whole, "worst_image": worst})
    figure = {
        name: sorted(simulated(*values, seed) for seed in range(DRAWS))
        for name, values in (("peak", PEAK), ("diffuse", DIFFUSE))
    }
    return {"provenance": provenance(), "rows": rows, "figure": figure}


def page(content: dict[str, Any]) -> str:
    lines = [
        "# Conditioning by parameters",
        "",
        'Check equations 5, 8 and 9 of "Cutting the Skip" at initialisation, without any',
        "approximation. The table has condition numbers of the derivatives of all tokens after the",
        "last block with respect to the attention weights of one block, as the median of "
        f"{SEEDS} seeds [lowest, highest].",
        f"The encoder has {SKIP.depth} blocks, width {SKIP.dim}, {SKIP.num_heads} heads and 5 "
        f"tokens, and encodes {IMAGES} random images.",
        "",
        "- `J` is for all images together (equation 5), and `one` is for the worst image.",
        "- Two directions of each token are left out, because a LayerNorm removes them if no skip",
        "  connection carries them.",
        "- Numbers above 1e15 are dominated by rounding.",
        "",
        "`tests/benchmarks/parameter_jacobians.py` makes this page.",
        "",
        content["provenance"],
        "",
        "| | " + " | ".join(f"block {n}, J | one" for n in range(SKIP.depth)) + " |",
        "|---|" + "---:|---:|" * SKIP.depth,
        *(_line(content["rows"], name) for name in VARIANTS),
        "",
        "Figure 5 has the softmax of 10 x 10 logits alpha Z + beta I, where Z is normal and",
        "truncated at two standard deviations. The paper prints 1.1 and 730.1, each of one draw.",
        f"The table is over {DRAWS} draws:",
        "",
        "| | alpha | beta | median | 2.5 % | 97.5 % |",
        "|---|---:|---:|---:|---:|---:|",
        *(_figure_line(name, *values, content["figure"][name])
          for name, values in (("peak", PEAK), ("diffuse", DIFFUSE))),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _line(rows: list[dict[str, Any]], name: str) -> str:
    cells = []
    for layer in range(SKIP.depth):
        for key in ("all", "worst_image"):
            values = [r[key] for r in rows if (r["variant"], r["layer"]) == (name, layer)]
            cells.append(f"{median(values):.3g} [{min(values):.2g}, {max(values):.2g}]")
    return f"| {name} | {' | '.join(cells)} |"


def _figure_line(name: str, alpha: float, beta: float, values: list[float]) -> str:
    low, high = values[round(0.025 * len(values))], values[round(0.975 * len(values)) - 1]
    return f"| {name} | {alpha:g} | {beta:g} | {median(values):.4g} | {low:.4g} | {high:.4g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.json.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
