"""`ssl-bench quickstart`: from nothing to a report on encoders, without a network."""

import argparse
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ssl_bench.cli.dispatch import run
from ssl_bench.report.checkpoints import checkpoints_of
from ssl_bench.report.model import Line, Panel, headline_panels, panels_of
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.escaping import printable, shell_words
from ssl_bench.system.progress import in_words, say
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import draw_curves

DEMOS = ("demo:skip", "demo:skipless")
MODEL = "vit_tiny_skip"

# Sizes of the demonstration encoders; steps and not minutes, so that every machine computes the
# same.
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
    "train.max_steps=20",
)
PROBES = (
    ("--task", "all", "--limit", "30", "probe.protocol=fast", "probe.training.epochs=10",
     "probe.memory_patches=5000", "probe.image_size=128", "probe.view_images=10",
     "probe.num_images=4"),
    ("--task", "knn,classification", "--dataset", "toy_objects", "--limit", "200",
     "probe.training.c_values=[1e-3,1e-2,1e-1]", "probe.image_size=64"),
)  # fmt: skip
SHOWN_BLOCKS = 4


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Pretrain for some steps, probe its blocks and those of the demonstration encoders."""
    del overrides
    start = time.monotonic()
    out = Path(options.out)
    results = out / "results"
    own = out / MODEL
    _pretrain(own, overwrite=options.overwrite)
    _probe([*DEMOS, str(own)], results, overwrite=options.overwrite)
    _run("report", "--out", str(results), "--pair", *DEMOS)
    records = ResultStore(results).records()
    panels = headline_panels(panels_of(records, checkpoints_of(records)))
    _draw(records, panels, results / "curves.png")
    print("\n" + headline_table(panels))
    _say_end(results, time.monotonic() - start)
    return 0


def headline_table(panels: Sequence[Panel]) -> str:
    """A row a task and encoder: its headline metric at some blocks from the first to the last."""
    depth = max(layer for panel in panels for layer in panel.layers)
    last = SHOWN_BLOCKS - 1
    layers = list(dict.fromkeys(round(depth * n / last) for n in range(SHOWN_BLOCKS)))
    rows = [("task", "metric", "encoder", *(f"block {layer}" for layer in layers))]
    rows += [
        (panel.task, panel.measured, line.checkpoint.label, *_values(line, layers))
        for panel in panels
        for line in panel.lines
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(printable("  ".join(map(str.ljust, row, widths)).rstrip()) for row in rows)


def _values(line: Line, layers: Sequence[int]) -> Iterator[str]:
    for layer in layers:
        point = line.at(layer)
        yield point.parts[0] if point else "-"


def _pretrain(folder: Path, *, overwrite: bool) -> None:
    if (folder / "last.safetensors").is_file() and not overwrite:
        say(f"{folder} is pretrained already, skipped (--overwrite)")
        return
    # A folder without weights is a run that was stopped; it is begun anew.
    again = ["--overwrite"] if folder.exists() else []
    _run("pretrain", f"model={MODEL}", *PRETRAINING, "--out", str(folder), *again)


def _probe(encoders: Sequence[str], results: Path, *, overwrite: bool) -> None:
    checkpoints = [word for encoder in encoders for word in ("--checkpoint", encoder)]
    where = ["--out", str(results), *(["--overwrite"] if overwrite else [])]
    for probes in PROBES:
        # One table at the end says more to a beginner than all of them in between.
        with redirect_stdout(io.StringIO()):
            _run("probe", *probes, *checkpoints, *where)


def _run(*words: str) -> None:
    say("")
    say(f"$ ssl-bench {shell_words(words)}")
    run(words)


def _draw(records: Sequence[Record], panels: Sequence[Panel], figure: Path) -> None:
    shown = {point for panel in panels for line in panel.lines for p in line.points
             for point in p.records}  # fmt: skip
    draw_curves(depth_tables([records[number] for number in sorted(shown)]), figure)


def _say_end(results: Path, seconds: float) -> None:
    say("")
    say(f"{MODEL} took a few steps and knows next to nothing; {' and '.join(DEMOS)} trained for an "
        "hour or two each")  # fmt: skip
    say(f"it took {in_words(seconds)}; to look at:")
    say(f"  {results / 'report' / 'index.html'}")
    say("the same for a model and photographs of your own:")
    say("  ssl-bench probe --task all --checkpoint timm:vit_small_patch16_224.dino "
        "--dataset folder --data-root my_photos")  # fmt: skip
    say("  ssl-bench report")
