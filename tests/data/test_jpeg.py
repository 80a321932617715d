"""A JPEG without all its pixels is refused, one with all of them never."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.images import decode_image
from ssl_bench.errors import UnreadableImage
from tests.support.faults import fails, pretraining, probing, records

END = b"\xff\xd9"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "usual": ("RGB", {}),
    "grey": ("L", {}),
    "whole colours": ("RGB", {"subsampling": 0}),
    "restarts": ("RGB", {"restart_marker_blocks": 2}),
    "progressive": ("RGB", {"progressive": True}),
    "progressive restarts": ("RGB", {"progressive": True, "restart_marker_blocks": 2}),
    "cmyk": ("CMYK", {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def jpeg(kind: str, width: int, height: int) -> bytes:
    mode, options = KINDS[kind]
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    memory = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).convert(mode).save(memory, "JPEG", **options)
    return memory.getvalue()


def bits_start(content: bytes) -> int:
    return content.rindex(b"\xff\xda")


@every_kind
def test_fault_63_an_end_marker_behind_any_byte_never_changes_a_small_image(kind):
    content = jpeg(kind, 24, 16)
    whole = decode_image(content, "one.jpg")

    refused = 0
    # Behind the start of the last scan: nothing tells of one that is missing as a whole.
    for cut in range(bits_start(content) + 2, len(content) - 2):
        try:
            pixels = decode_image(content[:cut] + END, "one.jpg")
        except UnreadableImage:
            refused += 1
        else:
            np.testing.assert_array_equal(pixels, whole)
    assert refused > 0.9 * (len(content) - 2 - bits_start(content))


@every_kind
def test_fault_63_a_jpeg_without_some_of_its_pixels_is_refused(kind):
    content = jpeg(kind, 300, 200)
    start = bits_start(content)
    cuts = [start + int(share * (len(content) - start)) for share in (0.1, 0.5, 0.9, 0.99)]
    middle = (start + len(content)) // 2
    marked = content[:middle] + b"\xff\xd3" + content[middle + 2 :]

    for spoilt in (*(content[:cut] + END for cut in cuts), *([marked] if kind == "usual" else [])):
        with pytest.raises(UnreadableImage, match=r"one\.jpg is damaged or cut short"):
            decode_image(spoilt, "one.jpg")


@every_kind
def test_what_stands_around_the_end_marker_does_no_harm(kind):
    content = jpeg(kind, 40, 24)
    whole = decode_image(content, "one.jpg")

    for before, behind in [
        (b"", b"more" + END),
        (b"\xff" * 5, b""),
        (bytes(20), b""),
        (b"\xff\xd0", b""),
    ]:
        pixels = decode_image(content[:-2] + before + END + behind, "one.jpg")
        np.testing.assert_array_equal(pixels, whole)


def test_fault_63_a_half_photograph_with_an_end_marker_stops_or_is_left_out(place, capsys):
    photos = place / "photos"
    content = (photos / "1.jpg").read_bytes()
    (photos / "1.jpg").write_bytes(content[: len(content) // 2] + END)
    words = probing("pca", "folder", photos, "--on-bad-image")

    assert "photos/1.jpg is damaged" in fails(capsys, [*words, "fail"], 3)
    assert "photos/1.jpg is damaged" in fails(capsys, pretraining(photos, "run"), 3)
    assert main([*words, "skip"]) == 0
    assert records()[0].details["left_out"] == {"all": {"count": 1, "first": ["1.jpg"]}}


@pytest.mark.data
@pytest.mark.slow
def test_no_real_photograph_is_refused_and_no_half_of_one_is_read(photos):
    paths = [path for path in sorted(photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]

    assert len(paths) > 3000
    for path in paths:
        content = path.read_bytes()
        decode_image(content, path)
        with pytest.raises(UnreadableImage):
            decode_image(content[: len(content) // 2] + END, path)
