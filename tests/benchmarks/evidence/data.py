"""The queue's images as class folders, from the archives they come in.

    python -m tests.benchmarks.evidence.data ARCHIVES DATA

ARCHIVES holds `cifar10/cifar10_images.tar.gz` (class folders in train/ and test/),
`tiny_imagenet/tiny_imagenet_train_*.tar.gz` (any number of parts), MNIST's four idx files in
`mnist/raw` and photographs in VOC's layout in `photos`. DATA gets `cifar10`, `tiny_imagenet` and
`mnist`, each with CLASS/PICTURE in train/; `cifar10_choosing` and `tiny_imagenet_choosing`, whose
val/ are the last images of every class of train/, linked, on which rates are chosen; and a link to
`photos`. What is there already is left as it is. Minutes.
"""

import argparse
import os
import tarfile
from pathlib import Path

from ssl_bench.errors import DataError
from tests.benchmarks.mnist_pictures import write_pictures

HELD_OUT = {"cifar10": 500, "tiny_imagenet": 50}
"""Images of every class that no run sees in which a rate is chosen."""


def unpack(archives: Path, data: Path) -> None:
    """Make whatever of DATA is missing.

    Raises:
        DataError: an archive is not there.
    """
    data.mkdir(parents=True, exist_ok=True)
    for name, make in {
        "cifar10": _cifar10,
        "tiny_imagenet": _tiny_imagenet,
        "mnist": _mnist,
    }.items():
        if not (data / name).exists():
            unfinished = data / f"{name}.unfinished"
            make(archives, unfinished)
            unfinished.rename(data / name)
    for name, count in HELD_OUT.items():
        choosing_folder(data / name, count)
    if not (data / "photos").exists():
        (photos,) = _found(archives, "photos")
        (data / "photos").symlink_to(photos.absolute())


def choosing_folder(images: Path, held_out: int) -> Path:
    """Links to train/ without the last images of every class, and to these as val/.

    Args:
        images: A folder with CLASS/PICTURE in train/.
        held_out: So many of every class.

    Returns:
        The folder, beside `images`.
    """
    folder = images.with_name(f"{images.name}_choosing")
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for class_folder in sorted((images / "train").iterdir()):
        pictures = sorted(class_folder.iterdir())
        parts = {"train": pictures[:-held_out], "val": pictures[-held_out:]}
        for part, some in parts.items():
            there = unfinished / part / class_folder.name
            there.mkdir(parents=True, exist_ok=True)
            for picture in some:
                if not (there / picture.name).exists():
                    os.link(picture, there / picture.name)
    unfinished.rename(folder)
    return folder


def _cifar10(archives: Path, out: Path) -> None:
    _extract(_found(archives, "cifar10/cifar10_images.tar.gz"), out, kept=("train", "test"))


def _tiny_imagenet(archives: Path, out: Path) -> None:
    _extract(_found(archives, "tiny_imagenet/tiny_imagenet_train_*.tar.gz"), out, kept=("train",))


def _mnist(archives: Path, out: Path) -> None:
    (raw,) = _found(archives, "mnist/raw")
    write_pictures(raw, out)


def _found(archives: Path, pattern: str) -> list[Path]:
    found = sorted(archives.glob(pattern))
    if not found:
        raise DataError(f"expected {pattern} in {archives}, found none; give the folder it lies in")
    return found


def _extract(archives: list[Path], out: Path, kept: tuple[str, ...]) -> None:
    """Write TOP/SPLIT/CLASS/.../PICTURE of the kept splits as SPLIT/CLASS/PICTURE."""
    for archive in archives:
        with tarfile.open(archive) as packed:
            for member in packed:
                parts = Path(member.name).parts
                if not member.isfile() or len(parts) < 4 or parts[1] not in kept:
                    continue
                if Path(member.name).suffix.lower() not in (".jpg", ".jpeg", ".png"):
                    continue
                there = out / parts[1] / parts[2] / parts[-1]
                there.parent.mkdir(parents=True, exist_ok=True)
                content = packed.extractfile(member)
                assert content is not None
                there.write_bytes(content.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", type=Path)
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    unpack(options.archives, options.data)


if __name__ == "__main__":
    main()
