"""`ssl-bench quickstart`: from nothing to per-depth tables of all probes, without a network."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.cli.dispatch import run
from ssl_bench.results import ResultStore
from ssl_bench.system.escaping import shell_words
from ssl_bench.system.progress import say
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import draw_curves

MODELS = ("vit_tiny_skip", "vit_tiny_skipless")
HEADLINES = ("miou_holdout", "corloc", "explained_variance")

# Sized for two cores: at 64 pixels, patch 8 and a small head these steps take under a minute.
PRETRAINING = (
    "model.image_size=64",
    "model.patch_size=8",
    "objective.out_dim=1024",
    "objective.hidden_dim=512",
    "objective.momentum=0.99",
    "objective.teacher_temperature=0.04",
    "objective.crops.num_locals=4",
    "optimizer.lr=4e-3",
    "train.batch_size=16",
    "train.max_steps=48",
    "train.max_minutes=1",
)
PROBING = ("probe.protocol=fast", "probe.image_size=128", "probe.training.epochs=10")


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Pretrain skip and skipless, probe all blocks, draw the curves and say what to type next."""
    del overrides
    start = time.monotonic()
    out = Path(options.out)
    for model in MODELS:
        _pretrain(out / model, model, overwrite=options.overwrite)
    _probe(out, overwrite=options.overwrite)
    figure = _draw(out)
    say("")
    say(f"quickstart took {time.monotonic() - start:.0f} s")
    say(f"curves over blocks   {figure}")
    say(f"maps of every block  {out / 'results' / 'pictures'}")
    _say_next(out)
    return 0


def _pretrain(folder: Path, model: str, *, overwrite: bool) -> None:
    if (folder / "last.safetensors").is_file() and not overwrite:
        say(f"{folder} is pretrained already, skipped (--overwrite)")
        return
    # A folder without weights is a run that was stopped; it is begun anew.
    again = ["--overwrite"] if folder.exists() else []
    _run("pretrain", f"model={model}", *PRETRAINING, "--out", str(folder), *again)


def _probe(out: Path, *, overwrite: bool) -> None:
    checkpoints = [word for model in MODELS for word in ("--checkpoint", str(out / model))]
    where = ["--out", str(out / "results"), *(["--overwrite"] if overwrite else [])]
    _run("probe", "--task", "all", "--layer", "all", *checkpoints, *PROBING, *where)


def _run(*words: str) -> None:
    say("")
    say(f"$ ssl-bench {shell_words(words)}")
    run(words)


def _draw(out: Path) -> Path:
    records = ResultStore(out / "results").records()
    headlines = [record for record in records if record.metric in HEADLINES]
    figure = out / "results" / "curves.png"
    draw_curves(depth_tables(headlines), figure)
    return figure


def _say_next(out: Path) -> None:
    skipless = out / "vit_tiny_skipless"
    say("")
    say("next, for example:")
    say(f"  ssl-bench table --task tokencut --format latex --out {out / 'results'}")
    say("  ssl-bench probe --task tokencut --layer 11")
    say(f"  ssl-bench probe --task pca --checkpoint {skipless} --dataset folder --data-root PHOTOS")
