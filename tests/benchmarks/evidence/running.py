"""Training of the queue's runs: a process with one thread each, which goes on where it stopped."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pretrain.checkpoints import LOG
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.errors import SslBenchError
from ssl_bench.models import load_encoder
from ssl_bench.results import SUPERVISED, ResultStore
from tests.benchmarks.evidence.probing import probed
from tests.benchmarks.evidence.rows import (
    ROWS,
    Row,
    patches_of,
    probes_of,
    rate_run,
    seed_run,
)
from tests.benchmarks.ledger import Ledger, Run, packed
from tests.benchmarks.patches import closeness
from tests.benchmarks.processes import said_in
from tests.benchmarks.provenance import provenance

COMPARED = 200
"""Held-out images whose patches are compared."""
SMOKE = "smoke-"
"""Names that begin so were cut short, and no page takes them."""


@dataclass(frozen=True)
class Place:
    """Where data lies and runs are.

    Attributes:
        data: What `tests.benchmarks.evidence.data` made.
        out: Folder of run folders.
        steps: Each run is cut after so many, on few images; None for whole runs.
    """

    data: Path
    out: Path
    steps: int | None = None

    def named(self, run: str) -> str:
        return run if self.steps is None else f"{SMOKE}{run}"


def run_row(ledger: Ledger, place: Place, name: str, arms: Iterable[str]) -> None:
    """Runs of some arms of a row: seed by seed, so that an unfinished row has whole pairs."""
    row = ROWS[name]
    rates = {arm: best_rate(ledger, place, name, arm) for arm in arms}
    for seed in row.seeds if place.steps is None else row.seeds[:1]:
        for arm, rate in rates.items():
            if row.whole is not None and arm not in row.whole and place.steps is None:
                continue
            run = place.named(seed_run(name, arm, seed))
            options = [*_schedule(row.epochs), *_tested_images(row, place, run), *_rate(row, rate)]
            options += [f"train.seed={seed}", *_kept(row)]
            found = ledger.of(run, partial(_trained, place, row, arm, run, options, row.epochs))
            print(run, f"rate {rate:g}" if rate else "", _last(found), flush=True)
            if row.probed:
                probing = partial(probed, place.data, place.out, run, cut=place.steps is not None)
                found = ledger.of(probes_of(run), probing)
                print(probes_of(run), f"{len(found['cells'])} cells", flush=True)
            if row.compared:
                ledger.of(patches_of(run), partial(_patches, place, row, run))


def best_rate(ledger: Ledger, place: Place, name: str, arm: str) -> float | None:
    """The rate of the highest score on the held-out images after one epoch.

    None where the row takes the published one.
    """
    row, found = ROWS[name], {}
    if not row.kind.chosen_by:
        return None
    for rate in row.kind.rates if place.steps is None else row.kind.rates[:1]:
        run = place.named(rate_run(name, arm, rate))
        options = [*_schedule(1), *_choosing_images(row, place), *_rate(row, rate), "train.seed=0"]
        options += row.kind.choosing
        reached = ledger.of(run, partial(_first, place, row, arm, run, options))
        found[rate] = reached[row.kind.chosen_by][-1]
        print(f"{run}: {found[rate]:.2f} % held-out", flush=True)
    return max(found, key=lambda rate: found[rate])


def _first(place: Place, row: Row, arm: str, run: str, options: Sequence[str]) -> Run:
    """What a run of one epoch reached, and how its patches compare where the row asks for it."""
    reached = _trained(place, row, arm, run, options, 1)
    return reached | (_compared(place, row, run) if row.compared else {})


def _trained(
    place: Place, row: Row, arm: str, run: str, options: Sequence[str], epochs: int
) -> Run:
    """What a run reached, trained until it is finished."""
    out = place.out / run
    command = [sys.executable, "-m", "ssl_bench", "pretrain", "--out", str(out), "--resume"]
    options = [*row.arms[arm], *row.kind.options, *row.options, *options, *_cut(row, place)]
    # The last of each key holds; `pretrain` refuses one that comes twice.
    last = {option.partition("=")[0]: option for option in options}
    try:
        said_in([*command, *last.values()], place.out / f"{run}.txt")
    except SslBenchError as error:
        # An encoder that is probed has to be there; else what diverged is a result.
        if row.probed and epochs == row.epochs:
            raise
        return diverged(out, row, str(error))
    return finished(out, row, epochs)


def finished(run: Path, row: Row, epochs: int) -> Run:
    """Scores after each epoch, hours of training, where it was trained, which images were right.

    Args:
        run: A run folder.
        row: The run is one of its.
        epochs: As many as the run was to have.

    Raises:
        SslBenchError: the run was stopped before.
    """
    found = _reached(run, row)
    measured = [len(found[name]) for name in row.kind.scores if name in found]
    last = min([found.pop("epochs"), *measured])
    if last < epochs and not run.name.startswith(SMOKE):
        raise SslBenchError(f"{run} has {last} of {epochs} epochs; type the command again")
    return found | _hits(run)


def _compared(place: Place, row: Row, run: str) -> Run:
    """How close the patches of held-out images are to each other, block by block."""
    encoder = load_encoder(str(place.out / run))
    images = ImageFolder(place.data / f"{row.kind.data}_choosing" / "val").images()
    found = closeness(encoder, images, COMPARED, range(encoder.depth))
    return {"cosine": [one.cosine for one in found], "merged": [one.merged for one in found]}


def _patches(place: Place, row: Row, run: str) -> Run:
    return _compared(place, row, run) | {"hours": 0.0, "provenance": provenance()}


_DIVERGED = ("was not finite for", "stopped at step")
"""What `pretrain` says of a run that it ended because it no longer learned."""


def diverged(run: Path, row: Row, reason: str) -> Run:
    """What is reported of a run that diverged: right in no image, whatever it was before.

    Args:
        run: A run folder.
        row: The run is one of its.
        reason: What `pretrain` said.

    Raises:
        SslBenchError: it ended for another reason.
    """
    if not any(words in reason for words in _DIVERGED):
        raise SslBenchError(reason)
    found = _reached(run, row)
    found.pop("epochs")
    for name in row.kind.scores:
        found[name] = [*found.get(name, ()), 0.0]
    return found | {"diverged": next(words for words in _DIVERGED if words in reason)}


def _reached(run: Path, row: Row) -> Run:
    """Of the log; a score that is not finite is 0, as the outputs of the run were not."""
    log = run / LOG
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    found: Run = {
        name: [one[key] or 0.0 for one in rows if key in one]
        for name, key in row.kind.scores.items()
    }
    found = {name: values for name, values in found.items() if values}
    found |= {key: _by_epoch(rows, key) for key in row.kind.means}
    seconds = sum(row.kind.batch / one["images_per_second"] for one in rows if _is_timed(one))
    found |= {"hours": round(seconds / 3600, 3), "provenance": provenance()}
    return found | {"epochs": rows[-1]["epoch"] + 1 if rows else 0}


def _is_timed(row: dict[str, Any]) -> bool:
    return bool(row.get("images_per_second"))


def _by_epoch(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        if row.get(key) is not None:
            by_epoch.setdefault(row["epoch"], []).append(row[key])
    return [fmean(values) for _, values in sorted(by_epoch.items())]


def _hits(run: Path) -> dict[str, Any]:
    """Those of the record that a tested run leaves of itself."""
    # A head whose outputs are not finite leaves none.
    folder = _records(run)
    if not folder.is_dir() or not list(folder.rglob("*.npz")):
        return {}
    store = ResultStore(folder)
    (record,) = (r for r in store.records() if (r.task, r.metric) == (SUPERVISED, "top1"))
    hits = store.per_image(record)
    assert hits is not None, folder
    return {"hits": packed(hits.astype(bool))}


def _records(run: Path) -> Path:
    return run.with_name(f"{run.name}-records")


def _schedule(epochs: int) -> list[str]:
    return [f"train.epochs={epochs}", f"train.warmup_epochs={epochs / 10}"]


def _rate(row: Row, rate: float | None) -> list[str]:
    # The option counts for 256 images a step.
    return [] if rate is None else [f"optimizer.lr={rate * 256 / row.kind.batch}"]


def _kept(row: Row) -> list[str]:
    return [f"train.keep_every={row.kept}"] if row.kept else []


def _choosing_images(row: Row, place: Place) -> list[str]:
    root = place.data / f"{row.kind.data}_choosing"
    if row.kind.tested:
        return [f"data.root={root}", "monitor.val_split=val"]
    monitored = [f"monitor.root={root}", "monitor.val_split=val", "monitor.knn_epochs=1"]
    return [f"data.root={root}/train", *monitored]


def _tested_images(row: Row, place: Place, run: str) -> list[str]:
    if not row.kind.data:
        return []
    root = place.data / row.kind.data
    if not row.kind.tested:
        return [f"data.root={root}/train"]
    records = f"monitor.results={_records(place.out / run)}"
    return [f"data.root={root}", "monitor.val_split=test", "monitor.val_images=10000", records]


def _cut(row: Row, place: Place) -> list[str]:
    """What makes a run seconds long."""
    if place.steps is None:
        return []
    steps = f"train.max_steps={place.steps}"
    short = [steps, "train.batch_size=16", "train.warmup_epochs=null"]
    if not row.kind.data:
        return [*short, "objective.test_strings=4"]
    short += ["data.fingerprint=stat", "data.limit=1000"]
    return [*short, "monitor.val_images=100", "monitor.train_images=100"]


def _last(run: Run) -> str:
    scores = {
        name: run[name][-1]
        for name in ("top1", "letters_16", "letters_32", "loss")
        if run.get(name)
    }
    return ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
