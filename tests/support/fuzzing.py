"""Test the file readers of this suite with randomly damaged files.

`python -m tests.support.fuzzing FORMAT COUNT` prints how many files were read and how many were
refused. The command also prints up to six unexpected exceptions.
"""

import io
import itertools
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from ssl_bench.cli.data import read_manifest
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.files.file_sets import Files, LabelMap, Masks
from ssl_bench.data.files.images import read_image
from ssl_bench.data.layouts.ade20k import class_names
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco20k import parse_boxes
from ssl_bench.data.layouts.voc import VocBoxes
from ssl_bench.data.splits import read_list
from ssl_bench.errors import SslBenchError
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.planning import plan_probes
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.sheets import render_tables
from tests.core.test_results import RECORD
from tests.support.faults import DINO_LIKE, OBJECT, TINY, encoded, picture

SECONDS_EACH = 5
MEBIBYTES = 700
INTERESTING = (
    *(b"\x00", b"\xff", b"\n", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80", b"\xd8\x00"),
    *(b"-1", b"1e999", b"NaN", b"9" * 400, b"null", b"{}", b"[" * 3000, b'"', b"<", b"&a;", b"\\"),
    *(b"../", b"/", b"%s", b"${x}", b"=", b",", b"true", b"0.5", b"\xed\xa0\x80"),
)


@dataclass(frozen=True)
class Kind:
    """A file format, the function that reads it, and valid example files."""

    seeds: list[bytes]
    name: str
    read: Callable[[Path], object]


def mutate(content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Damage the content of a file at random, for example by flipping a bit."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        near_start = rng.randrange(min(len(data), 120) + 1)
        at = rng.choice((at, near_start))
        length = rng.choice((1, 1, 2, 4, 16, 200))
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at : at + length] = rng.choice(INTERESTING)
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            data[at : at + length] = other[start : start + length]
        elif kind == 5:
            data[at : at + length] = rng.randbytes(length)
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def images() -> Kind:
    colour, grey = picture(0, 24, 31), picture(1, 17, 9).convert("L")
    seeds = [encoded(k, colour) for k in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP", "PPM")]
    seeds += [encoded(kind, grey) for kind in ("JPEG", "PNG", "TIFF")]
    seeds.append(encoded("JPEG", colour.convert("CMYK")))
    progressive = io.BytesIO()
    colour.save(progressive, "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    return Kind([*seeds, progressive.getvalue()], "image.jpg", read_image)


def masks() -> Kind:
    indices = np.arange(24, dtype=np.uint8).reshape(4, 6) % 21
    palette = Image.fromarray(indices)
    palette.putpalette(list(range(256)) * 3)
    wide = Image.fromarray(indices.astype(np.uint16))
    seeds = [encoded("PNG", image) for image in (palette, wide, Image.fromarray(indices))]
    seeds.append(encoded("TIFF", palette))
    labels = LabelMap({**{n: n for n in range(21)}, 255: 255}, hint="as published")
    return Kind(seeds, "m.png", lambda path: Masks(Files(path.parent, ".png"), labels).read("m"))


def coco() -> Kind:
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg"} for n in (3, 1, 2)],
        "annotations": [
            {"id": n, "image_id": 1 + n % 3, "bbox": [n, 2.5, 3, 4], "iscrowd": n % 2}
            for n in range(5)
        ],
    }
    return Kind(
        [json.dumps(content).encode()],
        "instances.json",
        lambda path: parse_boxes(path).read("COCO_train2014_000000000001"),
    )


def xml() -> Kind:
    entity = "<!DOCTYPE a [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]>"
    seeds = [OBJECT, entity + OBJECT.replace("cat", "&b;"), '<?xml version="1.0"?>' + OBJECT]
    return Kind(
        [seed.encode() for seed in seeds],
        "a.xml",
        lambda path: VocBoxes(Files(path.parent, ".xml"), exclude_difficult=True).read("a"),
    )


def safetensors_headers() -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        ours, dino = Path(folder, "ours.safetensors"), Path(folder, "dino.safetensors")
        save_encoder(ours, build_vit(TINY, seed=0), {"step": "1"})
        safetensors.torch.save_file(build_vit(DINO_LIKE, seed=0).state_dict(), dino)
        seeds = [ours.read_bytes(), dino.read_bytes()[:]]

    def read(path: Path) -> object:
        # The digest of the damaged file is correct, so that the header is read.
        path.with_name(f"{path.name}.sha256").write_text(f"{file_sha256(path)}  {path.name}\n")
        return load_encoder(str(path))

    return Kind(seeds, "weights.safetensors", read)


def pickles() -> Kind:
    seeds = []
    for zipped in (True, False):
        memory = io.BytesIO()
        weights = {"teacher": {"a.weight": torch.zeros(3), "b": torch.ones(2, 2)}, "epoch": 3}
        torch.save(weights, memory, _use_new_zipfile_serialization=zipped)
        seeds.append(memory.getvalue())
    return Kind(seeds, "weights.pth", lambda path: load_encoder(str(path)))


def overrides() -> Kind:
    probing = [
        "probe.num_images=3", "probe.facet=key", "data.root=/x", "seed=4", "dtype=float16",
        "probe.protocol=batch", "++probe.new=1", "~data.root", "probe.facet=[a,b]",
        "probe.image_size=1e3", "dataset=toy", "probe.num_images=${seed}", "dataset.split='a b'",
    ]  # fmt: skip
    pretraining = ["train.epochs=3", "model=vit_tiny_skip", "model.dim=12", "optimizer.lr=0.1"]

    def read(path: Path) -> object:
        override = path.read_bytes().decode(errors="replace")
        if override.partition("=")[0].split(".")[0] in ("train", "model", "optimizer", "objective"):
            return build(compose_config("pretraining", [override]))
        return plan_probes(["pca"], ["folder"], [override])

    return Kind([override.encode() for override in [*probing, *pretraining]], "override", read)


def record_files() -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        seed = ResultStore(Path(folder)).save(RECORD).read_bytes()

    def read(path: Path) -> object:
        stored = ResultStore(path.parent).path(RECORD.key())
        stored.parent.mkdir(parents=True, exist_ok=True)
        path.replace(stored)
        tables = depth_tables(ResultStore(path.parent).records())
        return [render_tables([t], style) for t in tables for style in ("text", "latex", "csv")]

    return Kind([seed], "one.json", read)


def per_image_files() -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        path = store.save(RECORD, np.arange(60).reshape(20, 3))
        seed = path.with_suffix(".npz").read_bytes()

    def read(path: Path) -> object:
        store = ResultStore(path.parent)
        stored = store.path(RECORD.key()).with_suffix(".npz")
        stored.parent.mkdir(parents=True, exist_ok=True)
        path.replace(stored)
        return store.load_per_image(RECORD)

    return Kind([seed], "one.npz", read)


def lists() -> Kind:
    texts = ["2007_000027\n2007_000032 1\n", f"{'0' * 64}  a/b.png\n{'1' * 64}  c\\\\d\n"]
    texts += ["Idx\tRatio\n1\t0.1\twall, x\n", "val_0.png\tn1\t0\t0\t9\t9\n"]

    def read(path: Path) -> object:
        return [_answer(reader, path) for reader in (read_list, read_manifest, *_IN_PLACE)]

    return Kind([text.encode() for text in texts], "list.txt", read)


def _names(path: Path) -> object:
    (path.parent / "objectInfo150.txt").write_bytes(path.read_bytes())
    return class_names(path.parent)


def _tiny_imagenet(path: Path) -> object:
    root = path.parent
    if not (root / "val").is_dir():
        for name in ("train/n1/0.png", "train/n2/0.png", "val/images/val_0.png"):
            (root / name).parent.mkdir(parents=True)
            (root / name).touch()
    (root / "val/val_annotations.txt").write_bytes(path.read_bytes())
    return ClassFolders(root).val().labels


def _sidecar(path: Path) -> object:
    weights = path.parent / "w.safetensors"
    if not weights.exists():
        save_encoder(weights, build_vit(TINY, seed=0), {})
    (path.parent / "w.safetensors.sha256").write_bytes(path.read_bytes())
    return load_encoder(str(weights))


_IN_PLACE = (_names, _tiny_imagenet, _sidecar)


def _answer(reader: Callable[[Path], object], path: Path) -> object:
    try:
        return reader(path)
    except SslBenchError as error:
        return error


KINDS: dict[str, Callable[[], Kind]] = {
    "images": images,
    "masks": masks,
    "coco": coco,
    "xml": xml,
    "safetensors": safetensors_headers,
    "pickles": pickles,
    "overrides": overrides,
    "records": record_files,
    "per_image": per_image_files,
    "lists": lists,
}


class TooSlow(BaseException):
    """An exception that is raised when a function exceeds its time limit."""


def confine(mebibytes: int) -> None:
    """Limit the memory of this process. Raise `TooSlow` when the signal SIGPROF arrives."""

    def ring(*_: object) -> None:
        raise TooSlow

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, ring)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(name: str, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Read randomly damaged files and report unexpected exceptions."""
    kind, rng = KINDS[name](), random.Random(name)
    ends: Counter[str] = Counter()
    reports: list[str] = []
    path = folder / kind.name
    for number in range(count):
        content = mutate(kind.seeds[number % len(kind.seeds)], kind.seeds, rng)
        path.write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
        try:
            kind.read(path)
            ends["read"] += 1
        except SslBenchError as error:
            ends["refused"] += 1
            if not str(error).strip():
                reports.append(f"{number}: an error without a message: {error!r}")
        except BaseException as error:
            ends["broken"] += 1
            last = "".join(traceback.format_exception(error)[-3:])
            reports.append(f"{name} {number}: {content[:300]!r}\n{last}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return ends, reports


def main(names: Sequence[str], count: int) -> int:
    confine(MEBIBYTES)
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            ends, reports = fuzz(name, count, Path(folder))
        print(name, dict(ends), f"{time.monotonic() - start:.1f} s", flush=True)
        seen = Counter(report.rstrip().rpartition("\n")[2][:60] for report in reports)
        for line, times in seen.items():
            print(f"{times} times {line}")
        for report in itertools.islice(reports, 6):
            print(report)
        failed |= bool(reports)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(","), int(sys.argv[2])))
