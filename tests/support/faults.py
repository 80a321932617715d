"""Create small datasets and check error messages."""

import ctypes
import gc
import io
import json
import os
import resource
import shlex
import signal
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import torch
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, save_encoder
from ssl_bench.results import Record, ResultStore
from tests.support.spair import spair

TINY = ViTConfig(image_size=32, patch_size=8, dim=12, depth=2, num_heads=2)
DINO_LIKE = ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, num_heads=1)
TRAIN, VAL = ("t0", "t1", "t2", "t3"), ("v0", "v1", "v2")
OBJECT = """<annotation><object><name>cat</name><bndbox>
<xmin>9</xmin><ymin>9</ymin><xmax>24</xmax><ymax>24</ymax></bndbox></object></annotation>"""

SMALL = {
    "attention": [],
    "pca": ["probe.image_size=32"],
    "correspondence": ["probe.image_size=32", "probe.num_points=16"],
    "geometry": ["probe.image_size=32", "probe.views=2"],
    "tokencut": [],
    "discovery": [],
    "segmentation": ["probe.protocol=fast", "probe.image_size=32", "probe.training.epochs=2"],
    "retrieval": ["probe.image_size=32", "probe.neighbours=5"],
    "knn": ["probe.neighbours=[1,2]"],
    "clustering": ["probe.num_restarts=1"],
    "classification": ["probe.training.c_values=[0.01,1.0]"],
}
PRETRAIN = (
    "model=vit_tiny_skip", "model.image_size=16", "model.patch_size=8", "model.dim=24",
    "model.depth=2", "model.num_heads=2", "objective.out_dim=32", "objective.hidden_dim=16",
    "objective.bottleneck_dim=8", "objective.crops.num_locals=2", "train.batch_size=2",
    "train.max_steps=6", "train.num_workers=0",
)  # fmt: skip


def encoder_file(path: Path, *, seed: int = 0, config: ViTConfig = TINY) -> Path:
    save_encoder(path, build_vit(config, seed=seed), {})
    return path


def picture(seed: int, height: int = 32, width: int = 40) -> Image.Image:
    """Return a noise image whose object is a bright square."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3), dtype=np.uint8)
    noise[8:24, 8:24] += 120
    return Image.fromarray(noise)


def photo_folder(root: Path, count: int = 4) -> Path:
    root.mkdir()
    for number in range(count):
        picture(number).save(root / f"{number}.jpg", quality=95)
    return root


def class_folders(root: Path, count: int = 3) -> Path:
    for split, first in (("train", 0), ("val", 50)):
        for kind in ("cat", "dog"):
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                path = root / split / kind / f"{number}.jpg"
                picture(first + number + 7 * (kind == "dog")).save(path, quality=95)
    return root


def voc(root: Path) -> Path:
    """Create a miniature VOC2012 dataset with images of cats."""
    base = root / "VOCdevkit/VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "Annotations", "ImageSets/Main"):
        (base / folder).mkdir(parents=True)
    (base / "ImageSets/Segmentation").mkdir()
    for number, image_id in enumerate((*TRAIN, *VAL)):
        picture(number).save(base / f"JPEGImages/{image_id}.jpg", quality=95)
        save_mask(base / f"SegmentationClass/{image_id}.png", mask())
        (base / f"Annotations/{image_id}.xml").write_text(OBJECT)
    for name, ids in (("train", TRAIN), ("val", VAL)):
        (base / f"ImageSets/Segmentation/{name}.txt").write_text("\n".join(ids))
    (base / "ImageSets/Main/trainval.txt").write_text("\n".join((*TRAIN, *VAL)))
    return base


def paired_folders(
    root: Path,
    names: Mapping[str, Iterable[str]],
    *,
    images: str = "images",
    masks: str = "masks",
    content: bytes | None = None,
) -> Path:
    """Create images and masks in separate folders. `names` lists the file names of each split."""
    content = content or encoded("PNG", Image.fromarray(mask()))
    numbers = count()
    for split, ids in names.items():
        for folder in (images, masks):
            (root / folder / split).mkdir(parents=True)
        for image_id in ids:
            picture(next(numbers)).save(root / images / split / f"{image_id}.jpg")
            (root / masks / split / f"{image_id}.png").write_bytes(content)
    return root


def coco20k(root: Path, numbers: Sequence[int], content: Mapping[str, Any]) -> Path:
    """Create COCO20k images and return the path of the annotation file."""
    folder, path = root / "images/train2014", root / "annotations/instances_train2014.json"
    for parent in (folder, path.parent):
        parent.mkdir(parents=True)
    names = [f"COCO_train2014_{number:012d}.jpg" for number in numbers]
    for name in names:
        picture(0).save(folder / name)
    (root / "coco_20k_filenames_subset.txt").write_text("".join(f"train2014/{n}\n" for n in names))
    path.write_text(json.dumps(content))
    return path


def data_of_every_role(root: Path) -> dict[str, Path]:
    """Create datasets for all probes and return their root folders."""
    voc(root / "voc2012")
    return {
        "voc2012": root / "voc2012",
        "folder": photo_folder(root / "folder"),
        "class_folders": class_folders(root / "class_folders"),
        "spair71k": spair(root / "spair71k"),
    }


def mask(height: int = 32, width: int = 40) -> np.ndarray:
    """Return the segmentation mask of an image from `picture`."""
    indices = np.zeros((height, width), np.uint8)
    indices[8:24, 8:24] = 8
    indices[7] = 255
    return indices


def save_mask(path: Path, indices: np.ndarray) -> None:
    image = Image.fromarray(indices)
    # These colours are unrelated to the indices.
    image.putpalette([value for index in range(256) for value in (255 - index, 3, 9)])
    image.save(path)


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 88283115\n"
)


def corrupt_file(path: Path, how: str) -> None:
    """Truncate a file or replace its content."""
    content = path.read_bytes()
    lengths = {"empty": 0, "half": len(content) // 2, "last2": -2}
    substitutes = {"html": b"<html><body>404 Not Found</body></html>", "lfs": LFS_POINTER}
    path.write_bytes(substitutes[how] if how in substitutes else content[: lengths[how]])


def make_probe_args(
    task: str, dataset: str, root: Path, *more: str, checkpoint: str | Path = "encoder.safetensors"
) -> list[str]:
    """Return the arguments of a fast `ssl-bench probe` command."""
    arguments = ["probe", "--task", task, "--dataset", dataset, "--data-root", str(root)]
    return [*arguments, "--checkpoint", str(checkpoint), "--layer", "1", *SMALL[task], *more]


def make_pretrain_args(root: Path, out: str, *more: str) -> list[str]:
    return ["pretrain", "--data-root", str(root), "--out", out, *PRETRAIN, *more]


def make_supervised_args(root: Path, out: str, *more: str) -> list[str]:
    """Return the arguments of a fast `ssl-bench pretrain` command."""
    sizes = [option for option in PRETRAIN if not option.startswith("objective.")]
    arguments = ["pretrain", "--data-root", str(root), "--out", out, "objective=supervised"]
    return [*arguments, "data.labels=true", *sizes, *more]


def records(out: str = "results") -> list[Record]:
    return ResultStore(Path(out)).records()


def expect_error(capsys, arguments: Sequence[str], code: int) -> str:
    """Run a command that must fail, and return its error message."""
    capsys.readouterr()
    actual = main(list(arguments))
    out, err = capsys.readouterr()
    assert actual == code, err
    # `data check` prints a table of all problems, and reports the first of them as an error.
    assert out == "" or arguments[:2] == ["data", "check"], out
    assert "Traceback" not in err, err
    message = err.splitlines()[-1]
    assert message.startswith("ssl-bench: ")
    return message


@dataclass(frozen=True)
class Fault:
    """A test case with a broken file or setting and the expected error."""

    name: str  # what is broken
    prepare: Callable[[Path], object]
    command: str
    code: int
    words: str | tuple[str, ...] = ()  # texts that the error must contain
    hint: str = ""  # command or setting that the error must recommend
    remedy: str = ""  # arguments with which the command succeeds


def check_fault(fault: Fault, folder: Path, capsys) -> None:
    """Check that a command reports an error and recommends a solution that works."""
    fault.prepare(folder)
    before = file_contents(folder)

    message = expect_error(capsys, shlex.split(fault.command), fault.code)

    words = (fault.words,) if isinstance(fault.words, str) else fault.words
    for word in (*words, fault.hint):
        assert word in message, message
    after = file_contents(folder)
    assert before == {path: content for path, content in after.items() if path in before}
    new = after.keys() - before.keys()
    assert not [path for path in new if "records" in path.parts]
    assert fault.code != 2 or not [path for path in new if "results" not in path.parts]
    if fault.remedy:
        assert main(shlex.split(f"{fault.command} {fault.remedy}")) == 0, capsys.readouterr().err


def do_nothing(_: Path) -> None:
    """Do nothing, because the faulty command needs no files."""


def file_contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Mark:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def pickled_mark(path: Path, mark_path: Path, *, zipped: bool) -> None:
    content = {"teacher": {"weight": torch.zeros(3)}, "payload": Mark(mark_path)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)


@contextmanager
def limit_file_size(limit: int) -> Iterator[None]:
    """Make the code in a `with` block fail if it writes a file of more than `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Python would truncate the bytecode of modules that are imported here, and use it later.
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_no_bytecode
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def peak_memory_mib() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the peak increase in memory (MiB) within the `with` block."""
    # Return memory that earlier tests have freed, because it would hide an increase.
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield lambda: (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def fork(work: Callable[[], int | None], *, stderr: Path | None = None) -> int:
    """Run a function in a forked process and return the process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        # Let one thread create torch's thread pool. Several threads at once sometimes fail.
        torch.set_num_threads(torch.get_num_threads())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        if stderr is not None:
            sys.stderr = sys.stdout = stderr.open("w", buffering=1)
        # A type check would turn the exception of a signal handler into a type error.
        with unchecked_types():
            code = work() or 0
    except BaseException:
        traceback.print_exc()
        # Show the cause of a failed test even if `stderr` is a file.
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait until a function returns a true value, for at most 60 seconds."""
    deadline = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.002)


def exit_code(child: int) -> int:
    """Wait for a process and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG file that consists of the given chunks."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*one) for one in chunks)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encoded(kind: str, image: Image.Image) -> bytes:
    memory = io.BytesIO()
    image.save(memory, kind)
    return memory.getvalue()


@contextmanager
def unchecked_types() -> Iterator[None]:
    """Disable the run-time checks of types and shapes inside a `with` block."""
    were_disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", were_disabled)
