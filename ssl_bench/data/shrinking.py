"""Write smaller copies of images, which pretraining decodes several times as fast."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from ssl_bench.data.files.fingerprints import map_in_threads
from ssl_bench.data.files.images import decode_upright, read_data_file
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import write_atomically, write_text_atomically
from ssl_bench.system.output import show_progress

RECORD = Path(".ssl-bench/shrunk.json")
"""File below the folder of the copies that states how they were made."""
_QUALITY = 95
_FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
}


def shrink_images(root: Path, out: Path, side: int) -> dict[str, Any]:
    """Copy all images of a folder to another folder, reduced to a given shorter side.

    Copies have the names of their images and are upright. Images that are small enough and formats
    that Pillow does not write are copied unchanged. If an earlier call was interrupted, finished
    copies are kept, unless their images have changed since.

    Args:
        root: Folder of the images.
        out: Folder of the copies.
        side: Maximum length in pixels of the shorter side of a copy.

    Returns:
        The content of `RECORD`: side, quality of the JPEG compression, fingerprint and number of
        the images, and bytes before and after.

    Raises:
        ConfigurationError: `side` is less than 1, one folder contains the other, or `out` has
            copies of another size.
        DataError: Images cannot be read. All others have been copied.
    """
    if side < 1:
        raise ConfigurationError(f"--side must be at least 1, got {side}", hint=("--side=256",))
    one, other = root.resolve(), out.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConfigurationError(
            f"the copies in {out} must be outside of {root}", hint=("--out", "{folder}")
        )
    settings = {"side": side, "quality": _QUALITY}
    if (out / RECORD).is_file():
        earlier = json.loads((out / RECORD).read_text())
        if any(earlier.get(name) != value for name, value in settings.items()):
            size = earlier.get("side")
            raise ConfigurationError(
                f"{out} has copies with a shorter side of {size} pixels",
                hint=("--out", "{folder}", "or", f"--side={size}"),
            )
    images = ImageFolder(str(root)).images()
    write_text_atomically(out / RECORD, json.dumps(settings) + "\n")

    def copy(name: str) -> DataError | None:
        try:
            _copy(root / name, out / name, side)
        except DataError as error:
            return error
        return None

    names = show_progress(images.ids, "images")
    errors = [error for _, error in map_in_threads(copy, names) if error is not None]
    if errors:
        raise DataError(
            f"{len(errors):,} of {len(images):,} images cannot be read. The first is {errors[0]}. "
            "Repair or delete them and run the command again. Finished copies are kept"
        )
    sizes = [((root / name).stat().st_size, (out / name).stat().st_size) for name in images.ids]
    record = {
        **settings,
        "source": images.fingerprint(),
        "images": len(images),
        "bytes_before": sum(before for before, _ in sizes),
        "bytes_after": sum(after for _, after in sizes),
    }
    write_text_atomically(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _copy(path: Path, copy: Path, side: int) -> None:
    """Write the copy of one image, unless it is newer than the image."""
    if copy.is_file() and copy.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return
    data = read_data_file(path)
    # Unreadable images are errors, even if they would not be reduced.
    pixels = decode_upright(data, path)
    height, width = pixels.shape[:2]
    kind, factor = _FORMATS.get(path.suffix.lower()), side / min(height, width)
    if kind is not None and factor < 1:
        size = max(side, round(width * factor)), max(side, round(height * factor))
        buffer = io.BytesIO()
        small = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        small.save(buffer, kind, quality=_QUALITY)
        data = buffer.getvalue()
    write_atomically(copy, lambda file: file.write(data))
