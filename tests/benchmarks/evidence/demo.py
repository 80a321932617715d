"""The demonstration encoders, from the finished runs of the row `dino`.

    python -m tests.benchmarks.evidence.demo RUNS [--json FILE] [--out results/demo]

RUNS is `--out` of the queue, FILE its ledger. Of V6's arms with skips the one whose training loss
is lowest in the last epoch is taken; without skips the start that V13 had trained whole, the one
that keeps patches apart. No probe is asked. Each is written in bfloat16 with its sha256, and card,
configuration and log beside it. One whose arms and probes are finished is written, whatever the
other lacks.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from pretrain.checkpoints import CONFIG, ENCODER, LOG
from ssl_bench.errors import DataError
from ssl_bench.models import EncoderModule, load_encoder, save_encoder
from ssl_bench.models.loading.addresses import NAMES, file_name
from ssl_bench.models.loading.checkpoint import read_metadata
from ssl_bench.system.files import sha256_of
from tests.benchmarks.evidence.claims import MOST_BYTES
from tests.benchmarks.evidence.page import LEDGER, ROOT
from tests.benchmarks.evidence.probing import RANDOM, TRAINED
from tests.benchmarks.evidence.rows import ROWS, demo_of, probes_of, reported_of
from tests.benchmarks.evidence.verdicts import Runs
from tests.benchmarks.ledger import Ledger, Run
from tests.benchmarks.provenance import provenance

ROW, APART = "dino", "apart"
# Of the log one step in so many is kept, and every one that says more than a usual one.
_EVERY = 20


def candidates(name: str) -> list[str]:
    """Runs of which the one of the lowest loss is `demo:NAME`."""
    if name == "skipless":
        return reported_of(APART)
    return [run for run in reported_of(ROW) if run.startswith(f"{ROW}-{name}_")]


def chosen(name: str, runs: Runs) -> str:
    """The run behind `demo:NAME`, by the loss of its last epoch.

    Raises:
        DataError: a run of its kind is not finished, or the probes of the chosen one.
    """
    names = candidates(name)
    wanted = f"demo:{name} is the one of {', '.join(names)} with the lowest loss"
    if missing := [run for run in names if run not in runs]:
        raise DataError(
            f"{wanted}; expected all of them in the ledger, {', '.join(missing)} is missing: "
            "run the row"
        )
    run = min(names, key=lambda run: runs[run]["loss"][-1])
    if probes_of(run) not in runs:
        raise DataError(
            f"{wanted}, {run}; expected its probes in the ledger, {probes_of(run)} is missing: "
            "run the row"
        )
    return run


def export(name: str, runs: Runs, folder: Path, out: Path) -> list[Path]:
    """Write an encoder in bfloat16 and what belongs to it; gives back what was written.

    Args:
        name: `skip` or `skipless`.
        runs: The ledger's content.
        folder: Of run folders.
        out: Where to write.

    Raises:
        DataError: a run is not finished, or the file would be above 6 MB.
    """
    run = chosen(name, runs)
    source = folder / run
    if not source.is_dir():
        raise DataError(
            f"demo:{name} is of the run {run}; expected its folder in {folder}, which has none; "
            "what was written before stays"
        )
    weights = out / file_name(name)
    out.mkdir(parents=True, exist_ok=True)
    model = load_encoder(str(source)).module
    assert isinstance(model, EncoderModule)
    said = read_metadata(source / ENCODER)
    kept = {key: said[key] for key in ("step", "epoch", "mean", "std") if key in said}
    save_encoder(weights, model.to(torch.bfloat16), kept)
    size = weights.stat().st_size
    if size >= MOST_BYTES:
        weights.unlink()
        raise DataError(f"{weights} would have {size:,} bytes, expected below {MOST_BYTES:,}")
    beside = {suffix: weights.with_suffix(suffix) for suffix in (".md", ".yaml", ".jsonl")}
    beside[".yaml"].write_text(yaml.safe_dump(_without_places(source / CONFIG), sort_keys=False))
    beside[".jsonl"].write_text("\n".join(_thinned(source / LOG)) + "\n")
    beside[".md"].write_text(card(name, run, runs, weights))
    return [weights, weights.with_name(weights.name + ".sha256"), *beside.values()]


def card(name: str, run: str, runs: Runs, weights: Path) -> str:
    """What the encoder is, what it was trained on and what it can, Markdown.

    Args:
        name: `skip` or `skipless`.
        run: Name of the run it is from.
        runs: The ledger's content.
        weights: The written file.
    """
    trained, probes = runs[run], runs[probes_of(run)]
    kind = "with" if name == "skip" else "without"
    epochs = len(trained["loss"])
    beside = [weights.with_suffix(suffix).name for suffix in (".yaml", ".jsonl")]
    lines = [
        f"# demo:{name}",
        "",
        f"A ViT of 12 blocks, width 128 and patch 8 {kind} skip connections, trained by DINO at 64",
        f"pixels for {epochs} epochs, {trained['hours']:.1f} hours of one core; run `{run}`,",
        f"chosen {_reason(name, runs)}, without a look at any probe.",
        "",
        *_start(run),
        "- **Data**: 60,000 images of 120 of the 200 classes of Tiny-ImageNet, without labels. Its",
        "  pictures are ImageNet's, for non-commercial research and education; so are weights",
        "  learned from them.",
        "- **It can** show in seconds what each probe of this suite measures, and differ from",
        "  random weights where the table says so.",
        "- **It cannot** stand for DINO, nor for encoders with or without skip connections: one",
        "  seed, few epochs, a small model, a coarse grid of rates. It is not made for use.",
        f"- **File**: bfloat16, {weights.stat().st_size / 1e6:.1f} MB, sha256",
        f"  `{sha256_of(weights)}`; it is computed with in float32. `{beside[0]}` is its",
        f"  configuration, `{beside[1]}` its log, one step in {_EVERY}.",
        "",
        "The probes are those of the float32 weights before they were rounded. Others stand beside",
        "raw colours and answers without a look at the images in `results/tables/demo_probes.md`.",
        "",
        *_table(probes["cells"]),
        "",
        trained["provenance"],
    ]
    return "\n".join(lines) + "\n"


def _reason(name: str, runs: Runs) -> str:
    if name == "skipless":
        tried = len(ROWS[APART].arms)
        return (
            f"of {tried} starts as the one whose patches stay furthest apart, at\na loss not above "
            "the published one's (V13 in `results/tables/evidence.md`)"
        )
    losses = "; ".join(f"{run} {runs[run]['loss'][-1]:.3f}" for run in sorted(candidates(name)))
    return f"for the lowest training loss of the last epoch ({losses})"


def _start(run: str) -> list[str]:
    """What a start of V13 has different from the published one."""
    for arm in ROWS[APART].whole or ():
        if run in reported_of(APART, [arm]):
            options = ", ".join(f"`{option}`" for option in ROWS[APART].arms[arm][1:])
            return [f"- **Without skips**: start `{arm}`: {options or 'as published'}."]
    return []


def _table(cells: Sequence[Run]) -> list[str]:
    """A row a question and encoder, a column a block."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for cell in cells:
        if cell["encoder"] in (TRAINED, RANDOM):
            asked = f"{cell['task']}, {cell['metric']}, {cell['dataset']}, {cell['images']} images"
            rows.setdefault((asked, cell["encoder"]), {})[cell["layer"]] = cell["value"]
    blocks = sorted({layer for values in rows.values() for layer in values})
    lines = [
        "| probe | weights | " + " | ".join(f"block {layer}" for layer in blocks) + " |",
        "|---|---|" + "---:|" * len(blocks),
    ]
    for (asked, encoder), values in rows.items():
        lines.append(f"| {asked} | {encoder} | {_values(values, blocks)} |")
    return lines


def _values(values: Mapping[int, float], blocks: Sequence[int]) -> str:
    return " | ".join(f"{values[layer]:.1f}" if layer in values else "-" for layer in blocks)


def _without_places(config: Path) -> dict[str, Any]:
    """A run's configuration without where its files lay."""
    content = yaml.safe_load(config.read_text())
    content["data"]["root"] = ROWS[ROW].kind.data
    return {part: values for part, values in content.items() if part != "monitor"}


def _thinned(log: Path) -> list[str]:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    usual = len(rows[0])
    kept = [row for i, row in enumerate(rows) if i % _EVERY == 0 or len(row) > usual]
    return [json.dumps(row) for row in [*kept, *([rows[-1]] if rows[-1] not in kept else [])]]


def _of_file(name: str, runs: Runs, weights: Path) -> Run:
    """What the ledger keeps of a file that loads."""
    load_encoder(str(weights))
    said = {"run": chosen(name, runs), "bytes": weights.stat().st_size, "hours": 0.0}
    return {**said, "sha256": sha256_of(weights), "provenance": provenance()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", type=Path, default=LEDGER)
    parser.add_argument("--out", type=Path, default=ROOT / "results/demo")
    options = parser.parse_args()
    ledger = Ledger(options.json)
    refused: list[str] = []
    for name in NAMES:
        try:
            files = export(name, ledger.runs, options.runs, options.out)
            ledger.put(demo_of(name), _of_file(name, ledger.runs, files[0]))
            print(*files, sep="\n")
        except DataError as error:
            refused.append(str(error))
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
