"""PCA maps: every protocol draws every block, and a map looks the same wherever it is drawn."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from probes.pca import (
    PCA,
    REFERENCE_FILE,
    find_reference,
    load_reference,
    save_reference,
)
from probes.pictures import Picture, save_svg_sheet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from tests.support.photographs import evaluated


def vit(seed=0, **changes):
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return build_vit(config, seed=seed)


def encoder(name="tiny", model=None):
    return encoder_from_model(model or vit(), name=name)


def probe(photographs, store, messages=None, *, encoder=encoder(), layers=(0, 1, 2), **options):  # noqa: B008
    configured = PCA(**{"panels": 2, "image_size": 48, **options})
    say = (lambda _: None) if messages is None else messages.append
    return evaluated(configured, photographs, store, encoder, layers, say=say)


DRAWN = ("b.png", "c.png")


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
    images = {f"block{layer:02d}/{name}.png" for layer in range(3) for name in ("b.png", "c.png")}
    assert drawn == images | {"blocks-0-2.png", "blocks-0-2.svg", REFERENCE_FILE}
    if protocol == "dataset":
        # It is fitted as if all images were one batch.
        batch = probe(photographs, ResultStore(tmp_path / "b"), protocol="batch", panels=3)
        assert [r.value for r in records] == pytest.approx([r.value for r in batch])


@pytest.mark.parametrize("protocol", ["image", "dataset"])
def test_a_block_looks_the_same_whatever_ran_before(photographs, tmp_path, protocol):
    drawn = []
    for place, commands in (("alone", [(1,)]), ("after", [(0,), (0, 1, 2), (1,)])):
        store = ResultStore(tmp_path / place)
        for layers in commands:
            probe(photographs, store, protocol=protocol, layers=layers)
        (folder,) = (store.root / "pictures" / "pca" / "folder").glob(f"tiny-*/{protocol}")
        names = ("blocks-1.png", "block01/b.png.png", "block01/c.png.png")
        drawn.append([tile(folder / name) for name in names])

    assert all(np.array_equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_block_has_the_same_colours_whatever_other_blocks_are_requested(photographs, tmp_path):
    drawn = []
    for layers in ((1,), (0, 1, 2)):
        store = ResultStore(tmp_path / f"{len(layers)}")
        probe(photographs, store, layers=layers)
        drawn.append([tile(path) for path in sorted(store.root.rglob("block01/*.png"))])

    assert len(drawn[0]) == 2
    assert all(np.array_equal(one, other) for one, other in zip(*drawn, strict=True))


def test_colours_are_taken_over_from_another_checkpoint(photographs, tmp_path):
    store, messages = ResultStore(tmp_path / "out"), []
    probe(photographs, store, protocol="batch")
    other = encoder("other", vit(seed=1))
    probe(photographs, store, protocol="batch", encoder=other)
    pictures = store.root / "pictures" / "pca" / "folder"
    (here,), (there,) = pictures.glob("tiny-*/batch"), pictures.glob("other-*/batch")
    _, wanted = load_reference(here, DRAWN)

    def distance(folder):
        pairs = zip(load_reference(folder, DRAWN)[1], wanted, strict=True)
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
    sources = [line.split()[-1] for line in messages if "colours aligned with" in line]
    assert sources == ["tiny", "other"]
    for unknown in ({"align_to": "tinny"}, {"align_to": "tiny", "protocol": "image"}):
        with pytest.raises(ConfigurationError, match=r"probe\.align_to"):
            probe(photographs, store, **third | unknown)


def test_a_constant_block_is_reported_and_does_not_become_the_reference(photographs, tmp_path):
    model = vit(skip_mlp=False)
    with torch.no_grad():
        # The output of the last block is its bias, whatever its input.
        model.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        model.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)
    store, messages, silent = ResultStore(tmp_path / "out"), [], encoder("silent", model)

    records = probe(photographs, store, messages, encoder=silent)

    assert (records[2].value, records[2].details["num_constant"]) == (0.0, 2)
    assert "pca: block 2: 2 of 2 maps are constant" in messages
    (folder,) = (store.root / "pictures" / "pca" / "folder").glob("silent-*/image")
    assert all(m.abs().sum() > 0 for m in load_reference(folder, DRAWN)[1])


def test_the_foreground_alone_is_fitted_and_shown(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")

    records = probe(photographs, store, background="first_component", layers=(2,))

    share = records[0].details["foreground_percent"]
    assert 0 < share < 100
    assert records[0].settings["background"] == "first_component"
    assert probe(photographs, store, layers=(2,))[0].settings["background"] == "keep"
    (path,) = (store.root / "pictures").rglob("image-foreground/block02/b.png.png")
    black = (tile(path)[30:140, -100:] == 0).all(-1).mean()
    assert 0 < black < 1


def test_a_reference_without_the_images_or_damaged_recommends_a_command(tmp_path):
    save_reference(tmp_path, "skip", {"a": torch.ones(2, 3, 3).double()})

    assert load_reference(tmp_path, ["a"])[1][0].shape == (2, 3, 3)
    assert find_reference(str(tmp_path), tmp_path / "pictures", "image") == tmp_path
    with pytest.raises(DataError, match=r"lack 2 of 3 images, such as b\.") as lacking:
        load_reference(tmp_path, ["a", "b", "c"])
    assert lacking.value.hint == ("--pictures", "{number}")
    (tmp_path / REFERENCE_FILE).write_bytes((tmp_path / REFERENCE_FILE).read_bytes()[:50])
    with pytest.raises(DataError, match=r"reference\.npz") as damaged:
        load_reference(tmp_path, ["a"])
    assert damaged.value.hint == ("--overwrite",)


def test_an_svg_holds_real_text_and_every_picture_at_its_place(tmp_path):
    small = np.full((3, 4, 3), 200, np.uint8)
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
    kinds = [re.findall(r"^data:image/(\w+);base64,", i["href"]) for i in images]
    assert kinds == [["jpeg"], ["png"], ["png"]]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(float(i["x"]) + float(i["width"]) <= width for i in images)
    assert all(float(i["y"]) + float(i["height"]) <= height for i in images)
