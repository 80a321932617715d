"""PCA maps: components against an SVD, colours that survive what is arbitrary in them."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import sklearn.decomposition
import torch
from PIL import Image
from torch.nn.functional import interpolate

from probes.map_reference import FILE, MapReference, load_reference, reference_folder
from probes.pca import PCA, resize
from probes.pictures import Picture, svg_sheet
from probes.principal_components import (
    Moments,
    aligned,
    as_colours,
    fit_projection,
    foreground,
    oriented,
    two_means,
)
from ssl_bench.data.folder import ImageFolder
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import ViTConfig, build_vit, encoder_from_vit
from ssl_bench.results import ResultStore

ROWS, COLS = 5, 7


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5])


def maps_of(features: torch.Tensor) -> torch.Tensor:
    """One map of unit variance, as `PCA` makes it before the alignment."""
    projected = fit_projection(features.flatten(0, 1)).apply(features)
    return oriented([projected], [everywhere(projected)])[0]


def everywhere(some_map):
    return torch.ones(some_map.shape[:2], dtype=torch.bool)


def colours_of(some_map):
    return as_colours({0: [some_map]}, {0: [everywhere(some_map)]})[0][0]


def rotation(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator).double())[0]


def test_components_and_variances_equal_those_of_an_svd_in_float64():
    tokens = anisotropic(200, 5) + 3
    centred = tokens.double().numpy() - tokens.double().numpy().mean(0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)

    projection = fit_projection(tokens)

    cosines = (projection.components.numpy() * right[:3]).sum(1)
    np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-9)
    shares = 100 * singular**2 / (singular**2).sum()
    np.testing.assert_allclose(projection.explained.numpy(), shares[:3], atol=1e-9)
    np.testing.assert_allclose(projection.deviations.numpy(), singular[:3] / np.sqrt(200))
    reference = sklearn.decomposition.PCA(3).fit(tokens.double().numpy())
    np.testing.assert_allclose(
        projection.explained.numpy(), 100 * reference.explained_variance_ratio_
    )


def test_sums_in_pieces_give_the_components_of_the_whole():
    tokens = anisotropic(90, 5) + 1000

    sums = Moments()
    for piece in tokens.split(31):
        sums.add(piece)
    pieces, whole = sums.projection(), fit_projection(tokens)

    np.testing.assert_allclose(pieces.components, whole.components, atol=1e-9)
    np.testing.assert_allclose(pieces.explained, whole.explained, rtol=1e-9, atol=0)
    np.testing.assert_allclose(pieces.mean, tokens.double().mean(0), atol=1e-9)


def test_projections_have_unit_variance_and_no_mean():
    features = anisotropic(ROWS, COLS, 5) + 2

    projected = fit_projection(features.flatten(0, 1)).apply(features).flatten(0, 1)

    np.testing.assert_allclose(
        projected.T @ projected / len(projected), torch.eye(3).double(), atol=1e-9
    )
    np.testing.assert_allclose(projected.mean(0), torch.zeros(3).double(), atol=1e-9)


def test_the_spread_is_the_variance_in_percent_of_the_mean_square():
    tokens = torch.tensor([[3.0, 1.0], [3.0, -1.0]])

    assert fit_projection(tokens).spread == pytest.approx(100 * 1 / (9 + 1))


def test_features_of_one_dimension_have_one_channel_and_no_noise_in_the_others():
    line = torch.randn(ROWS, COLS, 1, generator=torch.Generator().manual_seed(0))
    features = line * torch.tensor([1.0, 2.0, -1.0, 0.5])

    projection = fit_projection(features.flatten(0, 1))

    assert projection.explained.tolist() == pytest.approx([100, 0, 0])
    assert (projection.apply(features)[..., 1:] == 0).all()
    assert (colours_of(projection.apply(features))[..., 1:] == 128).all()


@pytest.mark.parametrize("dim", [1, 2])
def test_fewer_channels_than_colours_leave_channels_grey(dim):
    features = torch.randn(ROWS, COLS, dim, generator=torch.Generator().manual_seed(0))

    projection = fit_projection(features.flatten(0, 1))

    assert projection.components.shape == (3, dim)
    assert float(projection.explained.sum()) == pytest.approx(100)
    assert (projection.apply(features)[..., dim:] == 0).all()


def test_constant_features_explain_nothing_and_are_grey():
    features = torch.full((2, 3, 5), 0.7)
    features[0, 0] += 1e-8
    projection = fit_projection(features.flatten(0, 1))

    assert projection.is_constant
    assert (projection.explained.sum(), projection.spread) == (0, 0)
    assert (colours_of(projection.apply(features)) == 128).all()


def test_a_sign_is_that_of_the_longer_tail_whatever_the_basis_of_the_features():
    features = anisotropic(ROWS, COLS, 5).pow(2)
    one = maps_of(features)

    np.testing.assert_allclose(maps_of(-features), one, atol=1e-9)
    np.testing.assert_allclose(maps_of(features.double() @ rotation(5)), one, rtol=1e-4, atol=1e-4)
    assert (one.pow(3).sum((0, 1)) > 0).all()


ARBITRARY = {
    "signs": torch.diag(torch.tensor([-1.0, 1.0, -1.0])).double(),
    "order": torch.eye(3).double()[[2, 0, 1]],
    "mixture": rotation(3, seed=4),
}


@pytest.mark.parametrize("name", ARBITRARY)
def test_signs_order_and_mixtures_of_components_change_no_colour(name):
    reference = maps_of(anisotropic(ROWS, COLS, 5))
    block = maps_of(anisotropic(ROWS, COLS, 5) + 0.5 * anisotropic(ROWS, COLS, 5, seed=1))

    first = aligned([block], [reference])[0]
    again = aligned([block @ ARBITRARY[name]], [reference])[0]

    np.testing.assert_allclose(again, first, atol=1e-9)
    assert (colours_of(again) == colours_of(first)).all()
    assert not torch.allclose(block @ ARBITRARY[name], block)


def test_rotated_and_scaled_features_have_the_same_colours():
    features = anisotropic(ROWS, COLS, 5)
    reference = maps_of(features)

    turned = aligned([maps_of(7 * features.double() @ rotation(5))], [reference])[0]

    np.testing.assert_allclose(turned, reference, rtol=1e-4, atol=1e-4)


def test_an_alignment_is_a_turn_and_the_one_nearest_to_the_reference():
    reference = maps_of(anisotropic(ROWS, COLS, 5))
    block = maps_of(anisotropic(ROWS, COLS, 5) + anisotropic(ROWS, COLS, 5, seed=1))

    turned = aligned([block], [reference])[0]

    np.testing.assert_allclose(turned.norm(dim=-1), block.norm(dim=-1), atol=1e-9)
    best = (turned - reference).square().sum()
    for seed in range(200):
        other = turned @ rotation(3, seed)
        assert (other - reference).square().sum() >= best - 1e-9


def test_maps_of_several_images_are_turned_together():
    references = [maps_of(anisotropic(ROWS, COLS, 5, seed=s)) for s in range(2)]
    mixture = ARBITRARY["mixture"]

    turned = aligned([r @ mixture for r in references], references)
    alone = aligned([references[0] @ mixture, references[1]], references)

    np.testing.assert_allclose(turned[0], references[0], atol=1e-9)
    np.testing.assert_allclose(turned[1], references[1], atol=1e-9)
    assert not torch.allclose(alone[0], references[0])


def test_a_reference_of_another_resolution_is_resized():
    coarse = maps_of(anisotropic(ROWS, COLS, 5))
    fine = interpolate(coarse.permute(2, 0, 1)[None], size=(7, 12), mode="bilinear")[0]
    mixed = fine.permute(1, 2, 0) @ ARBITRARY["order"]

    turned = aligned([mixed], [coarse])[0]

    np.testing.assert_allclose(turned, fine.permute(1, 2, 0), atol=1e-9)


def test_colours_stretch_each_channel_over_all_blocks_from_the_first_to_the_99th_percentile():
    values = torch.arange(101, dtype=torch.float64)[:, None, None].expand(101, 1, 3)
    maps = {0: [values[:50]], 1: [values[50:]]}
    masks = {0: [everywhere(values[:50])], 1: [everywhere(values[50:])]}

    colours = as_colours(maps, masks)

    low, high = colours[0][0][..., 0].flatten(), colours[1][0][..., 0].flatten()
    assert low[:3].tolist() == [0, 0, round(255 / 98)]
    assert high[-2:].tolist() == [255, 255]
    assert high[0] == round(255 * 49 / 98)


def test_one_extreme_patch_takes_no_contrast_from_the_others():
    values = torch.linspace(0, 1, 400, dtype=torch.float64).reshape(20, 20, 1).expand(20, 20, 3)
    spoiled = values.clone()
    spoiled[0, 0] = 1e6

    difference = colours_of(spoiled).astype(int) - colours_of(values)

    assert np.abs(difference).max(initial=0, where=np.arange(400).reshape(20, 20, 1) > 0) <= 2


def test_two_groups_on_a_line_are_parted_between_them():
    assert two_means(torch.tensor([0.0, 0.1, 0.2, 5.0, 5.4]).double()) == pytest.approx(2.6)
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    ordered = values.sort().values.numpy()
    costs = [
        ((ordered[:k] - ordered[:k].mean()) ** 2).sum()
        + ((ordered[k:] - ordered[k:].mean()) ** 2).sum()
        for k in range(1, 40)
    ]
    k = int(np.argmin(costs)) + 1
    assert two_means(values) == pytest.approx((ordered[k - 1] + ordered[k]) / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_two_clusters_the_one_away_from_the_border_is_the_foreground(sign):
    features = 0.01 * torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))
    features[2:4, 3:6] += sign * torch.tensor([4.0, 0.0, 1.0, 0.0])

    (mask,) = foreground([features])

    expected = torch.zeros(6, 8, dtype=torch.bool)
    expected[2:4, 3:6] = True
    assert (mask == expected).all()


def test_constant_features_have_no_background():
    (mask,) = foreground([torch.full((3, 4, 5), 2.0)])
    assert mask.all()


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, size in (("a", (60, 40)), ("b", (40, 60)), ("c", (50, 50))):
        small = generator.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(folder / f"{name}.png")
    return ImageFolder(folder)


def vit(seed=0, **changes):
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return build_vit(config, seed=seed)


def encoder(name="tiny", model=None):
    return encoder_from_vit(model or vit(), name=name)


def probe(photographs, store, said=None, *, encoder=encoder(), layers=(0, 1, 2), **options):  # noqa: B008
    evaluation = Evaluation(
        encoder=encoder,
        dataset=photographs,
        probe=PCA(num_images=2, image_size=48, **options),
        layers=layers,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    say = (lambda _: None) if said is None else said.append
    return evaluation.run(store, say=say, overwrite=True)


def tile(path):
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.parametrize("protocol", ["image", "batch", "dataset"])
def test_every_protocol_scores_and_draws_every_block(photographs, tmp_path, protocol):
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
    images = {f"block{layer:02d}/{name}.png" for layer in range(3) for name in ("a.png", "b.png")}
    assert drawn == images | {"blocks-0-2.png", "blocks-0-2.svg", FILE}


def test_the_dataset_is_fitted_as_if_it_were_one_batch(photographs, tmp_path):
    whole = probe(photographs, ResultStore(tmp_path / "one"), protocol="dataset")
    everything = PCA(protocol="batch", num_images=3, image_size=48)
    evaluation = Evaluation(
        encoder(), photographs, everything, (0, 1, 2), 0, torch.device("cpu"), torch.float32
    )

    batch = evaluation.run(ResultStore(tmp_path / "other"), say=lambda _: None)

    assert [r.value for r in whole] == pytest.approx([r.value for r in batch])


def test_a_block_looks_the_same_alone_and_beside_later_runs(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    probe(photographs, store, protocol="batch")
    (folder,) = (store.root / "pictures" / "pca" / "folder").glob("tiny-*/batch")
    kept = load_reference(folder)

    probe(photographs, store, protocol="batch", layers=(1,))

    # Drawn again with the colours of the panel; its stretch is now of this block alone.
    again = load_reference(folder)
    assert (again.layer, again.source) == (2, "tiny")
    assert all(torch.equal(again.maps[image], kept.maps[image]) for image in kept.maps)


def test_colours_are_taken_over_from_another_checkpoint(photographs, tmp_path):
    store, said = ResultStore(tmp_path / "out"), []
    probe(photographs, store, protocol="batch")
    other = encoder("other", vit(seed=1))
    probe(photographs, store, protocol="batch", encoder=other)
    pictures = store.root / "pictures" / "pca" / "folder"
    (here,), (there,) = pictures.glob("tiny-*/batch"), pictures.glob("other-*/batch")
    wanted = load_reference(here)

    def distance():
        maps = load_reference(there).maps
        return sum(float((maps[image] - m).square().sum()) for image, m in wanted.maps.items())

    alone = distance()
    before = tile(there / "blocks-0-2.png")
    probe(photographs, store, said, protocol="batch", encoder=other, align_to="tiny")

    assert distance() < 0.7 * alone
    assert (tile(there / "blocks-0-2.png") != before).any()
    assert any("colours aligned with tiny" in line for line in said)


def test_a_constant_block_is_said_and_does_not_become_the_reference(photographs, tmp_path):
    model = vit(skip_mlp=False)
    with torch.no_grad():
        # The last block answers with its bias alone and forgets what came before it.
        model.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        model.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)
    store, said, silent = ResultStore(tmp_path / "out"), [], encoder("silent", model)

    records = probe(photographs, store, said, encoder=silent)

    assert (records[2].value, records[2].details["num_constant"]) == (0.0, 2)
    assert "pca: block 2: 2 of 2 maps are constant" in said
    (folder,) = (store.root / "pictures" / "pca" / "folder").glob("silent-*/image")
    assert all(m.abs().sum() > 0 for m in load_reference(folder).maps.values())


def test_the_foreground_alone_is_fitted_and_shown(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")

    records = probe(photographs, store, background="first_component", layers=(2,))

    share = records[0].details["foreground_percent"]
    assert 0 < share < 100
    assert records[0].settings["background"] == "first_component"
    assert "background" not in probe(photographs, store, layers=(2,))[0].settings
    (path,) = (store.root / "pictures").rglob("image-foreground/block02/a.png.png")
    black = (tile(path)[30:140, -100:] == 0).all(-1).mean()
    assert 0 < black < 1


def test_an_unknown_reference_names_the_known_ones(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    probe(photographs, store)

    with pytest.raises(ConfigurationError, match="there are: tiny-"):
        probe(photographs, store, align_to="tinny")
    with pytest.raises(ConfigurationError, match="there are: none"):
        probe(photographs, store, align_to="tiny", protocol="batch")


def test_a_reference_without_the_images_or_damaged_says_what_to_do(tmp_path):
    reference = MapReference("skip", 2, {"a": torch.ones(2, 3, 3).double()})
    reference.save(tmp_path)

    assert load_reference(tmp_path).of(["a"])[0].shape == (2, 3, 3)
    assert reference_folder(str(tmp_path), tmp_path / "pictures", "image") == tmp_path
    with pytest.raises(DataError, match=r"lack the images b, c; probe that checkpoint"):
        load_reference(tmp_path).of(["b", "c"])
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:50])
    with pytest.raises(DataError, match=r"cannot read .*reference\.npz"):
        load_reference(tmp_path)


def test_an_svg_holds_real_text_and_every_picture_at_its_place(tmp_path):
    small = np.full((3, 4, 3), 200, np.uint8)
    large = np.full((300, 200, 3), 10, np.uint8)
    rows = [[Picture(large, ("a<b",)), Picture(small, ("block 1",))], [Picture(small, ("c",))]]

    svg_sheet(rows, tmp_path / "grid.svg", "the heading")

    root = ElementTree.parse(tmp_path / "grid.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{name}text")] == [
        "the heading",
        "a<b",
        "block 1",
        "c",
    ]
    images = [dict(image.attrib) for image in root.iter(f"{name}image")]
    sizes = [(i["width"], i["height"]) for i in images]
    assert sizes == [("96", "144"), ("192", "144"), ("192", "144")]
    assert int(images[1]["x"]) >= int(images[0]["x"]) + 96
    assert int(images[2]["y"]) >= int(images[0]["y"]) + 144
    kinds = [re.findall(r"^data:image/(\w+);base64,", i["href"]) for i in images]
    assert kinds == [["jpeg"], ["png"], ["png"]]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(float(i["x"]) + float(i["width"]) <= width for i in images)
    assert all(float(i["y"]) + float(i["height"]) <= height for i in images)


def test_the_longer_side_is_as_asked_and_the_patch_divides_both():
    image = np.zeros((100, 150, 3), np.uint8)
    image[..., 0] = 255

    resized = resize(image, 96, 8)

    assert resized.shape == (3, 64, 96)
    assert resized[0].min() == 1
    assert resized[1:].max() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": "video"},
        {"num_images": 0},
        {"grid": "pdf"},
        {"background": "black"},
        {"background": "first_component", "protocol": "dataset"},
    ],
)
def test_a_wrong_hyperparameter_is_named(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        PCA(**wrong)
