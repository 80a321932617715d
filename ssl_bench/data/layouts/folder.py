"""A folder of pictures, with whatever folders inside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files
from ssl_bench.data.samples import Layout, given_folder, require_own_name
from ssl_bench.errors import DataError
from ssl_bench.system.files import list_files

SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif"),
)


@dataclass(frozen=True)
class ImageFolder(Layout):
    """Every picture below a folder, in the order of its path, as `list_files` finds them.

    They are turned as EXIF says; those that cannot be read are left out of probes, and named.

    Attributes:
        root: The folder. Links to other folders are followed.
        name: By which records and tables call it.
    """

    supports = frozenset({"images", "discovery"})
    leaves_out_unreadable = True

    root: OptionalPath = None
    name: str = "folder"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_own_name(self.name)

    def discovery(self) -> FileImageSet:
        """All pictures, without boxes: objects can be looked for, not scored."""
        return self.images()

    def images(self) -> FileImageSet:
        """All pictures, of which there has to be one; an id is the path below `root`."""
        if self.root is None:
            raise DataError("expected a folder of images", hint=("--data-root", "{folder}"))
        root = given_folder(self.root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; expected one with pictures in it")
        ids = tuple(sorted(pictures_below(root)))
        if not ids:
            raise DataError(f"{root} holds no picture; known are {', '.join(SUFFIXES)}")
        return FileImageSet(
            name=self.name,
            split="all",
            source=root,
            ids=ids,
            images=Files(root, ""),
            upright=True,
        )


def pictures_below(root: Path) -> Iterator[str]:
    """Paths of the pictures below a folder, without those that this program wrote."""
    return (name for name in list_files(root) if name.lower().endswith(SUFFIXES))
