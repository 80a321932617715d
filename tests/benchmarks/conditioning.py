"""Skip against skipless, default against proposed initialisation: who is well conditioned?

    python -m tests.benchmarks.conditioning --data PHOTOS --out RESULTS [probe.KEY=VALUE ...]

ViT-S/16 before any training. Writes the three encoders as checkpoints into OUT/encoders, their
records and pictures into OUT, and prints the tables, means over the seeds.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from ssl_bench.evaluation import Evaluation
from ssl_bench.layers import resolve_layers
from ssl_bench.models import ViTConfig, build_vit, load_encoder, save_encoder
from ssl_bench.planning import plan_probes
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.progress import say
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.printing.sheets import render_tables
from tests.benchmarks.provenance import provenance

SKIP = ViTConfig()
BARE = replace(SKIP, skip_attention=False, skip_mlp=False)
VARIANTS = {
    "skip_default": SKIP,
    "skipless_default": BARE,
    "skipless_proposed": replace(BARE, init="skipless"),
}


def checkpoint(folder: Path, name: str) -> Path:
    """The encoder of a variant with the weights of seed 0, written if it is not there."""
    path = folder / name / "last.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_encoder(path, build_vit(VARIANTS[name], seed=0), {"step": "0"})
    return path


def measure(options: argparse.Namespace, overrides: list[str]) -> list[Record]:
    """Records of every variant and seed, old and new."""
    store, records = ResultStore(options.out), []
    initial = "probe.at_initialisation=true"
    for name in options.variants.split(","):
        encoder = load_encoder(str(checkpoint(options.out / "encoders", name)))
        layers = resolve_layers(options.layer, encoder.depth)
        for seed in range(options.seeds):
            more = [initial, f"seed={seed}", *overrides]
            (plan,) = plan_probes(["conditioning"], ["folder"], more, {"folder": options.data})
            evaluation = Evaluation(
                encoder, plan.dataset, plan.probe, layers, seed, torch.device("cpu"), torch.float32
            )
            records += evaluation.run(store, say=say)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of photographs")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--layer", default="all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    options, overrides = parser.parse_known_args()
    records = measure(options, overrides)
    print(provenance(), "\n")
    print(render_tables(depth_tables(records), "markdown"))


if __name__ == "__main__":
    main()
