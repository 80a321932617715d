"""Orthogonal attention beside softmax attention: time and memory of one layer over the tokens.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.attention

Softmax attention is what encoders use (`scaled_dot_product_attention`, which keeps no matrix of
weights) and, as far as its matrix fits, written out. The square grids are those of patches of 16
on 224, 448, 896 and 1,792 pixels.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.attention import OrthogonalAttention
from ssl_bench.models.vit import Attention
from tests.benchmarks.memory import peak_mebibytes
from tests.benchmarks.provenance import provenance

TOKENS = (196, 784, 3136, 12544)
# The weights of one layer, once: beyond it they are not written out.
_MOST_BYTES = 2**29
Work = Callable[[], object]


class WrittenOut(Attention):
    """Softmax attention that forms its matrix of weights."""

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def layers(dim: int, num_heads: int) -> dict[str, nn.Module]:
    return {
        "softmax": Attention(dim, num_heads, qkv_bias=True),
        "softmax, written out": WrittenOut(dim, num_heads, qkv_bias=True),
        "osa_qr": OrthogonalAttention(dim, num_heads, "qr"),
        "osa_newton_schulz": OrthogonalAttention(dim, num_heads, "newton_schulz"),
    }


def fits(layer: nn.Module, num_tokens: int) -> bool:
    if not isinstance(layer, WrittenOut):
        return True
    return 4 * layer.num_heads * num_tokens**2 <= _MOST_BYTES


def milliseconds(work: Work, device: torch.device, rounds: int) -> float:
    """Least of some rounds; on a CPU that of this process, whatever else the machine does."""
    work()
    return min(1e3 * _seconds(work, device) for _ in range(rounds))


def _seconds(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def works(layer: nn.Module, x: Tensor) -> dict[str, Work]:
    def forwards() -> None:
        with torch.no_grad():
            layer(x)

    return {"forward": forwards, "forward and backward": lambda: layer(x).sum().backward()}


def print_table(what: str, cells: dict[tuple[str, int], str], names: list[str]) -> None:
    print(f"\n{what}\n\n| tokens | " + " | ".join(names) + " |\n|---:|" + "---:|" * len(names))
    for num_tokens in dict.fromkeys(count for _, count in cells):
        row = [cells[name, num_tokens] for name in names]
        print(f"| {num_tokens:,} | " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    candidates = layers(options.dim, options.heads)
    times: dict[str, dict[tuple[str, int], str]] = {}
    memory: dict[str, dict[tuple[str, int], str]] = {}
    for num_tokens in options.tokens:
        x = torch.randn(1, num_tokens, options.dim, device=device)
        for name, layer in candidates.items():
            for what, work in works(layer.to(device), x).items():
                key, is_run = (name, num_tokens), fits(layer, num_tokens)
                taken = f"{milliseconds(work, device, options.rounds):,.1f}" if is_run else "-"
                held = f"{peak_mebibytes(work, device):,.1f}" if is_run else "-"
                times.setdefault(what, {})[key] = taken
                memory.setdefault(what, {})[key] = held
    print(provenance())
    print(f"\none image, dim {options.dim}, {options.heads} heads, float32, -: not run")
    clock = "ms" if device.type == "cuda" else "ms of processor time"
    for what in times:
        print_table(f"{what}, {clock}", times[what], list(candidates))
        print_table(f"{what}, peak MiB", memory[what], list(candidates))


if __name__ == "__main__":
    main()
