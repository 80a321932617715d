"""`ssl-bench quickstart`: pretrain a tiny encoder, probe it and write a report, all offline."""

import argparse
import io
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ssl_bench.cli.parser import run_command
from ssl_bench.report.panels import (
    ScorePanel,
    group_into_panels,
    list_checkpoints,
    select_main_panels,
)
from ssl_bench.results import ResultStore
from ssl_bench.system.output import align_columns, format_duration, print_message, quote_command
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import draw_curves

DEMOS = ("demo:skip", "demo:skipless")
MODEL = "vit_tiny_skip"

# The model has the size of the demo encoders. It is trained for a fixed number of steps, not
# minutes, so that fast and slow machines train the same encoder.
PRETRAINING = (
    "model.dim=128",
    "model.num_heads=2",
    "model.image_size=64",
    "model.patch_size=8",
    "objective.out_dim=1024",
    "objective.hidden_dim=512",
    "objective.momentum=0.99",
    "objective.teacher_temperature=0.04",
    "objective.crops.num_locals=4",
    "optimizer.lr=4e-3",
    "train.batch_size=8",
    "train.max_steps=15",
)
PROBES = (
    ("--task", "all", "--limit", "8", "--pictures", "4", "probe.protocol=fast",
     "probe.training.epochs=6", "probe.memory_patches=5000", "probe.image_size=96",
     "probe.view_images=6", "probe.num_images=4"),
    ("--task", "knn,classification", "--dataset", "toy_objects", "--limit", "160",
     "probe.training.c_values=[1e-3,1e-2,1e-1]", "probe.image_size=64"),
)  # fmt: skip
NUM_BLOCKS = 4
"""Number of blocks in the printed table."""


def command(options: argparse.Namespace) -> int:
    """Pretrain an encoder for a few steps, then probe it and the built-in demo encoders."""
    start = time.monotonic()
    out = Path(options.out)
    results = out / "results"
    run_folder = out / MODEL
    if (run_folder / "last.safetensors").is_file() and not options.overwrite:
        print_message(
            f"{run_folder} is already pretrained and is kept. Use --overwrite to train it again."
        )
    else:
        # A run folder without weights is left from an interrupted run, which starts again.
        overwrite = ["--overwrite"] if run_folder.exists() else []
        _print_and_run(
            "pretrain", f"model={MODEL}", *PRETRAINING, "--out", str(run_folder), *overwrite
        )
    encoders = (*DEMOS, str(run_folder))
    flags = [word for encoder in encoders for word in ("--checkpoint", encoder)]
    flags += ["--out", str(results), *(["--overwrite"] if options.overwrite else [])]
    for probes in PROBES:
        # Hide the tables of each command, because one overview at the end is easier to read.
        with redirect_stdout(io.StringIO()):
            _print_and_run("probe", *probes, *flags)
    _print_and_run("report", "--out", str(results), "--pair", *DEMOS)
    records = ResultStore(results).records()
    panels = select_main_panels(group_into_panels(records, list_checkpoints(records)))
    shown = [record for panel in panels for record in panel.records]
    draw_curves(depth_tables(shown), results / "curves.png")
    print("\n" + format_main_scores(panels))
    print_message("")
    demos = " and ".join(DEMOS)
    print_message(
        f"{MODEL} was trained for only a few steps, but {demos} were trained for one to two hours"
    )
    print_message(f"finished in {format_duration(time.monotonic() - start)}. Open the report:")
    print_message(f"  {results / 'report' / 'index.html'}")
    print_message("to do the same with your own encoder and photographs, run:")
    own_model = "timm:vit_small_patch16_224.dino --dataset folder --data-root my_photos"
    print_message(f"  ssl-bench probe --task all --checkpoint {own_model}")
    print_message("  ssl-bench report")
    return 0


def format_main_scores(panels: Sequence[ScorePanel]) -> str:
    """Return a table of scores at `NUM_BLOCKS` blocks, from the first block to the last.

    There is one row for each encoder and each panel (a group of comparable scores) in `panels`.
    """
    depth = max(layer for panel in panels for layer in panel.layers)
    last = NUM_BLOCKS - 1
    layers = list(dict.fromkeys(round(depth * n / last) for n in range(NUM_BLOCKS)))
    rows = [("task", "metric", "encoder", *(f"block {layer}" for layer in layers))]
    rows += [
        (
            *(panel.task, panel.metric_label, line.checkpoint.name),
            *(point.text_parts[0] if point else "-" for point in map(line.find_entry, layers)),
        )
        for panel in panels
        for line in panel.lines
    ]
    return align_columns(rows)


def _print_and_run(*words: str) -> None:
    print_message("")
    print_message(f"$ ssl-bench {quote_command(words)}")
    run_command(words)
