"""Pictures of what discovery found: panels of an image, contact sheets of a block."""

import json
import zlib

import numpy as np
import pytest
from PIL import Image

from probes.pictures import LONGEST_TILE, TILE_HEIGHT, shortened, titled
from probes.tokencut.log import ImageResult, pack_mask
from probes.tokencut.pictures import (
    FOUND,
    FURTHER,
    GROUND_TRUTH,
    draw_sheets,
    kinds_of,
)
from probes.tokencut.probe import TokenCut
from tests.probes.test_tokencut import (
    FAR_AWAY,
    Pictures,
    context,
    found_box,
    picture,
    tiny_encoder,
)


@pytest.mark.parametrize("method", ["tokencut", "lost", "maskcut"])
def test_panels_are_drawn_for_the_same_images_of_all_blocks(tmp_path, method):
    pictures = Pictures({"a": [FAR_AWAY], "b": [FAR_AWAY], "c": [FAR_AWAY]})

    list(TokenCut(method=method, panels=2).run(context(tmp_path, pictures)))

    drawn = {str(path.relative_to(path.parents[1])) for path in tmp_path.glob("*/*/*.png")}
    blocks = "block00_key", "block02_key"
    assert drawn == {f"{block}/{name}.png" for block in blocks for name in "bc"}


def test_a_contact_sheet_is_drawn_from_the_log_alone(tmp_path):
    encoder, calls = tiny_encoder(), []
    boxes = {"a": [FAR_AWAY], "b": [FAR_AWAY], "c": [found_box("c", 2).box.tolist()]}
    list(TokenCut().run(context(tmp_path, Pictures(boxes), [2], encoder)))
    path = tmp_path / "reference/block02_key.png"
    first = path.read_bytes()
    path.unlink()
    encoder.module.register_forward_pre_hook(lambda *_: calls.append(1))

    list(TokenCut().run(context(tmp_path, Pictures(boxes), [2], encoder)))

    assert path.read_bytes() == first
    assert calls == []


def test_a_contact_sheet_has_the_boxes_where_they_are_in_photographs_of_another_size(tmp_path):
    list(
        TokenCut(longer_side=448, panels=1).run(context(tmp_path, Pictures({"a": [FAR_AWAY]}), [2]))
    )

    folder = tmp_path / "reference_longer_side=448"
    with Image.open(folder / "block02_key.png") as file:
        _, cols = np.nonzero((np.array(file) == FOUND).all(-1))
    (log,) = folder.glob("images_*.jsonl")
    x0, _, x1, _ = json.loads(log.read_text().splitlines()[1])["cells"]["2/key"]["box"]
    # The legend has no such colour; a margin of 4 is left of the photograph.
    scale = TILE_HEIGHT / 320
    assert cols.min() == pytest.approx(4 + scale * x0, abs=1)
    assert cols.max() + 1 == pytest.approx(4 + scale * x1, abs=1)


def cell(box, mask, *, hit, degenerate=False, **more):
    return {"box": box, "mask": pack_mask(mask), "hit": hit, "degenerate": degenerate, **more}


def one_patch(row, col):
    mask = np.zeros((5, 7), bool)
    mask[row, col] = True
    return mask


def test_degenerate_images_are_a_kind_of_their_own_and_every_image_is_in_one_kind():
    # Boxes of the truth, whether one was hit, and whether the graph says nothing.
    images = {
        "a": (1, True, False), "b": (1, False, False), "c": (1, True, True),
        "d": (None, None, False), "e": (0, False, False),
    }  # fmt: skip
    results = {
        name: ImageResult(count, 1.0, (1, 1), {"0/key": {"hit": h, "degenerate": d}}, (9, 9))
        for name, (count, h, d) in images.items()
    }

    assert kinds_of(results, "0/key") == {
        "hits": ["a"], "misses": ["b"], "not scored": ["d", "e"], "degenerate": ["c"],
    }  # fmt: skip


def test_tiles_show_boxes_and_masks_where_they_are(tmp_path):
    pictures = Pictures({"a": [[8.0, 8.0, 24.0, 24.0]], "c": [FAR_AWAY]})
    shown = cell(
        [0, 0, 56, 40],
        one_patch(2, 5),
        hit=False,
        further_boxes=[[32, 8, 56, 32]],
        further_masks=[pack_mask(one_patch(4, 0))],
    )
    true, pixels = [[8.0, 8.0, 24.0, 24.0]], zlib.crc32(picture("a").tobytes())
    results = {"a": ImageResult(1, 1.0, (5, 7), {"0/key": shown}, (40, 56), true, pixels)}

    draw_sheets(
        ["0/key"], ("", ""), tmp_path, pictures, results, patch_size=8, per_kind=1,
        seen=TokenCut().seen,
    )  # fmt: skip

    assert pictures.read == ["a"], "only what is shown is read"
    with Image.open(tmp_path / "block00_key.png") as file:
        sheet = np.array(file)
    # Two headings of 18 pixels, two lines of titles, margins of 4; 144 pixels for 40 of the image.
    tile = sheet[4 + 18 + 4 + 18 + 4 + 36 :][:144, 4 : 4 + round(56 * 3.6)]
    assert sheet.shape[0] == 4 + 18 + 4 + 18 + 4 + 36 + 144 + 4
    assert tuple(tile[0, 50]) == tuple(tile[143, 50]) == tuple(tile[70, 0]) == FOUND
    assert tuple(tile[29, 50]) == tuple(tile[60, 29]) == tuple(tile[60, 85]) == GROUND_TRUTH
    assert tuple(tile[29, 150]) == FURTHER
    bright = tile.astype(int).sum(2)
    inner = [bright[r + 4 : r + 25, c + 4 : c + 25].mean() for r, c in ((58, 144), (116, 2))]
    assert min(inner) > 250 > 150 > bright[62:84, 95:112].mean()


def test_long_titles_are_shortened_in_the_middle_and_wide_images_fit():
    wide = titled(np.zeros((10, 4000, 3), np.uint8), "first" + 100 * "x" + "last")
    tall = titled(np.zeros((4000, 10, 3), np.uint8), "block 3")

    assert wide.width == LONGEST_TILE
    assert tall.height == TILE_HEIGHT + 18
    assert tall.width > 40, "the title is readable"
    short = shortened("first" + 100 * "x" + "last", 200)
    assert short.startswith("first")
    assert short.endswith("last")
    assert shortened("short", 200) == "short"
