"""The files below OUT/pictures: which of them may go into a report, and how they get there."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ssl_bench.system.files import open_within, read_within

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 64 * 2**20
# One a image without ground truth, for other programs rather than for readers.
_NOT_SHOWN = "masks"


@dataclass(frozen=True, order=True)
class Place:
    """A folder OUT/pictures/TASK/DATASET/ENCODER-IMAGES.

    Attributes:
        encoder: An `encoder_folder`.
        images: The `image_digits` of their fingerprint.
    """

    task: str
    dataset: str
    encoder: str
    images: str

    @property
    def path(self) -> str:
        """Relative to OUT."""
        return f"pictures/{self.task}/{self.dataset}/{self.encoder}-{self.images}"


class PictureFiles:
    """The pictures in a folder of results that may come from somebody else.

    Only PNG files are shown: a page of SVG can hold scripts. No link is followed.

    Attributes:
        refused: What looks like a picture and is not shown, and why.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: dict[Path, str] = {}

    def names_below(self, start: str) -> list[PurePosixPath]:
        """Pictures below a folder, both relative, in the order of their names."""
        place = self.root / start
        if self._is_linked(place):
            return []
        paths = sorted(path for path in place.rglob("*") if self._is_shown(path))
        return [PurePosixPath(path.relative_to(place).as_posix()) for path in paths]

    def copy(self, name: str, target: Path) -> None:
        """Copy a picture that was shown to be one, folders included."""
        content = read_within(self.root, self.root / name, _MOST_BYTES)
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def _is_linked(self, place: Path) -> bool:
        folders = [place, *place.parents]
        linked = [path for path in folders[: folders.index(self.root)] if path.is_symlink()]
        self.refused.update(dict.fromkeys(linked, "a link, and links are not followed"))
        return bool(linked)

    def _is_shown(self, path: Path) -> bool:
        if _NOT_SHOWN in path.relative_to(self.root).parts:
            return False
        if path.is_symlink() or path.suffix == ".png":
            return self._is_picture(path)
        if path.suffix == ".svg" and not path.with_suffix(".png").is_file():
            self.refused[path] = "an SVG can hold scripts; probe.grid=both makes a PNG beside it"
        return False

    def _is_picture(self, path: Path) -> bool:
        try:
            with open_within(self.root, path, _MOST_BYTES) as file:
                is_png = file.read(len(_SIGNATURE)) == _SIGNATURE
        except OSError as error:
            self.refused[path] = error.strerror or str(error)
            return False
        if not is_png:
            self.refused[path] = "no PNG"
        return is_png
