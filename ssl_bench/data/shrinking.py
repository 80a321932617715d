"""Write smaller copies of images, which pretraining decodes faster."""

import io
import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

from ssl_bench.data.files.file_sets import FileImageSet, join_names
from ssl_bench.data.files.fingerprints import file_state, map_in_threads
from ssl_bench.data.files.images import decode_upright, read_data_file
from ssl_bench.data.layouts.folder import find_image_paths
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import (
    remove_orphans_below,
    resolve_links,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import say, show_progress

ABOUT = Path(".ssl-bench/shrunk.json")
"""File below the folder of the copies that states how they were made."""
_QUALITY = 95
_FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
}


def shrink_images(images: FileImageSet, out: Path, side: int) -> dict[str, Any]:
    """Copy images to another folder, and shrink those whose shorter side exceeds `side`.

    A copy has the name and the modification time of its image. Shrunk copies are rotated by the
    EXIF orientation. Images that are small enough and formats that Pillow does not write are copied
    unchanged. If `out` has a copy with the modification time of its image, it is kept.

    Args:
        images: All images of a folder.
        out: Folder of the copies. It must be new, empty, or have copies of the same folder with the
            same `side`.
        side: Maximum length in pixels of the shorter side of a copy.

    Returns:
        The content of `ABOUT`: the folder of the images, the side, the fingerprint and number of
        the images, and their size in bytes before and after.

    Raises:
        ConfigurationError: `side` is less than 1, one folder contains the other, or `out` has other
            files.
        DataError: Images cannot be read. All others have been copied.
    """
    if side < 1:
        raise ConfigurationError(f"--side must be at least 1, got {side}", hint=("--side=256",))
    source, target = resolve_links(images.source), resolve_links(out)
    if source == target or source in target.parents or target in source.parents:
        raise ConfigurationError(
            f"{images.source} and {out} must not contain each other", hint=("--out", "{folder}")
        )
    settings = {"root": str(source), "side": side}
    if os.path.lexists(out) and not _is_unfinished(out, settings):
        raise ConfigurationError(
            f"{out} has other files or copies of another size, expected a new folder",
            hint=("--out", "{folder}"),
        )
    write_text_atomically(out / ABOUT, json.dumps(settings) + "\n")
    remove_orphans_below(out)

    def copy(name: str) -> DataError | None:
        try:
            _copy(source / name, out / name, side, images.options.bits)
        except DataError as error:
            return error
        return None

    names = show_progress(images.ids, "shrinking images")
    errors = [error for _, error in map_in_threads(copy, names) if error is not None]
    if errors:
        raise DataError(
            f"{len(errors):,} of {len(images):,} images cannot be read, and the copies of all "
            f"others are finished. The first: {errors[0]}"
        )
    if extra := sorted(set(find_image_paths(out)).difference(images.ids)):
        say(f"{len(extra):,} images in {out} have no image in {source}: {join_names(extra)}")
    sizes = [((source / name).stat().st_size, (out / name).stat().st_size) for name in images.ids]
    about = {
        **settings,
        "fingerprint": images.fingerprint(),
        "images": len(images),
        "bytes_before": sum(before for before, _ in sizes),
        "bytes_after": sum(after for _, after in sizes),
    }
    write_text_atomically(out / ABOUT, json.dumps(about, indent=1) + "\n")
    return about


def _is_unfinished(out: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder is empty or has copies with the same settings."""
    try:
        return settings.items() <= json.loads((out / ABOUT).read_text()).items()
    except (OSError, ValueError, AttributeError):
        return out.is_dir() and not any(out.iterdir())


def _copy(path: Path, copy: Path, side: int, bits: int | None) -> None:
    """Write the copy of one image, unless the time of an earlier copy shows that it is current."""
    _, modified, *_ = file_state(path)
    if copy.is_file() and copy.stat().st_mtime_ns == modified:
        return
    data = read_data_file(path)
    # Unreadable images are errors, even if they would not be reduced.
    pixels = decode_upright(data, path, bits)
    height, width = pixels.shape[:2]
    kind, factor = _FORMATS.get(path.suffix.lower()), side / min(height, width)
    if kind is not None and factor < 1:
        size = max(side, round(width * factor)), max(side, round(height * factor))
        small, buffer = Image.fromarray(pixels), io.BytesIO()
        try:
            small.resize(size, Image.Resampling.BICUBIC).save(buffer, kind, quality=_QUALITY)
            data = buffer.getvalue()
        # A format may limit the size, as WebP does. The copy is then as large as the image.
        except (OSError, ValueError):
            pass
    write_atomically(copy, lambda file: file.write(data))
    os.utime(copy, ns=(modified, modified))
