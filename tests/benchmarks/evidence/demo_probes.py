"""Probes of the demonstration encoders, beside random weights and blind answers, for the gallery.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.evidence.demo_probes DATA [--out FOLDER]

DATA is what `tests.benchmarks.evidence.data` made. Records that are there are not computed again;
pictures lie beside them and are not committed.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssl_bench.models.loading.addresses import DEMO, NAMES, demo_folder, file_name
from tests.benchmarks.evidence.page import ROOT

STORE = "results/demo_probes"
Probes = tuple[str, str, str | None, tuple[str, ...]]
PROBES: tuple[Probes, ...] = (
    ("knn,classification", "class_folders", "cifar10",
     ("dataset.name=cifar10", "dataset.val_split=test", "probe.image_size=64", "--limit", "3000")),
    ("segmentation,retrieval", "voc2012", "photos", ("probe.image_size=256",)),
    ("segmentation,retrieval", "toy", None, ("probe.image_size=128", "--limit", "60")),
    ("tokencut,pca", "voc2012", "photos", ("--pictures", "8")),
    # As many times the 64 pixels of training as VOC's 500 are the 224 of published ViTs.
    ("tokencut", "voc2012", "photos", ("probe.longer_side=144",)),
)  # fmt: skip
"""Tasks, dataset, its root in DATA where it has one, options."""


def commands(
    data: Path, out: Path, encoders: Sequence[str], probes: Sequence[Probes] = PROBES
) -> Iterator[list[str]]:
    """A call of `ssl-bench probe` for each group of probes.

    Args:
        data: The folder of data.
        out: Where the records go.
        encoders: Addresses.
        probes: The groups.
    """
    asked = [part for encoder in encoders for part in ("--checkpoint", encoder)]
    for task, dataset, root, options in probes:
        where = ["--data-root", str(data / root)] if root else []
        written = ["--dataset", dataset, *where, "--out", str(out)]
        yield ["probe", "--task", task, *asked, *written, *options]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="what tests.benchmarks.evidence.data made")
    parser.add_argument("--out", type=Path, default=ROOT / STORE)
    options = parser.parse_args()
    there = [name for name in NAMES if (demo_folder() / file_name(name)).is_file()]
    for words in commands(options.data, options.out, [f"{DEMO}:{name}" for name in there]):
        subprocess.run([sys.executable, "-m", "ssl_bench", *words, "--baselines"], check=True)
    packed = ["table", "--pack", "--out", str(options.out)]
    subprocess.run([sys.executable, "-m", "ssl_bench", *packed], check=True)


if __name__ == "__main__":
    main()
