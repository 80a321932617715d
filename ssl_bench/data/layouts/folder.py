"""A folder of images without annotations."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files
from ssl_bench.data.files.images import IMAGE_SUFFIXES
from ssl_bench.data.samples import Layout, reject_published_name, resolve_folder
from ssl_bench.errors import DataError
from ssl_bench.system.files import list_files
from ssl_bench.system.output import print_message_once

_MAX_NAMED_SUFFIXES = 5


@dataclass(frozen=True)
class ImageFolder(Layout):
    """All images in a folder and its subfolders, in the order of their paths.

    Images are rotated according to their EXIF orientation. Probes leave out unreadable images and
    print a message.

    Attributes:
        root: The folder. Links to other folders are followed.
        name: Name of the dataset in stored results and tables.
    """

    supports = frozenset({"images", "discovery"})
    leaves_out_unreadable = True

    root: OptionalPath = None
    name: str = "folder"

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_published_name(self.name)

    def discovery(self) -> FileImageSet:
        """Return all images. Discovered objects are not scored, because there are no boxes."""
        return self.images()

    def images(self) -> FileImageSet:
        """Return all images. The id of an image is its path below `root`.

        Raises:
            DataError: The folder does not exist or has no images.
        """
        if self.root is None:
            raise DataError("no folder of images was given", hint=("--data-root", "{folder}"))
        root = resolve_folder(self.root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder, expected a folder of images")
        names = list(list_files(root))
        ids = tuple(sorted(filter(_has_image_suffix, names)))
        if not ids:
            raise DataError(f"{root} has no images, expected suffixes: {', '.join(IMAGE_SUFFIXES)}")
        if len(ids) < len(names):
            print_message_once(_describe_left_out(root, set(names).difference(ids)))
        return FileImageSet(
            name=self.name,
            split="all",
            source=root,
            ids=ids,
            images=Files(root, ""),
            apply_exif_orientation=True,
        )


def find_image_paths(root: Path) -> Iterator[str]:
    """Yield the relative paths of the images below a folder.

    Images directly in a folder come before those in its subfolders.
    """
    return filter(_has_image_suffix, list_files(root))


def _has_image_suffix(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _describe_left_out(root: Path, names: Collection[str]) -> str:
    suffixes = Counter(PurePosixPath(name).suffix.lower() or "without suffix" for name in names)
    counts = [f"{count} {suffix}" for suffix, count in suffixes.most_common(_MAX_NAMED_SUFFIXES)]
    more = ", ..." if len(suffixes) > len(counts) else ""
    files = f"{len(names)} file{'s' * (len(names) > 1)}"
    return (
        f"ignored {files} without the suffix of an image in {root}: {', '.join(counts)}{more}. "
        f"The first is {min(names)}"
    )
