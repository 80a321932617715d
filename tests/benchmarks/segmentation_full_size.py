"""Linear segmentation of as many images as the published datasets have, in bounded memory.

    python -m tests.benchmarks.full_size --photos VOCdevkit --build DIR --counts voc_trainaug
    python -m tests.benchmarks.segmentation_full_size DIR ENCODER --json FILE [--cases NAME ...]

Each case is one `ssl-bench probe --task segmentation` in a process of its own. Beside it stands
what the machine decodes and prepares at that size when it does nothing else: `share` is the images
that the whole run decoded for each second of its processors, in percent of that. Other programs
lengthen `seconds` and leave the seconds of the processors nearly as they are.
"""

import argparse
import json
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.full_size_layouts import LAYOUTS
from tests.benchmarks.provenance import provenance

_DECODED = 1500


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        passes: How often the training images are decoded: for their labels, and as often as the
            encoder sees them where that is not the same pass.
    """

    dataset: str
    tier: str
    layer: str
    size: int
    epochs: int
    memory_gib: float
    passes: int

    def arguments(self, root: Path, encoder: Path, work: Path) -> list[str]:
        name, *overrides = LAYOUTS[self.dataset].choice
        words = ["probe", "--task", "segmentation", "--dataset", name, "--layer", self.layer]
        words += ["--data-root", str(root / self.dataset), "--checkpoint", str(encoder)]
        words += ["--out", str(work / "results"), *overrides, f"probe.cache={work / 'cache'}"]
        words += [f"probe.image_size={self.size}", f"probe.tier={self.tier}", "probe.panels=0"]
        words += [f"probe.memory_gib={self.memory_gib}", f"probe.training.epochs={self.epochs}"]
        return [*words, "probe.training.learning_rates=[1e-3,1e-2]", "data.fingerprint=stat"]


CASES = {
    "trainaug_disk": Case("voc_trainaug", "disk", "all", 224, 2, 1.0, passes=1),
    "trainaug_stream": Case("voc_trainaug", "stream", "all", 224, 1, 1.0, passes=3),
    "coco_stream": Case("coco_stuff", "stream", "0", 128, 1, 1.0, passes=3),
}


class Watched:
    """The most that lay in a folder while something ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.most = max(self.most, sum(map(_size, self.folder.rglob("*"))))


def _size(path: Path) -> int:
    try:
        return 512 * path.stat().st_blocks
    except OSError:
        return 0


def decode(dataset: str, root: Path, size: int) -> dict[str, float]:
    """Images decoded and prepared for each second of the processors, in this process."""
    import torch

    from probes.features.stream import read_ahead
    from probes.features.views import WholeImage, nearest_labels

    torch.set_num_threads(1)
    images, views = LAYOUTS[dataset].open(root / dataset).train(), WholeImage()

    def prepare(sample: Any) -> Any:
        image, mask = views.view(sample, 0, size)
        return image, nearest_labels(mask, size // 4, size // 4)

    start, before = time.perf_counter(), time.process_time()
    for _ in read_ahead(images, range(_DECODED), prepare, workers=2):
        pass
    cpu = time.process_time() - before
    return {
        "per_second": _DECODED / (time.perf_counter() - start),
        "per_cpu_second": _DECODED / cpu,
    }


def run(name: str, root: Path, encoder: Path) -> dict[str, Any]:
    case = CASES[name]
    train, val = (part.count for part in LAYOUTS[case.dataset].parts)
    alone = ["--decode", case.dataset, "--size", str(case.size), str(root), str(encoder)]
    _, printed = usage_of("tests.benchmarks.segmentation_full_size", alone)
    with tempfile.TemporaryDirectory(dir=root) as folder, Watched(Path(folder) / "cache") as disk:
        usage, _ = usage_of("ssl_bench", case.arguments(root, encoder, Path(folder)))
    decoded, limit = case.passes * train + val, json.loads(printed)
    return {
        "case": name,
        **vars(case),
        "images": [train, val],
        **rounded(usage),
        "disk_mebibytes": round(disk.most / 2**20),
        "decoded_images": decoded,
        "decode_limit": limit,
        "share": round(100 * decoded / usage.cpu_seconds / limit["per_cpu_second"], 1),
        "provenance": provenance(),
    }


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Linear segmentation at full counts",
        "",
        "Made by `tests/benchmarks/segmentation_full_size.py`: a ViT-Ti/16 without training, two",
        "learning rates a block, datasets of links to re-encoded photographs in their layouts.",
        "`share`: images decoded by the run for each second of the processors, in percent of what",
        "decoding and preparing alone reach beside it. `seconds` and images/s are with whatever",
        "else the machine did, pauses included: the seconds of the processors compare.",
        "",
        *dict.fromkeys(row["provenance"] for row in rows),
        "",
        "| dataset | images | blocks | pixels | epochs | tier | seconds | CPU seconds | images/s "
        "| peak MiB | disk MiB | share % |",
        "|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        train, val = row["images"]
        speed = row["decoded_images"] / row["seconds"]
        lines.append(
            f"| {row['dataset']} | {train:,} + {val:,} | {row['layer']} | {row['size']} | "
            f"{row['epochs']} | {row['tier']} | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} | "
            f"{speed:.0f} | {row['peak_mebibytes']:.0f} | {row['disk_mebibytes']:,} | "
            f"{row['share']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        print(json.dumps(decode(options.decode, options.root, options.size)))
        return
    if options.json is None:
        parser.error("--json FILE is needed")
    known = json.loads(options.json.read_text()) if options.json.exists() else []
    rows = {row["case"]: row for row in known}
    for name in options.cases:
        rows[name] = run(name, options.root, options.encoder)
        options.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    text = page(list(rows.values()))
    if options.table:
        options.table.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
