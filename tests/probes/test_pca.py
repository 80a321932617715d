"""Test PCA maps of patch features."""

import base64
import io
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from probes.pca import (
    PCA,
    REFERENCE_FILE,
    align_maps,
    find_reference,
    fit_projection,
    foreground_masks,
    load_reference,
    orient_signs,
    save_reference,
    to_colours,
    two_means_threshold,
)
from probes.pictures import Picture, draw_heading, save_sheet, save_svg_sheet
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from ssl_bench.system.files import TILES
from tests.support.photographs import evaluate_probe


def vit(seed=0, **changes):
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return build_vit(config, seed=seed)


def encoder(name="tiny", model=None):
    return encoder_from_model(model or vit(), name=name)


def probe(photographs, store, messages=None, *, encoder=encoder(), layers=(0, 1, 2), **options):  # noqa: B008
    configured = PCA(**{"panels": 2, "image_size": 48, **options})
    say = (lambda _: None) if messages is None else messages.append
    return evaluate_probe(configured, photographs, store, encoder, layers, say=say)


DRAWN = ("b.png", "c.png")


def tile(path):
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.parametrize(
    ("protocol", "fitted"),
    [("image", "each image"), ("batch", "these 2 images"), ("dataset", "the whole dataset")],
)
def test_every_protocol_scores_and_draws_every_block(photographs, tmp_path, protocol, fitted):
    store = ResultStore(tmp_path / "out")

    records = probe(photographs, store, protocol=protocol, grid="both")

    assert [record.layer for record in records] == [0, 1, 2]
    assert all(0 < record.value <= 100 for record in records)
    assert {record.num_images for record in records} == {3 if protocol == "dataset" else 2}
    assert all((record.ci95 is None) == (protocol != "image") for record in records)
    assert all(len(r.details["explained_by_component"]) == 3 for r in records)
    assert all(sum(r.details["explained_by_component"]) == pytest.approx(r.value) for r in records)
    (folder,) = (store.root / "pictures" / "pca" / "folder").glob(f"tiny-*/{protocol}")
    drawn = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    images = {f"block{layer:02d}/{name}.png" for layer in range(3) for name in DRAWN}
    assert drawn == images | {"blocks-0-2.png", "blocks-0-2.svg", REFERENCE_FILE}
    assert f"fitted to {fitted}." in (folder / "blocks-0-2.svg").read_text()
    if protocol == "dataset":
        # The dataset is fitted as one batch of all images.
        batch = probe(photographs, ResultStore(tmp_path / "b"), protocol="batch", panels=3)
        assert [r.value for r in records] == pytest.approx([r.value for r in batch])


@pytest.mark.parametrize("protocol", ["image", "dataset"])
def test_maps_do_not_depend_on_earlier_runs_and_other_blocks(photographs, tmp_path, protocol):
    commands = {"alone": [(1,)], "after": [(0,), (0, 1, 2), (1,)], "among": [(0, 1, 2)]}
    maps, sheets = [], []
    for place, runs in commands.items():
        store = ResultStore(tmp_path / place)
        for layers in runs:
            probe(photographs, store, protocol=protocol, layers=layers)
        (folder,) = (store.root / "pictures" / "pca" / "folder").glob(f"tiny-*/{protocol}")
        maps.append([tile(folder / f"block01/{name}.png") for name in DRAWN])
        if place != "among":
            sheets.append(tile(folder / "blocks-1.png"))

    assert np.array_equal(*sheets)
    for others in maps[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(maps[0], others, strict=True))


def test_colours_can_be_aligned_with_another_checkpoint(photographs, tmp_path):
    store, messages = ResultStore(tmp_path / "out"), []
    probe(photographs, store, protocol="batch")
    other = encoder("other", vit(seed=1))
    probe(photographs, store, protocol="batch", encoder=other)
    pictures = store.root / "pictures" / "pca" / "folder"
    (here,), (there,) = pictures.glob("tiny-*/batch"), pictures.glob("other-*/batch")
    _, targets = load_reference(here, DRAWN)

    def distance(folder):
        pairs = zip(load_reference(folder, DRAWN)[1], targets, strict=True)
        return sum(float((one - other).square().sum()) for one, other in pairs)

    before = tile(there / "blocks-0-2.png")
    probe(photographs, store, messages, protocol="batch", encoder=other, align_to="tiny")

    turned = there.with_name("batch-as-tiny")
    assert distance(turned) < 0.7 * distance(there)
    assert (tile(turned / "blocks-0-2.png") != before).any()
    assert (tile(there / "blocks-0-2.png") == before).all()
    # The reference may itself have been aligned with another checkpoint.
    third = {"protocol": "batch", "encoder": encoder("third")}
    probe(photographs, store, messages, **third, align_to="other")
    sources = [line.split()[-1] for line in messages if "are aligned with" in line]
    assert sources == ["tiny", "other"]
    for unknown in ({"align_to": "tinny"}, {"align_to": "tiny", "protocol": "image"}):
        with pytest.raises(ConfigurationError, match=r"probe\.align_to"):
            probe(photographs, store, **third | unknown)


def test_constant_blocks_are_reported_and_never_become_the_reference(photographs, tmp_path):
    model = vit(skip_mlp=False)
    with torch.no_grad():
        # The output of the last block is its bias for any input.
        model.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        model.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)
    store, messages, silent = ResultStore(tmp_path / "out"), [], encoder("silent", model)
    Image.new("RGB", (50, 50)).save(photographs.root / "c.png")

    records = probe(photographs, store, messages, encoder=silent)

    assert (records[2].value, records[2].details["num_constant"]) == (0.0, 2)
    assert "pca: block 2: 2 of 2 maps are constant" in messages
    (folder,) = (store.root / "pictures" / "pca" / "folder").glob("silent-*/image")
    assert all(m.abs().sum() > 0 for m in load_reference(folder, DRAWN)[1])
    # Without positions, only the black image has constant maps.
    flat = vit()
    torch.nn.init.zeros_(flat.get_parameter("pos_embed"))
    records = probe(photographs, store, messages, encoder=encoder("flat", flat))
    assert [record.details["num_constant"] for record in records] == [1, 1, 1]
    assert "pca: block 2: 1 of 2 maps are constant" in messages


def test_blocks_before_features_that_are_not_finite_are_drawn(photographs, tmp_path):
    model = vit()
    with torch.no_grad():
        model.get_parameter("blocks.2.mlp.fc2.bias").fill_(torch.nan)
    broken, store = encoder("broken", model), ResultStore(tmp_path / "out")

    (record,) = probe(photographs, store, encoder=broken, layers=(1,))

    assert 0 < record.value <= 100
    with pytest.raises(CheckpointError, match="block 2 of broken"):
        probe(photographs, store, encoder=broken, layers=(1, 2))


@pytest.mark.parametrize("protocol", ["image", "batch"])
def test_only_the_foreground_is_fitted_and_shown(photographs, tmp_path, protocol):
    store = ResultStore(tmp_path / "out")
    options = {"protocol": protocol, "background": "first_component"}

    records = probe(photographs, store, **options, layers=(2,))

    share = records[0].details["foreground_percent"]
    assert 0 < share < 100
    assert records[0].settings["background"] == "first_component"
    assert probe(photographs, store, layers=(2,))[0].settings["background"] == "keep"
    (path,) = (store.root / "pictures").rglob(f"{protocol}-foreground/block02/b.png.png")
    black = (tile(path)[30:140, -100:] == 0).all(-1).mean()
    assert 0 < black < 1


def test_the_background_does_not_affect_the_components():
    features = torch.zeros(6, 6, 5, dtype=torch.float64)
    # The foreground is in the middle, far away from the background.
    features[2:4, 2:4] = 50 + torch.arange(20, dtype=torch.float64).view(2, 2, 5) ** 2 % 7
    (projection,) = PCA(background="first_component")._fit([features], None).projections

    expected = fit_projection(features[2:4, 2:4].flatten(0, 1)).apply(features)
    torch.testing.assert_close(projection.apply(features), expected)


def test_a_damaged_or_incomplete_reference_recommends_a_command(tmp_path):
    both = {name: torch.randn(2, 3, 3).double() for name in ("y", "a")}
    save_reference(tmp_path, "skip", both)
    source, maps = load_reference(tmp_path, ["a", "y"])
    assert source == "skip"
    for one, name in zip(maps, "ay", strict=True):
        torch.testing.assert_close(one, both[name], atol=1e-6, rtol=0)
    save_reference(tmp_path, "skip", {"a": both["a"]})
    assert find_reference(str(tmp_path), tmp_path / "pictures", "image") == tmp_path
    for name in ("vit-1-d", "vit-2-1-d", "vit-3-1-d", "vit-4-other"):
        (tmp_path / name / "image").mkdir(parents=True)
        save_reference(tmp_path / name / "image", name, both)
    for name, found in (("vit", "vit-1-d"), ("vit-2", "vit-2-1-d"), ("vit-3-1", "vit-3-1-d")):
        assert find_reference(name, tmp_path / "me-1-d", "image") == tmp_path / found / "image"
    for name in ("vi", "vit-4"):
        with pytest.raises(ConfigurationError):
            find_reference(name, tmp_path / "me-1-d", "image")
    with pytest.raises(DataError, match="2 of 3 images, such as b") as lacking:
        load_reference(tmp_path, ["a", "b", "c"])
    assert lacking.value.hint == ("--pictures", "{number}")
    (tmp_path / REFERENCE_FILE).write_bytes((tmp_path / REFERENCE_FILE).read_bytes()[:50])
    with pytest.raises(DataError, match=r"reference\.npz") as damaged:
        load_reference(tmp_path, ["a"])
    assert damaged.value.hint == ("--overwrite",)


def test_svg_sheets_contain_text_and_every_image_in_place(tmp_path):
    small = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    large = np.full((300, 200, 3), 10, np.uint8)
    rows = [[Picture(large, ("a<b",)), Picture(small, ("block 1",))], [Picture(small, ("c",))]]

    save_svg_sheet(rows, tmp_path / "grid.svg", "the heading")

    root = ElementTree.parse(tmp_path / "grid.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts == ["the heading", "a<b", "block 1", "c"]
    images = [dict(image.attrib) for image in root.iter(f"{name}image")]
    sizes = [(i["width"], i["height"]) for i in images]
    assert sizes == [("96", "144"), ("192", "144"), ("192", "144")]
    assert int(images[1]["x"]) >= int(images[0]["x"]) + 96
    assert int(images[2]["y"]) >= int(images[0]["y"]) + 144
    links = [i["href"].split(";base64,") for i in images]
    assert [kind for kind, _ in links] == [f"data:image/{name}" for name in ("jpeg", "png", "png")]
    photo, *maps = (
        np.array(Image.open(io.BytesIO(base64.b64decode(code))), int) for _, code in links
    )
    # Images have at least twice the displayed resolution. Patches of maps have sharp edges.
    assert photo.shape == (288, 192, 3)
    assert abs(photo - 10).max() < 3
    assert all(np.array_equal(one, small.repeat(96, 0).repeat(96, 1)) for one in maps)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(float(i["x"]) + float(i["width"]) <= width for i in images)
    assert all(float(i["y"]) + float(i["height"]) <= height for i in images)


def test_maps_of_squashed_images_have_the_shape_of_their_image(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")

    probe(photographs, store, squash=48, grid="svg", panels=3, layers=(0, 2))

    (path,) = store.root.rglob("*.svg")
    images = list(ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}image"))
    sizes = [(image.attrib["width"], image.attrib["height"]) for image in images]
    assert sizes[::3] == sizes[1::3] == sizes[2::3]
    assert len({*sizes}) == 3


def test_the_folder_of_maps_states_other_image_sizes_and_the_reference():
    for size, folder in ((None, "image"), (224, "image"), (48, "image-48px")):
        assert PCA(image_size=size).with_native_size((32, 32)).figure_folder == folder
    runs = ("runs/one/last.safetensors", "runs/other/last.safetensors", "tiny")
    assert len({PCA(align_to=path).figure_folder for path in runs}) == 3


def test_png_sheets_state_the_place_of_every_image(tmp_path):
    sizes = [(30, 40), (200, 20), (50, 400), (60, 60)]  # height and width
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 0, 255)]
    low, high, wide, last = (
        Picture(np.full((*size, 3), colour, np.uint8), ("title",), height=size[0]).tile()
        for size, colour in zip(sizes, colours, strict=True)
    )

    save_sheet([[draw_heading("heading")], [low, high], [wide], [last]], tmp_path / "sheet.png")

    with Image.open(tmp_path / "sheet.png") as file:
        sheet, places = np.array(file), json.loads(file.info[TILES])
    # An image is at most three times as wide as its row is high.
    assert [(h, w) for _, _, w, h in places] == [(30, 40), (200, 20), (19, 150), (60, 60)]
    for (left, top, width, height), colour in zip(places, colours, strict=True):
        rows, cols = np.nonzero((sheet == colour).all(-1))
        assert len(rows) == width * height
        assert (rows.min(), cols.min(), rows.max(), cols.max()) == (
            top, left, top + height - 1, left + width - 1
        )  # fmt: skip
    assert (sheet[-4:] == 255).all()
    assert (sheet[:, -4:] == 255).all()


ROWS, COLS = 5, 7


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5])


def make_map(features: torch.Tensor) -> torch.Tensor:
    projected = fit_projection(features.flatten(0, 1)).apply(features)
    return orient_signs([projected], [full_mask(projected)])[0]


def full_mask(one_map):
    return torch.ones(one_map.shape[:2], dtype=torch.bool)


def colours_of(one_map):
    return to_colours([one_map], [full_mask(one_map)])[0]


def rotation(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator).double())[0]


def test_components_and_variances_equal_those_of_an_svd_in_float64():
    tokens = anisotropic(200, 5) + 3
    centered = tokens.double().numpy() - tokens.double().numpy().mean(0)
    left, singular, right = np.linalg.svd(centered, full_matrices=False)

    projection = fit_projection(tokens)

    cosines = (projection.components.numpy() * right[:3]).sum(1)
    np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-9)
    # The projection has unit variance and zero mean.
    found = projection.apply(tokens[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found * cosines.round(), np.sqrt(200) * left[:, :3], atol=1e-9)
    shares = 100 * singular**2 / (singular**2).sum()
    np.testing.assert_allclose(projection.explained_percent.numpy(), shares[:3], atol=1e-9)
    np.testing.assert_allclose(projection.deviations.numpy(), singular[:3] / np.sqrt(200))
    square = np.square(tokens.double().numpy()).sum()
    assert projection.spread == pytest.approx(100 * (singular**2).sum() / square)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_with_fewer_dimensions_than_colours_some_channels_are_grey(dim):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, COLS, min(dim, 2), generator=generator)
    if dim == 4:
        features = features[..., :1] * torch.tensor([1.0, 2.0, -1.0, 0.5])
    filled = 1 if dim == 4 else dim

    projection = fit_projection(features.flatten(0, 1))

    assert projection.components.shape == (3, dim)
    assert float(projection.explained_percent.sum()) == pytest.approx(100)
    assert (projection.explained_percent[filled:] == 0).all()
    assert (projection.apply(features)[..., filled:] == 0).all()
    assert (colours_of(projection.apply(features))[..., filled:] == 128).all()


def test_constant_features_explain_nothing_and_are_grey():
    features = torch.full((2, 3, 5), 0.7)
    features[0, 0] += 1e-8
    projection = fit_projection(features.flatten(0, 1))

    assert projection.is_constant
    assert (projection.explained_percent.sum(), projection.spread) == (0, 0)
    assert (colours_of(projection.apply(features)) == 128).all()


def test_the_sign_follows_the_longer_tail_in_any_basis():
    features = anisotropic(ROWS, COLS, 5).pow(2)
    one = make_map(features)

    np.testing.assert_allclose(make_map(-features), one, atol=1e-9)
    np.testing.assert_allclose(make_map(features.double() @ rotation(5)), one, rtol=1e-4, atol=1e-4)
    assert (one.pow(3).sum((0, 1)) > 0).all()


ARBITRARY = {
    "signs": torch.diag(torch.tensor([-1.0, 1.0, -1.0])).double(),
    "order": torch.eye(3).double()[[2, 0, 1]],
    "mixture": rotation(3, seed=4),
}


@pytest.mark.parametrize("name", ARBITRARY)
def test_signs_order_and_mixtures_of_components_do_not_change_colours(name):
    reference = make_map(anisotropic(ROWS, COLS, 5))
    block = make_map(anisotropic(ROWS, COLS, 5) + 0.5 * anisotropic(ROWS, COLS, 5, seed=1))

    first, again = (align_maps([m], [reference])[0] for m in (block, block @ ARBITRARY[name]))

    np.testing.assert_allclose(again, first, atol=1e-9)
    assert (colours_of(again) == colours_of(first)).all()


def test_the_alignment_is_the_rotation_closest_to_the_reference():
    reference = make_map(anisotropic(ROWS, COLS, 5))
    block = make_map(anisotropic(ROWS, COLS, 5) + anisotropic(ROWS, COLS, 5, seed=1))

    aligned = align_maps([block], [reference])[0]

    np.testing.assert_allclose(aligned.norm(dim=-1), block.norm(dim=-1), atol=1e-9)
    best = (aligned - reference).square().sum()
    for seed in range(50):
        other = aligned @ rotation(3, seed)
        assert (other - reference).square().sum() >= best - 1e-9


def test_maps_of_several_images_share_a_rotation_at_any_resolution():
    references = [make_map(anisotropic(ROWS, COLS, 5, seed=s)) for s in range(2)]
    fine = interpolate(references[1].permute(2, 0, 1)[None], size=(7, 12), mode="bilinear")[0]
    maps = [references[0], fine.permute(1, 2, 0)]

    aligned = align_maps([one @ ARBITRARY["mixture"] for one in maps], references)
    alone = align_maps([maps[0] @ ARBITRARY["mixture"], maps[1]], references)

    for found, expected in zip(aligned, maps, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    assert not torch.allclose(alone[0], references[0])


def test_colours_range_from_percentile_1_to_99_of_all_maps():
    values = torch.arange(101, dtype=torch.float64)[:, None, None].expand(101, 1, 3)
    # Patches outside the mask are black and do not affect the range.
    outside = torch.full((30, 1, 3), 1000.0, dtype=torch.float64)
    maps = [values[:50], torch.cat([outside, values[50:]])]

    colours = to_colours(maps, [one[..., 0] < 1000 for one in maps])

    low, high = (one[..., 0].flatten() for one in colours)
    assert low[:3].tolist() == [0, 0, round(255 / 98)]
    assert not high[:30].any()
    assert high[-2:].tolist() == [255, 255]
    assert high[30] == round(255 * 49 / 98)


def test_the_threshold_between_two_groups_has_the_least_squared_distances():
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    ordered = values.sort().values.numpy()
    costs = [k * ordered[:k].var() + (40 - k) * ordered[k:].var() for k in range(1, 40)]
    k = int(np.argmin(costs)) + 1
    assert two_means_threshold(values) == pytest.approx((ordered[k - 1] + ordered[k]) / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_foreground_is_the_cluster_away_from_the_border(sign):
    features = 0.01 * torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))
    features[2:4, 3:6] += sign * torch.tensor([4.0, 0.0, 1.0, 0.0])

    (mask,) = foreground_masks([features])
    (whole,) = foreground_masks([torch.full((3, 4, 5), 2.0)])

    assert whole.all(), "constant features have no background"
    expected = torch.zeros(6, 8, dtype=torch.bool)
    expected[2:4, 3:6] = True
    assert (mask == expected).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_smaller_clusters_are_foreground_if_all_patches_touch_the_border(sign):
    features = torch.zeros(2, 5, 4)
    features[:, 3:, 1] = sign

    (mask,) = foreground_masks([features])

    assert mask.tolist() == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_cluster_that_fills_the_lower_border_is_the_background(sign):
    features = 0.01 * torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(0))
    features[5:] += sign * torch.tensor([4.0, 0.0, 1.0, 0.0])

    (mask,) = foreground_masks([features])

    # The cluster has 12 of the 28 patches on the border, but only 24 of all 64 patches.
    assert mask[:5].all()
    assert not mask[5:].any()
