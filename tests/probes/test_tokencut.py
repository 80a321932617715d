"""Test the TokenCut probe."""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from probes.pictures import TILE_HEIGHT, draw_tile, shorten
from probes.tokencut.cuts import Cut, Discovery, PatchGrid, discover
from probes.tokencut.log import ImageResult, pack_mask, unpack_mask
from probes.tokencut.pictures import (
    FOUND_COLOUR,
    FURTHER_COLOUR,
    GROUND_TRUTH_COLOUR,
    draw_panel,
    draw_sheets,
    group_by_outcome,
)
from probes.tokencut.probe import TokenCut, batch_by_shape
from probes.tokencut.scores import corloc_score, degenerate_score, image_result
from ssl_bench.composition.compose import changed_settings
from ssl_bench.data.samples import Sample, unsupported_role_error
from ssl_bench.errors import ConfigurationError, DataError, MachineError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.planning import plan_probes
from tests.support.photographs import context_of

SIZES = {"a": (40, 56), "b": (33, 47), "c": (40, 56), "d": (24, 24), "g": (40, 48)}


def picture(image_id: str):
    name = image_id.rpartition("/")[2]
    generator = np.random.default_rng(ord(name))
    return generator.integers(256, size=(*SIZES[name], 3), dtype=np.uint8)


@dataclass(frozen=True)
class Pictures:
    """A dataset of noise images with object boxes."""

    boxes: Mapping[str, list[list[float]] | None]
    damaged: str = ""
    stamp: str = "f00d"
    read: list[str] = field(default_factory=list)
    name: str = "noise"
    split: str = "all"
    class_names: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset({"discovery"})

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Sample:
        image_id = self.ids[index]
        self.read.append(image_id)
        if image_id == self.damaged:
            raise DataError(f"{image_id} is empty")
        known = self.boxes[image_id]
        boxes = None if known is None else np.array(known, np.float64).reshape(-1, 4)
        return Sample(image_id, picture(image_id), boxes=boxes)

    def fingerprint(self) -> str:
        return self.stamp

    def discovery(self) -> "Pictures":
        return self

    def train(self) -> "Pictures":
        raise unsupported_role_error("pictures", "segmentation")

    val = images = train


def tiny_encoder(seed: int = 0):
    config = ViTConfig(image_size=32, patch_size=8, dim=24, depth=3, num_heads=2)
    return encoder_from_model(build_vit(config, seed=seed), name="tiny")


def context(folder: Path, pictures: Pictures, layers: Sequence[int] = (0, 2), encoder=None):
    return context_of(encoder or tiny_encoder(), pictures, layers, folder)


REFERENCE = Cut()


def discover_in(pixels: np.ndarray, facet: Facet = "key", cut: Cut = REFERENCE):
    """Find the object in an RGB image with TokenCut."""
    extractor = FeatureExtractor(tiny_encoder(), layers=[2], facets=[facet], pad=True)
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
    grid = PatchGrid(pixels.shape[0], pixels.shape[1], 8)
    return discover(extractor(image)[2][facet][0], grid, cut)


FAR_AWAY = [0.0, 0.0, 1.0, 1.0]


def read_log(folder: Path, pattern: str = "*") -> dict[str, dict]:
    (path,) = folder.glob(f"{pattern}/images_*.jsonl")
    lines = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    return {line["image"]: line for line in lines}


def test_corloc_counts_the_images_whose_box_overlaps_a_true_box(tmp_path):
    box = discover_in(picture("a")).box.tolist()
    pictures = Pictures({"a": [FAR_AWAY, box], "b": [FAR_AWAY], "c": [FAR_AWAY], "d": []})

    (score,) = TokenCut().run(context(tmp_path, pictures, layers=[2]))

    assert score.value == pytest.approx(100 / 3)
    assert score.ci95 is not None
    assert score.ci95[0] < score.value < score.ci95[1]
    assert (score.layer, score.facet, score.metric, score.num_images) == (2, "key", "corloc", 3)
    assert score.details["images_without_boxes"] == 1
    assert score.details["by_num_objects"]["1"] == {"num_images": 2, "corloc": 0}
    assert score.details["by_num_objects"]["2_to_3"] == {"num_images": 1, "corloc": 100}


def test_images_and_their_boxes_are_resized(tmp_path):
    pictures = Pictures({"a": [[8.0, 8.0, 24.0, 24.0]], "b": [FAR_AWAY]})
    smaller = Image.fromarray(picture("a")).resize((28, 20), Image.Resampling.BICUBIC)
    expected = discover_in(np.array(smaller))

    list(TokenCut(longer_side=28).run(context(tmp_path, pictures, [2])))

    log = read_log(tmp_path, "reference_longer_side=28")
    assert log["a"]["cells"]["2/key"]["box"] == expected.box.tolist()
    assert log["a"]["true_boxes"] == [[4.0, 4.0, 12.0, 12.0]]
    # The shorter side of 33 x 47 pixels becomes 19.66, rounded to 20. Boxes are scaled like sides.
    assert [log["a"]["size"], log["b"]["size"]] == [[20, 28], [20, 28]]
    assert log["b"]["true_boxes"] == [pytest.approx([0, 0, 28 / 47, 20 / 33])]
    assert log["a"]["largest_box"] == pytest.approx(100 * 16 * 16 / (40 * 56))
    # `max_side` reduces only larger images, here the one of 40 x 56 pixels.
    list(TokenCut(max_side=48).run(context(tmp_path / "most", pictures, [2])))
    assert [line["size"] for line in read_log(tmp_path / "most").values()] == [[34, 48], [33, 47]]


def test_a_resumed_run_reads_only_images_without_results(tmp_path):
    boxes = {"a": [FAR_AWAY], "b": [FAR_AWAY], "c": [FAR_AWAY]}

    def run(layers=(0, 2), seed=0, damaged="", stamp="f00d", **options):
        pictures = Pictures(boxes, damaged, stamp)
        probe_context = context(tmp_path, pictures, layers, tiny_encoder(seed))
        return list(TokenCut(panels=0, **options).run(probe_context)), sorted(pictures.read)

    with pytest.raises(DataError, match="b is empty"):
        run(damaged="b")
    scores, read = run()
    assert read == ["b", "c"]
    (path,) = tmp_path.glob("reference/images_*.jsonl")
    header, *_, line = path.read_text().splitlines()
    entry = json.loads(line)
    last, checksum = entry["image"], entry.pop("crc32")
    # Logs of earlier versions must stay valid.
    assert path.name == f"images_{hashlib.sha256(header.encode()).hexdigest()[:12]}.jsonl"
    assert json.loads(header).keys() == {"format", "key"}
    assert checksum == zlib.crc32(json.dumps(entry).encode())
    path.write_bytes(path.read_bytes()[:-20])
    assert run() == (scores, [last])
    assert run() == (scores, [])
    # Other blocks and replaced images are added to the log. Other settings and weights have
    # separate logs.
    for _, read in (run([1]), run(stamp="beef"), run(tau=0.1), run(seed=1)):
        assert read == ["a", "b", "c"]
    assert run([0, 1])[1] == []
    assert len(list(tmp_path.glob("*/images_*.jsonl"))) == 3


def test_data_without_boxes_and_unwritable_folders_are_refused(tmp_path):
    with pytest.raises(DataError) as raised:
        list(TokenCut().run(context(tmp_path, Pictures({"a": [], "b": []}))))

    assert read_log(tmp_path).keys() == {"a", "b"}
    (log,) = tmp_path.glob("*/images_*.jsonl")
    assert str(log) in str(raised.value)
    (tmp_path / "reference_tau=0.1").write_text("")
    with pytest.raises(MachineError):
        list(TokenCut(tau=0.1).run(context(tmp_path, Pictures({"a": [FAR_AWAY]}))))


def test_images_without_ground_truth_give_masks_figures_and_degenerate_graphs(tmp_path):
    messages, probe = [], TokenCut(method="maskcut", max_objects=2, truth="none")
    pictures = Pictures({"a": None, "sub/b": None})

    scores = list(probe.run(replace(context(tmp_path, pictures, [2]), say=messages.append)))

    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.list_score_keys([2])
    (line,) = messages
    (folder,) = tmp_path.iterdir()
    assert str(folder) in line
    lines = read_log(tmp_path)
    flags = [line["cells"]["2/key"]["degenerate"] for line in lines.values()]
    assert scores[0].value == 100 * sum(flags) / len(flags)
    for line in lines.values():
        cell, grid = line["cells"]["2/key"], tuple(line["grid"])
        assert line["num_boxes"] is cell["hit"] is None
        with Image.open(folder / f"masks/block02_key/{line['image']}.png") as file:
            saved = np.array(file)
        assert saved.shape == picture(line["image"]).shape[:2]
        packed = [cell["mask"], *cell.get("further_masks", [])]
        for number, word in enumerate(packed, start=1):
            assert np.array_equal(saved[::8, ::8] == number, unpack_mask(word, grid))
        assert len(packed) == saved.max() <= 2
    assert (folder / "block02_key.png").exists()


def test_breakdowns_and_image_shares_equal_a_count_by_hand():
    sizes, counts = [5.0, 20.0, 60.0, 30.0, 0.0], [1, 2, 7, 3, 0]
    hits, degenerate = [True, False, True, True, False], [True, False, False, False, True]
    ties = [False, True, False, False, False]
    cells = [
        {"hit": hit, "degenerate": flag, "tied_cutoff": tied}
        for hit, flag, tied in zip(hits, degenerate, ties, strict=True)
    ]
    true = [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 9.0, 9.0]]
    results = [
        ImageResult(count, size, (1, 1), {"1/key": cell}, (9, 9), true)
        for count, size, cell in zip(counts, sizes, cells, strict=True)
    ]

    score = corloc_score(1, "key", results)

    assert score.value == 75
    assert (score.num_images, score.details["images_without_boxes"]) == (4, 1)
    # The box of the whole image hits the second true box.
    assert score.details["baseline"]["value"] == 100
    assert score.details["degenerate_percent"] == 40
    # LOST reports ties separately from degenerate images.
    assert score.details["tied_cutoff_percent"] == 20
    assert score.details["by_object_size"] == {
        "below_10_percent": {"num_images": 1, "corloc": 100},
        "10_to_40_percent": {"num_images": 2, "corloc": 50},
        "from_40_percent": {"num_images": 1, "corloc": 100},
    }
    assert score.details["by_num_objects"]["from_4"] == {"num_images": 1, "corloc": 100}
    # This score also counts images without boxes.
    flagged = degenerate_score(1, "key", results)
    assert (flagged.metric, flagged.value, flagged.num_images) == ("degenerate", 40, 5)
    assert np.asarray(flagged.per_image).tolist() == degenerate


def test_three_images_with_objects_in_the_padding_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(PatchGrid, "is_padding", lambda *_: True)
    for names, named in (("abc", "object of a, b, c lies"), ("abcdg", "a, b, c and 2 more lies")):
        messages = []
        pictures = Pictures({name: [FAR_AWAY] for name in names})
        given = context_of(tiny_encoder(), pictures, (2,), tmp_path / names, say=messages.append)
        list(TokenCut(panels=0).run(given))
        (line,) = [text for text in messages if "padding" in text]
        assert named in line


def test_the_size_of_objects_is_that_of_the_largest_box():
    boxes = np.array([[0, 0, 20, 10], [10, 10, 40, 20]], np.float64)
    sample = Sample("image", np.zeros((40, 50, 3), np.uint8), boxes=boxes)
    result = image_result(sample, {}, PatchGrid(40, 50, 10), has_mask=False)
    assert (result.num_boxes, result.largest_box) == (2, pytest.approx(100 * 300 / 2000))


def test_changed_settings_name_the_folder_of_figures(tmp_path):
    assert changed_settings(TokenCut(facet="token", panels=0)) == {}
    assert changed_settings(TokenCut(longer_side=144, max_side=640)) == {"longer_side": 144}
    assert TokenCut(method="maskcut", max_objects=4).settings()["max_objects"] == 4
    # Default settings omit these keys, because older records lack them.
    assert {"longer_side", "max_side", "max_objects"}.isdisjoint(TokenCut().settings())
    changed = TokenCut(tau=0.3, method="lost")
    assert changed.settings()["tau"] == 0.3
    assert changed.folder == "reference_method=lost_tau=0.3"

    def plan_settings(override: str) -> Mapping[str, object]:
        (plan,) = plan_probes(["tokencut"], ["folder"], [override], {"folder": str(tmp_path)})
        return plan.probe.settings()

    assert plan_settings("probe.max_side=900")["max_side"] == 900
    assert "max_side" not in plan_settings("probe.longer_side=900")


@pytest.mark.parametrize(
    ("mask_padding", "shapes"),
    [
        # Images a and c have 5 x 7 patches, g and the padded b have 5 x 6, and d has 3 x 3.
        (False, [(1, 3, 24, 24), (2, 3, 40, 48), (2, 3, 40, 56)]),
        # Without its padding, the graph of b has 4 x 5 patches.
        (True, [(1, 3, 24, 24), (1, 3, 40, 48), (1, 3, 40, 48), (2, 3, 40, 56)]),
    ],
)
def test_images_of_one_shape_are_encoded_in_batches(tmp_path, mask_padding, shapes):
    encoder, batches = tiny_encoder(), []
    encoder.module.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].shape))
    boxes = {name: [FAR_AWAY] for name in "abcdg"}
    probe = TokenCut(panels=0, mask_padding=mask_padding, facet=["key", "value"])

    list(probe.run(context(tmp_path, Pictures(boxes), (2,), encoder)))

    assert sorted(batches) == shapes
    for name, line in read_log(tmp_path).items():
        for facet in probe.facets:
            expected, cell = discover_in(picture(name), facet, probe), line["cells"][f"2/{facet}"]
            assert cell["box"] == expected.box.tolist()
            # The padding is zero after the normalisation, in a batch and for a single image.
            assert cell["eigenvalue"] == pytest.approx(expected.eigenvalue, abs=1e-5)
            assert cell["gap"] == pytest.approx(expected.gap, abs=1e-5)
            assert (cell["hit"], cell["degenerate"]) == (False, expected.degenerate)


def test_the_largest_group_is_encoded_if_too_many_pixels_wait():
    samples = [
        Sample(name, np.zeros((5, 2, 3) if name in "be" else (2, 5, 3), np.uint8))
        for name in "abcdef"
    ]

    def names(size: int, waiting_pixels: int) -> list[str]:
        batches = batch_by_shape(
            samples, lambda s: s.image.shape, max_patches=10 * size, waiting_pixels=waiting_pixels
        )
        return ["".join(sample.image_id for sample in batch) for batch in batches]

    assert names(2, 10**6) == ["ac", "be", "df"]
    assert names(3, 10**6) == ["acd", "be", "f"]
    # Each image has 10 pixels. When 30 pixels wait after a, b and c, the two wide images are next.
    assert names(9, 29) == ["ac", "be", "df"]
    assert names(9, 59) == ["acdf", "be"]


def test_deleted_contact_sheets_are_drawn_again_without_a_forward_pass(tmp_path):
    encoder, passes = tiny_encoder(), []
    encoder.module.register_forward_pre_hook(lambda *_: passes.append(1))
    sheets = []
    for _ in range(2):
        probe = TokenCut(longer_side=448, panels=1)
        list(probe.run(context(tmp_path, Pictures({"a": [FAR_AWAY]}), [2], encoder)))
        (path,) = tmp_path.glob("*/block02_key.png")
        with Image.open(path) as file:
            sheets.append(np.array(file))
        path.unlink()

    assert len(passes) == 1
    assert np.array_equal(*sheets)
    _, cols = np.nonzero((sheets[0] == FOUND_COLOUR).all(-1))
    x0, _, x1, _ = read_log(tmp_path)["a"]["cells"]["2/key"]["box"]
    # Only the box has this colour. The image of 320 x 448 pixels begins after a margin of 4 pixels.
    scale = TILE_HEIGHT / 320
    assert cols.min() == pytest.approx(4 + scale * x0, abs=1)
    assert cols.max() + 1 == pytest.approx(4 + scale * x1, abs=1)


def test_only_maskcut_refuses_negative_thresholds():
    for options in ({"method": "maskcut", "tau": 0.0}, {"method": "lost", "tau": -0.1}):
        assert TokenCut(**options).tau == options["tau"]
    assert TokenCut(method="maskcut", tau="otsu").tau == "otsu"
    with pytest.raises(ConfigurationError, match="tau"):
        TokenCut(method="maskcut", tau=-0.1)


@pytest.mark.parametrize(
    ("options", "cause", "advice"),
    [
        ({}, "exceed tau=0.2,", "`probe.protocol=adaptive`"),
        ({"tau": 0.1}, "exceed tau=0.1,", "`probe.protocol=adaptive`"),
        ({"method": "lost"}, "exceed 0,", "`probe.protocol=adaptive`"),
        ({"method": "maskcut", "tau": 0.1}, "exceed tau=0.1,", "`probe.protocol=adaptive`"),
        ({"tau": "otsu"}, "nearly equal", "another block"),
    ],
)
def test_blocks_with_arbitrary_objects_are_named_with_a_remedy(tmp_path, options, cause, advice):
    encoder, messages = tiny_encoder(), []
    # The keys of the last block are the same for all patches.
    encoder.module.get_parameter("blocks.2.attn.qkv.weight").data.zero_()
    pictures = Pictures({"a": [FAR_AWAY], "c": [FAR_AWAY]})
    run = replace(context(tmp_path, pictures, [0, 2], encoder), say=messages.append)

    list(TokenCut(facet=["key", "token"], panels=0, **options).run(run))

    (line,) = [line for line in messages if "degenerate" in line]
    assert "for key of block 2." in line
    messages.clear()
    list(TokenCut(facet=["key", "query"], panels=0, **options).run(run))
    assert re.findall(r"(\w+) of block 2", "".join(messages)) == ["key", "query"]
    assert cause in line
    assert advice in line


def test_images_are_grouped_into_hits_misses_unscored_and_degenerate():
    # Number of true boxes, whether one of them was hit, and whether the graph is degenerate.
    images = {
        "a": (1, True, False), "b": (1, False, False), "c": (1, True, True),
        "d": (None, None, False), "e": (0, False, False),
    }  # fmt: skip
    results = {
        name: ImageResult(count, 1.0, (1, 1), {"0/key": {"hit": h, "degenerate": d}}, (9, 9))
        for name, (count, h, d) in images.items()
    }

    assert group_by_outcome(results, "0/key") == {
        "hits": ["a"], "misses": ["b"], "not scored": ["d", "e"], "degenerate": ["c"],
    }  # fmt: skip


def test_tiles_show_boxes_and_masks_where_they_are(tmp_path):
    pictures = Pictures({"a": [[8.0, 8.0, 24.0, 24.0]], "c": [FAR_AWAY]})
    found, further = np.zeros((2, 5, 7), bool)
    found[2, 5] = further[4, 0] = True
    shown = {
        "box": [0, 0, 56, 40], "mask": pack_mask(found), "hit": False, "degenerate": False,
        "further_boxes": [[32, 8, 56, 32]], "further_masks": [pack_mask(further)],
    }  # fmt: skip
    true, pixels = [[8.0, 8.0, 24.0, 24.0]], zlib.crc32(picture("a").tobytes())
    results = {"a": ImageResult(1, 1.0, (5, 7), {"0/key": shown}, (40, 56), true, pixels)}

    draw_sheets(
        ["0/key"], ("", ""), tmp_path, pictures, results, patch_size=8, per_group=1,
        prepare=TokenCut().prepare,
    )  # fmt: skip

    assert pictures.read == ["a"], "only what is shown is read"
    with Image.open(tmp_path / "block00_key.png") as file:
        sheet = np.array(file)
    # There are two headings of 18 pixels, two lines of titles and margins of 4 pixels. The 40 rows
    # of the image are enlarged to 144.
    tile = sheet[4 + 18 + 4 + 18 + 4 + 36 :][:144, 4 : 4 + round(56 * 3.6)]
    assert sheet.shape[0] == 4 + 18 + 4 + 18 + 4 + 36 + 144 + 4
    assert tuple(tile[0, 50]) == tuple(tile[143, 50]) == tuple(tile[70, 0]) == FOUND_COLOUR
    assert tuple(tile[29, 50]) == tuple(tile[60, 29]) == tuple(tile[60, 85]) == GROUND_TRUTH_COLOUR
    assert tuple(tile[29, 150]) == FURTHER_COLOUR
    bright = tile.astype(int).sum(2)
    inner = [bright[r + 4 : r + 25, c + 4 : c + 25].mean() for r, c in ((58, 144), (116, 2))]
    assert min(inner) > 250 > 150 > bright[62:84, 95:112].mean()


def test_image_figures_show_boxes_masks_and_the_eigenvector():
    # The tiles have the size of the image, so that nothing is resized but the eigenvector.
    grid = PatchGrid(144, 144, 16)
    masks = np.zeros((2, 9, 9), bool)
    masks[0, 1:3, 1:3] = masks[1, 5:7, 5:8] = True
    vector = np.linspace(-1, 1, 81).reshape(9, 9)
    boxes = [np.array(box, float) for box in ([16, 16, 48, 48], [80, 80, 128, 112])]
    first = Discovery(masks[0], boxes[0], vector, 0.25, 0.5, degenerate=True)
    grey = np.full((144, 144, 3), 200, np.uint8)
    sample = Sample("a", grey, boxes=np.array([[60.0, 4, 76, 20]]))

    panels = draw_panel(sample, [first, Discovery(masks[1], boxes[1])], "title", grid)
    plain = draw_panel(sample, [Discovery(masks[1], boxes[1])], "title", grid)

    framed, highlighted, values = (np.array(tile)[18:, :144] for tile in panels)
    colours = {
        (16, 30): FOUND_COLOUR,
        (80, 100): FURTHER_COLOUR,
        (4, 70): GROUND_TRUTH_COLOUR,
        (30, 30): (200,) * 3,
    }
    assert {place: tuple(framed[place]) for place in colours} == colours
    bright = np.kron(masks.any(0), np.ones((16, 16)))
    assert np.array_equal(highlighted[..., 0], np.where(bright, 200, 50))
    # Negative values are blue, and positive ones are red.
    assert values[2, 2, 2] > values[2, 2, 0]
    assert values[-3, -3, 0] > values[-3, -3, 2]
    assert len(plain) == 2


def test_a_tile_outlines_the_true_object_without_ignored_pixels(tmp_path):
    truth = np.zeros((40, 56), np.uint8)
    truth[8:24, 2:24] = 255
    truth[8:24, 8:24] = 1
    whole = {
        "box": [0, 0, 0, 0], "mask": pack_mask(np.ones((5, 7), bool)),
        "hit": True, "degenerate": True, "eigenvalue": 0.1, "gap": 0.2,
    }  # fmt: skip
    pixels = zlib.crc32(picture("a").tobytes())
    results = {"a": ImageResult(None, 0.0, (5, 7), {"3/key": whole}, (40, 56), None, pixels)}

    draw_sheets(
        ["3/key"], ("", ""), tmp_path, Pictures({"a": None}), results, patch_size=8, per_group=1,
        prepare=lambda sample: replace(sample, mask=truth),
    )  # fmt: skip

    with Image.open(tmp_path / "block03_key.png") as file:
        tile = np.array(file)[4 + 18 + 4 + 18 + 4 + 36 :][:144, 4:]
    rows, cols = np.nonzero((tile == GROUND_TRUTH_COLOUR).all(-1))
    # An image of 40 x 56 pixels is enlarged 3.6 times. The line is two pixels wide.
    assert (rows.min(), rows.max() + 1) == pytest.approx((8 * 3.6, 24 * 3.6), abs=1)
    assert (cols.min(), cols.max() + 1) == pytest.approx((8 * 3.6, 24 * 3.6), abs=1)
    is_inside = (abs(rows - 57.5) < 25) & (abs(cols - 57.5) < 25)
    assert not is_inside.any()
    assert len(rows) == pytest.approx(4 * 2 * 57, rel=0.05)


def test_long_titles_are_shortened_centrally_and_wide_images_fit():
    wide = draw_tile(np.zeros((10, 4000, 3), np.uint8), "first" + 100 * "x" + "last")
    tall = draw_tile(np.zeros((4000, 10, 3), np.uint8), "block 3")

    assert wide.width == 3 * TILE_HEIGHT
    assert tall.height == TILE_HEIGHT + 18
    assert tall.width > 40, "the title is readable"
    short = shorten("first" + 100 * "x" + "last", 200)
    assert short.startswith("first")
    assert short.endswith("last")
    assert shorten("short", 200) == "short"
