"""Write smaller copies of images, which are decoded faster in pretraining."""

import io
import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

from ssl_bench.data.files.file_sets import FileImageSet, join_names
from ssl_bench.data.files.fingerprints import file_state, map_in_threads
from ssl_bench.data.files.images import decode_oriented, read_data_file
from ssl_bench.data.layouts.folder import find_image_paths
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import (
    remove_orphans_below,
    resolve_links,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import print_message, show_progress

METADATA_FILE = Path(".ssl-bench/shrunk.json")
"""Path of the file that states how copies were made, relative to the folder of the copies."""
_QUALITY = 95
_FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
}


def shrink_images(images: FileImageSet, out: Path, side: int) -> dict[str, Any]:
    """Copy images to another folder, and shrink images whose shorter side exceeds `side`.

    A copy has the name and the modification time of the original image. The EXIF orientation is
    applied to shrunk copies. Small images, and images in a format that Pillow does not write, are
    copied unchanged. An existing copy with the modification time of the original is not written
    again.

    Args:
        images: All images of a folder.
        out: Folder for the copies. It must be new, empty, or contain copies from the same folder
            with the same `side`.
        side: Maximum length in pixels of the shorter side of a copy.

    Returns:
        Dictionary that is also written to the file `METADATA_FILE`. Its keys are "root" (folder of
        the images), "side", "fingerprint" (hash of the images), "images" (number of images),
        "bytes_before" and "bytes_after" (sizes of all files).

    Raises:
        ConfigurationError: `side` is less than 1, one folder contains the other, or `out` has other
            files.
        DataError: Some images cannot be read. All other images have been copied.
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
    write_text_atomically(out / METADATA_FILE, json.dumps(settings) + "\n")
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
            f"{len(errors):,} of {len(images):,} images cannot be read. All other images have been "
            f"copied. The first error: {errors[0]}"
        )
    if extra := sorted(set(find_image_paths(out)).difference(images.ids)):
        print_message(
            f"{len(extra):,} images in {out} have no image in {source}: {join_names(extra)}"
        )
    sizes = [((source / name).stat().st_size, (out / name).stat().st_size) for name in images.ids]
    about = {
        **settings,
        "fingerprint": images.fingerprint(),
        "images": len(images),
        "bytes_before": sum(before for before, _ in sizes),
        "bytes_after": sum(after for _, after in sizes),
    }
    write_text_atomically(out / METADATA_FILE, json.dumps(about, indent=1) + "\n")
    return about


def _is_unfinished(out: Path, settings: dict[str, Any]) -> bool:
    """Return whether copies with the given settings can be written to an existing folder.

    The folder must be empty, or contain copies with the same settings.
    """
    try:
        return settings.items() <= json.loads((out / METADATA_FILE).read_text()).items()
    except (OSError, ValueError, AttributeError):
        return out.is_dir() and not any(out.iterdir())


def _copy(path: Path, copy: Path, side: int, bits: int | None) -> None:
    """Write the copy of one image, unless a copy with the same modification time exists.

    Args:
        path: Path of the image.
        copy: Path of the copy.
        side: Maximum length in pixels of the shorter side of the copy.
        bits: Number of bits that a 16-bit image uses, such as 12. None if it is not known.
    """
    _, modified, *_ = file_state(path)
    if copy.is_file() and copy.stat().st_mtime_ns == modified:
        return
    data = read_data_file(path)
    # Decode every image, so that an unreadable image is an error even if it would only be copied.
    pixels = decode_oriented(data, path, bits)
    height, width = pixels.shape[:2]
    kind, factor = _FORMATS.get(path.suffix.lower()), side / min(height, width)
    if kind is not None and factor < 1:
        size = max(side, round(width * factor)), max(side, round(height * factor))
        small, buffer = Image.fromarray(pixels), io.BytesIO()
        try:
            small.resize(size, Image.Resampling.BICUBIC).save(buffer, kind, quality=_QUALITY)
            data = buffer.getvalue()
        # Some formats limit the size of an image, such as WebP. The image is then copied unchanged.
        except (OSError, ValueError):
            pass
    write_atomically(copy, lambda file: file.write(data))
    os.utime(copy, ns=(modified, modified))
