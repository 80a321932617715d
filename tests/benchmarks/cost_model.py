r"""The model of costs: against times of a processor, and what it predicts for GPUs.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.cost_model \
        --json results/benchmarks/cost_model.json --table results/tables/cost_model.md
    OMP_NUM_THREADS=1 python -m tests.benchmarks.cost_model --predict \
        --json results/benchmarks/cost_predictions.json --table results/tables/cost_predictions.md

One thread, and of several repetitions the least time that this thread worked (`time.thread_time`),
whoever else wants the processor. Of each unit the model sees the operations alone.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.costs import PretrainingCost
from pretrain.crops.multi import MultiCrop
from pretrain.objectives.dino import Dino
from pretrain.objectives.mae import Mae
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import Soap
from probes.costs.few_images import ConditioningCost, PCACost, TokenCutCost
from probes.costs.images import ClassificationCost, KNNCost
from probes.costs.retrieval import RetrievalCost
from probes.costs.segmentation import SegmentationCost
from probes.retrieval.probe import Retrieval
from probes.segmentation.components import Histogram, Steps
from probes.segmentation.probe import Segmentation
from ssl_bench.cost.asked import asked_work
from ssl_bench.cost.devices import DEVICES
from ssl_bench.cost.places import RealPlace
from ssl_bench.cost.predicting import Predictor, work_cost
from ssl_bench.cost.printing import device_table, tables
from ssl_bench.cost.roofline import seconds
from ssl_bench.cost.this_machine import best_seconds, measured_device
from ssl_bench.cost.work import Unit, count_on
from ssl_bench.models import ViTConfig
from tests.benchmarks.provenance import provenance

CPU = torch.device("cpu")
ALLOWED = 1.5
_ROUNDS = 10
# What is kept on a device of any size.
_MEMORY = 1e12
_SMALL = ViTConfig(image_size=64, patch_size=8, dim=192, depth=4, num_heads=3)
_WIDE = ViTConfig(image_size=96, patch_size=16, dim=384, depth=3, num_heads=6)
_DINO = Dino(out_dim=4096, hidden_dim=384, crops=MultiCrop(num_locals=4))
_STEPS = Steps(batch_size=4)

_CHECK = """\
# The model of costs on a processor

The model of `ssl-bench cost` with the rates of this processor, measured just before: a roofline
over the operations that torch was asked for. One thread; times are those that the thread worked,
the least of ten repetitions. A ratio of 1 is a right prediction, {allowed} the most that
was hoped for. A processor has three rates more than a GPU here: of exponentials, of picking and of
sorting, which a GPU does as fast as its memory gives the values.

{provenance}

Rates: {rates}

"""
_PREDICTED = """\
# What GPUs would take

Every time here is predicted; none was measured on a GPU. How, and what is left out, stands in
docs/gpu.md. Pretraining is an epoch of ImageNet; `peak` is memory of the device, for pretraining
with 128 images at once, of which the batch of 1,024 is accumulated.

{provenance}

"""


def units() -> dict[str, Unit]:
    """What is measured: objectives, optimizers, units of probes, models and sizes."""
    fixed: dict[str, Any] = {"precision": "float32", "num_images": 1000}
    scenes = {"train_images": 32, "val_images": 8, "classes": 21, "height": 120, "width": 160}
    probe = Segmentation(image_size=128, training=_STEPS)
    fast = Segmentation(image_size=128, training=_STEPS, loss=Histogram())
    near = Retrieval(image_size=64, memory_patches=4000, batch_size=2, engine="torch")
    eight: dict[str, Any] = {"batch_size": 8, "part": 8, **fixed}
    mae = Mae(decoder_dim=96, decoder_depth=2, decoder_heads=3)
    dino = PretrainingCost(model=_SMALL, objective=_DINO, **eight)
    soap = PretrainingCost(
        model=_SMALL, objective=_DINO, optimizer=Soap(max_precond_dim=1000), **eight
    )
    segmentation = SegmentationCost(**scenes, model=_SMALL, probe=probe)
    works = {
        "DINO with AdamW, ViT of 192 x 4, 64 px": (dino, 0),
        "DINO with SOAP, between refreshes": (soap, 0),
        "MAE, ViT of 192 x 4, 64 px": (PretrainingCost(model=_SMALL, objective=mae, **eight), 0),
        "supervised, ViT of 384 x 3, 96 px": (
            PretrainingCost(model=_WIDE, objective=Supervised(), num_classes=100, **eight), 0,
        ),
        "segmentation, features, 128 px": (segmentation, 0),
        "segmentation, heads' step": (segmentation, 1),
        "segmentation fast, heads' step": (SegmentationCost(**scenes, model=_SMALL, probe=fast), 1),
        "segmentation, scored images": (segmentation, 3),
        "retrieval, scored images": (RetrievalCost(**scenes, model=_SMALL, probe=near), 1),
        "k-NN, images, ViT of 384 x 3": (KNNCost(3000, 100, model=_WIDE), 0),
        "k-NN, votes, bank of 20,000": (KNNCost(20_000, 4000, model=_WIDE), 1),
        "classification, batch of an evaluation": (
            ClassificationCost(3000, 100, 20, model=_WIDE), 1,
        ),
        "TokenCut, images of 96 x 128": (TokenCutCost(10, 96, 128, model=_WIDE), 0),
        "PCA, image": (PCACost(model=_SMALL), 0),
        "conditioning, image in float64": (ConditioningCost(model=_SMALL), 0),
        "conditioning, spectra": (ConditioningCost(model=_WIDE), 1),
    }  # fmt: skip
    return {name: work.units(_MEMORY)[number] for name, (work, number) in works.items()}


def checked(part: str) -> dict[str, Any]:
    """Predicted and measured milliseconds of every unit whose name holds `part`."""
    # Twice, for a busy moment must not stand in the rates of all.
    device = max((measured_device(CPU, _MEMORY) for _ in range(3)), key=lambda d: d.float32)
    rows = {}
    for name, unit in units().items():
        if part in name:
            count = count_on(RealPlace(CPU), unit)
            measured = best_seconds(unit.make(RealPlace(CPU), 1), CPU, _ROUNDS)
            rows[name] = {
                "gflop": count.flops / 1e9,
                "megabytes": count.num_bytes / 1e6,
                "launches": count.launches,
                "predicted_ms": 1e3 * seconds(count, device),
                "measured_ms": 1e3 * measured,
            }
            print(name, rows[name], flush=True)
    return {"device": vars(device), "rows": rows}


def check_table(record: Mapping[str, Any]) -> str:
    """The page of a record of `checked`."""
    device, rows = record["device"], record["rows"]
    rates = (
        f"products {device['float32'] / 1e9:.0f} GFLOP/s (float64 {device['float64'] / 1e9:.0f}), "
        f"copies {device['bandwidth'] / 1e9:.1f} GB/s, exponentials "
        f"{device['functions'] / 1e9:.2f}, picking {device['searches'] / 1e9:.2f} and sorting "
        f"{device['sorts'] / 1e9:.3f} values/ns, an operation {1e6 * device['launch']:.1f} us, "
        f"factorisations {100 * device['attainable_factorising']:.0f} % of products."
    )
    lines = [
        _CHECK.format(allowed=ALLOWED, provenance=record["provenance"], rates=rates),
        "| unit | GFLOP | MB moved | operations | predicted ms | measured ms | ratio |\n",
        "|---|---:|---:|---:|---:|---:|---:|\n",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['gflop']:.3g} | {row['megabytes']:.3g} | {row['launches']:.0f} "
            f"| {row['predicted_ms']:.1f} | {row['measured_ms']:.1f} | {_ratio(row):.2f} |\n"
        )
    ratios = [max(_ratio(row), 1 / _ratio(row)) for row in rows.values()]
    within = sum(ratio <= ALLOWED for ratio in ratios)
    lines.append(f"\nWithin {ALLOWED}: {within} of {len(ratios)}; furthest {max(ratios):.2f}.\n")
    return "".join(lines)


def _ratio(row: Mapping[str, float]) -> float:
    return row["measured_ms"] / row["predicted_ms"]


def predicted(names: str) -> dict[str, Any]:
    """All works on all devices of the table."""
    predictor, found = Predictor(), {}
    for name, work in asked_work(names, []).items():
        costs = {d.name: predictor.predicted(name, work, d) for d in DEVICES.values()}
        found[name] = {device: cost.as_json() for device, cost in costs.items()}
        print(name, {device: round(cost.seconds, 1) for device, cost in costs.items()}, flush=True)
    return {"works": found}


def prediction_table(record: Mapping[str, Any]) -> str:
    """The page of a record of `predicted`."""
    costs = {
        name: {device: work_cost(content) for device, content in by_device.items()}
        for name, by_device in record["works"].items()
    }
    introduction = _PREDICTED.format(provenance=record["provenance"])
    return f"{introduction}{device_table(DEVICES.values())}\n{tables(costs)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="for GPUs, nothing is measured")
    parser.add_argument("--only", default="", help="part of a unit's name, or works with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    line = provenance()
    found = predicted(options.only or "all") if options.predict else checked(options.only)
    record = {"provenance": line} | found
    page = prediction_table(record) if options.predict else check_table(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        options.table.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
