"""Test the use of PyTorch and Hugging Face datasets."""

import io
import sys
import urllib.error
from email.message import Message
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import ssl_bench
from probes.features.training_images import require_labels
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import ReadOptions, with_read_options
from ssl_bench.data.files.readable import (
    ImageSubset,
    count_shared_files,
    image_digests,
    select_images,
)
from ssl_bench.data.layouts import hugging_face
from ssl_bench.data.layouts.python_dataset import PythonDataset, to_pixels
from ssl_bench.data.samples import ImageSet
from ssl_bench.data.splits import limit_images
from ssl_bench.errors import ConfigurationError, DataError, MachineError, UnreadableImageError
from ssl_bench.network import DownloadError
from tests.support.faults import encoder_file, unchecked_types

CLASSES = ("light red", "green", "blue")
TO_FLOATS = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
tv_boxes: Any = tv_tensors.BoundingBoxes
BOXES = np.array([[8, 8, 24, 24]])
VOC_BOX = {"xmin": "9", "ymin": "9", "xmax": "24", "ymax": "24"}


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 150, (32, 40, 3), np.uint8)
    pixels[..., number % 3] += 100
    return Image.fromarray(pixels)


def mask(number: int) -> np.ndarray:
    classes = np.zeros((32, 40), np.uint8)
    classes[8:24, 8 + number % 4 : 24] = 1
    classes[0] = 255
    return classes


class Items(torch.utils.data.Dataset):
    classes = CLASSES

    def __init__(self, first: int, count: int, *, target: Any = None, image: Any = None):
        self.numbers = range(first, first + count)
        self.target = target or (lambda number: number % 3)
        self.image = image or (lambda image: image)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        return self.image(picture(number)), self.target(number)


class BrokenItems(Items):
    def __getitem__(self, index):
        if index == 1:
            raise OSError("no such file")
        return super().__getitem__(index)


class WithoutNames(torch.utils.data.Dataset):
    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def open_sets(options: PythonDataset | None = None, **sets: Any) -> PythonDataset:
    return (options or PythonDataset()).with_sets(sets)


def encoded(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(encoder_file(tmp_path_factory.mktemp("encoder") / "encoder.safetensors"))


def probe(encoder: str, task: str, **inputs: Any) -> list[tuple[Any, ...]]:
    found = run(encoder, task, **inputs)
    return [(r.layer, r.facet, r.metric, r.value, r.ci95) for r in found]


def run(encoder: str, task: str = "knn", **inputs: Any) -> Any:
    settings: dict[str, Any] = {"layer": 1, "device": "cpu", "pictures": 0, **inputs}
    return ssl_bench.probe(encoder, task=task, **settings)


# Python.


def test_the_first_item_determines_the_kind_of_targets():
    kinds = {"label": 3, "mask": Image.fromarray(mask(0)), "boxes": [[1, 2, 30, 20]]}
    for kind, target in kinds.items():
        dataset = open_sets(val=Items(0, 2, target=lambda _, target=target: target))
        assert dataset.list_sequences()["val"].annotations == {kind}
        assert isinstance(dataset.images(), ImageSet)
    bools = open_sets(val=Items(0, 1, target=lambda _: mask(0) == 1))
    assert bools.list_sequences()["val"].annotations == {"mask"}
    plain = open_sets(images=[picture(0)])
    assert not plain.list_sequences()["images"].annotations
    assert plain.supports == open_sets(val=[picture(0)]).supports == {"discovery", "images"}
    unlabelled = open_sets(images=Items(0, 4))
    assert unlabelled.supports == {"classification", "discovery", "images"}
    assert unlabelled.images()[0].label is unlabelled.discovery()[0].boxes is None


@pytest.mark.parametrize(
    ("target", "box_format"),
    [
        (BOXES, None),
        (BOXES.tolist(), None),
        ([[8, 8, 16, 16]], "xywh"),
        (tv_boxes([[8, 8, 16, 16]], format="XYWH", canvas_size=(32, 40)), None),
        ({"boxes": torch.tensor(BOXES), "labels": torch.tensor([1])}, None),
        ([{"bbox": [8, 8, 16, 16], "iscrowd": 0}, {"bbox": [0, 0, 1, 1], "iscrowd": 1}], None),
        ({"annotation": {"object": [{"bndbox": VOC_BOX}]}}, None),
    ],
)
def test_boxes_of_every_form_are_the_same_corners(target, box_format):
    options = PythonDataset(box_format=box_format)

    sample = open_sets(options, images=Items(0, 1, target=lambda _: target)).discovery()[0]

    assert sample.boxes is not None
    np.testing.assert_array_equal(sample.boxes, BOXES)


def test_the_first_image_of_coco_may_have_no_boxes():
    # COCO has boxes without width. They are allowed only in its format.
    targets = [[], [{"bbox": [8, 8, 0, 16], "iscrowd": 0}]]
    images = open_sets(images=Items(0, 2, target=targets.__getitem__)).discovery()

    boxes: list[Any] = [images[index].boxes for index in range(2)]
    assert [found.tolist() for found in boxes] == [[], [[8, 8, 8, 24]]]


@pytest.mark.parametrize(
    "convert",
    [np.asarray, TO_FLOATS, v2.PILToTensor(), lambda image: image.convert("RGBA")],
)
def test_images_of_every_type_have_the_same_pixels_and_identity(convert):
    plain, converted = (
        open_sets(train=Items(0, 3, image=image), val=Items(3, 3)) for image in (None, convert)
    )
    np.testing.assert_array_equal(converted.train()[1].image, plain.train()[1].image)
    assert converted.train().fingerprint() == plain.train().fingerprint()


GRAY = np.array([[0, 51], [102, 255], [204, 153]], np.uint8)


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(GRAY),
        GRAY,
        GRAY[..., None],
        torch.from_numpy(GRAY),
        torch.from_numpy(GRAY)[None],
        # Float images are rounded to the nearest number.
        torch.from_numpy(GRAY) / 255 - 0.001 * (torch.from_numpy(GRAY) > 0),
    ],
)
def test_gray_images_of_every_type_have_three_equal_channels(image):
    np.testing.assert_array_equal(to_pixels(image), np.stack([GRAY] * 3, 2))


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (Items(0, 2, image=v2.Compose([TO_FLOATS, v2.Normalize([0.5] * 3, [0.5] * 3)])), DataError),
        (Items(0, 2, image=lambda image: np.asarray(image) / 255), DataError),
        (Items(0, 2, target=lambda _: "cat"), DataError),
        (Items(0, 2, target=lambda _: Image.new("RGB", (40, 32))), DataError),
        (
            Items(0, 2, target=lambda _: tv_boxes(BOXES, format="CXCYWH", canvas_size=(9, 9))),
            DataError,
        ),
        (Items(0, 0), DataError),
        ([(picture(0), 1, 2)], DataError),
        (iter([]), ConfigurationError),
        ({"train": Items(0, 2)}, ConfigurationError),
        (torch.utils.data.DataLoader(Items(0, 2)), ConfigurationError),
    ],
)
def test_unsupported_content_is_refused(dataset, kind):
    with pytest.raises(kind) as raised:
        open_sets(val=dataset).val()
    assert not isinstance(raised.value, UnreadableImageError)


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("photo.jpg", "got str"),
        (np.zeros((4, 5, 2), np.uint8), "got 4 x 5 x 2 of uint8"),
        (np.zeros((4, 5, 3)), "got 4 x 5 x 3 of float64"),
        (torch.zeros(4, 5, 3), "got 4 x 5 x 3"),
        (torch.zeros(3, 4, 5, dtype=torch.int32), "got torch.int32"),
        (torch.tensor([[-1.0, 0.5]]), "got -1 to 0.5"),
        (torch.tensor([[0.0, 255.0]]), "got 0 to 255"),
        (picture(0).convert("F"), "the mode F"),
    ],
)
def test_the_error_for_an_image_names_what_is_wrong(image, named):
    with unchecked_types(), pytest.raises(DataError, match=named):
        open_sets(images=[image])


@pytest.mark.slow
def test_images_without_annotations_come_from_the_first_suitable_role():
    train, val = (Items(0, count, target=lambda _: BOXES) for count in (2, 3))
    boxed = open_sets(train=train, val=val, images=[picture(0)])
    assert (len(boxed.images()), len(boxed.discovery())) == (1, 3)
    labelled = open_sets(train=Items(0, 2), val=Items(0, 3), images=Items(0, 4))
    assert (len(labelled.images()), len(labelled.discovery())) == (4, 4)
    scored = open_sets(train=Items(0, 2), val=Items(0, 3))
    assert len(scored.images()) == 2
    with pytest.raises(DataError):
        scored.discovery()


def test_the_identity_is_that_of_the_content():
    def fingerprint(names: list[str] | None = None, **changes: Any) -> str:
        items = Items(**{"first": 0, "count": 3, **changes})
        return open_sets(PythonDataset(class_names=names or ()), val=items).val().fingerprint()

    images = with_read_options(open_sets(val=Items(0, 3)).val(), ReadOptions("stat"))
    assert fingerprint() == fingerprint() == images.fingerprint()
    others = [
        fingerprint(first=3),
        fingerprint(count=2),
        fingerprint(target=lambda number: (number + 1) % 3),
        fingerprint(names=["a", "b", "c"]),
    ]
    assert len({fingerprint(), *others}) == 5
    masks = Items(0, 2, target=mask)
    options = [PythonDataset(class_names=["a", "b"], numbers=two) for two in ([0, 1], [1, 0])]
    assert len({open_sets(one, val=masks).val().fingerprint() for one in options}) == 2


@pytest.mark.parametrize(
    ("target", "other"),
    [
        (mask(0), mask(1)),
        (mask(0), mask(0) + 1),
        (BOXES, BOXES + 1),
        (BOXES, np.concatenate([BOXES, BOXES])),
        (BOXES[:0], BOXES),
    ],
)
def test_changed_masks_and_boxes_are_another_dataset_of_the_same_images(target, other):
    one, another = (
        open_sets(images=Items(0, 2, target=lambda _, own=own: own)).images()
        for own in (target, other)
    )
    assert len(image_digests(one) or []) == 2
    assert image_digests(one) == image_digests(another)
    assert one.fingerprint() != another.fingerprint()


def test_a_random_transform_is_refused():
    images = open_sets(val=Items(0, 2, image=v2.RandomResizedCrop(16))).val()
    images.fingerprint()

    with pytest.raises(DataError, match="random"):
        images[0]


def test_an_unreadable_item_is_an_error_or_left_out(encoder, tmp_path):
    inputs = {"train": Items(20, 12), "val": BrokenItems(0, 4), "out": tmp_path / "r"}
    with pytest.raises(UnreadableImageError, match="OSError") as error:
        run(encoder, **inputs)
    assert error.value.hint == ("--on-bad-image", "skip")
    with pytest.raises(UnreadableImageError, match="OSError"):
        require_labels(open_sets(val=BrokenItems(0, 4)).val())
    for _ in range(2):
        found = run(encoder, on_bad_image="skip", **inputs)
        assert {record.num_images for record in found} == {3}
        # Without names, the labels determine the number of classes.
        inputs = {name: WithoutNames(some) for name, some in inputs.items() if name != "out"}
        inputs["out"] = tmp_path / "unnamed"


def test_class_names_come_from_dataset_user_or_labels():
    train, val = Items(0, 3), Items(3, 3)
    subset: Any = val
    for indices in ([1, 2], [0, 1]):
        subset = torch.utils.data.Subset(subset, indices)
    assert open_sets(val=subset).val().class_names == CLASSES
    assert open_sets(train=train, val=WithoutNames(val)).name == "Items-6"
    named = open_sets(PythonDataset(class_names=["x", "y", "z"]), val=val)
    assert named.val().class_names == ("x", "y", "z")
    plain = [(picture(number), number % 3) for number in range(3)]
    assert open_sets(train=plain[:2], val=plain).train().class_names == ("0", "1", "2")
    train.classes = ("a", "b", "c")
    with pytest.raises(DataError) as error:
        open_sets(train=train, val=val).val()
    assert error.value.hint == ("dataset.class_names=[a,b]",)
    last = select_images(open_sets(PythonDataset(class_names=["x", "y"]), val=val).val(), "z", [2])
    with pytest.raises(DataError, match="image 2 of val"):
        last[0]


def test_a_limit_reads_only_the_images_that_remain():
    images: Any = open_sets(val=Items(0, 30)).val()

    few = limit_images(images, 4)
    assert few.name == "Items-30-limit4"
    assert few.ids == ("0000000", "0000007", "0000015", "0000022")
    few.fingerprint()
    assert len(images.items._identities) == 4


def test_ignored_numbers_of_masks_are_no_classes():
    masks = [np.where(mask(number) == 255, 7, mask(number)) for number in range(2)]
    val = [(picture(number), target) for number, target in enumerate(masks)]
    options = PythonDataset(ignored=[7])
    assert len(open_sets(options, val=val).val().class_names) == 2
    # Masks without any class, and masks that cannot be read, do not add classes.
    blank = [(picture(number), np.full((32, 40), number, np.uint8)) for number in (0, 7)]
    assert open_sets(options, val=blank).val().class_names == ("0",)
    # Each number is one class.
    nines = [(picture(0), np.full((32, 40), 9, np.uint8))]
    assert open_sets(PythonDataset(numbers=[0, 9]), val=nines).val().class_names == ("0", "1")
    unreadable = WithoutNames(BrokenItems(0, 2, target=lambda _: Image.new("L", (40, 32))))
    assert open_sets(options, val=unreadable).val().class_names == ("0",)


def test_masks_of_0_and_255_need_a_meaning():
    def stored(_: int) -> Image.Image:
        return Image.fromarray(np.where(mask(0) == 1, 255, 0).astype(np.uint8))

    val = Items(0, 1, target=stored)
    with pytest.raises(DataError) as error:
        open_sets(PythonDataset(one_object=True), val=val).val()
    assert error.value.hint == ("dataset.numbers=[0,255]", "or", "dataset.ignored=[255]")
    for number in (0, 255):
        uniform = Image.new("L", (40, 32), number)
        only = open_sets(PythonDataset(one_object=True), val=[(picture(0), uniform)]).val()[0].mask
        np.testing.assert_array_equal(only, np.asarray(uniform))
    # With more than two classes, 255 is not one of them.
    for dataset in (PythonDataset(one_object=True, ignored=[255]), PythonDataset()):
        ignored = open_sets(dataset, val=val).val()[0].mask
        np.testing.assert_array_equal(ignored, stored(0))
    dataset = open_sets(PythonDataset(one_object=True, numbers=[0, 255]), val=val)
    assert dataset.supports == {"saliency", "images"}
    mask_of_first: Any = dataset.val()[0].mask
    assert np.unique(mask_of_first).tolist() == [0, 1]


def test_scored_training_images_are_refused_unless_allowed(encoder, tmp_path, capsys):
    inputs = {"train": Items(0, 12), "val": Items(9, 6), "out": tmp_path}
    with pytest.raises(DataError, match=r"0000009.* 0000000.* 3 of 6") as error:
        run(encoder, **inputs)
    assert error.value.hint == ("data.allow_overlap=true",)
    found, again = (run(encoder, **inputs, **{"data.allow_overlap": True}) for _ in range(2))
    assert {(r.dataset, r.settings["fitted_and_scored"]) for r in found} == {("Items-18", 3)}
    dataset = open_sets(train=inputs["train"], val=inputs["val"])
    few = ImageSubset(dataset.train(), (0, 10))
    assert count_shared_files(few, dataset.val(), allowed=True) == 1
    assert again.records == found.records
    assert "already exist" in capsys.readouterr().err


def test_published_names_and_missing_roles_are_refused(encoder, capsys):
    sets = {"train": Items(0, 3), "val": Items(3, 3)}
    for name in ({"dataset_name": "voc2012"}, {"dataset": "toy"}):
        with pytest.raises(ConfigurationError):
            run(encoder, **name, **sets)
    with pytest.raises(DataError, match="train=DATASET"):
        run(encoder, val=Items(0, 3))
    assert main(["probe", "--task", "knn", "--dataset", "python"]) == 2
    assert "ssl_bench.probe(" in capsys.readouterr().err


# Scores do not depend on the form of a dataset.


def test_k_nn_has_the_same_values_in_every_form(encoder, tmp_path):
    datasets = pytest.importorskip("datasets")
    root, out, sets = tmp_path / "folders", tmp_path / "r", {}
    for split, numbers in (("train", range(12)), ("val", range(20, 26))):
        for number in numbers:
            folder = root / split / f"{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            picture(number).save(folder / f"{number:02}.png")
        sets[split] = ImageFolder(root / split)
    label = datasets.ClassLabel(names=["0", "1", "2"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    tables, parquet = {}, tmp_path / "parquet"
    parquet.mkdir()
    for split, folder in sets.items():
        rows = [{"image": encoded(image), "label": number} for image, number in folder]
        tables[split] = datasets.Dataset.from_list(rows, features)
        tables[split].to_parquet(parquet / f"{split}.parquet")

    expected = probe(encoder, "knn", dataset="class_folders", data_root=root, out=out)
    assert probe(encoder, "knn", **sets, out=out) == expected
    assert probe(encoder, "knn", **tables, out=out) == expected
    assert probe(encoder, "knn", dataset=f"hf:{parquet}", out=out) == expected
    assert probe(encoder, "knn", dataset="hf", data_root=parquet, out=out) == expected


def test_segmentation_has_the_same_values_in_every_form(encoder, tmp_path):
    datasets = pytest.importorskip("datasets")
    root, rows = tmp_path / "folders", {}
    for split, numbers in (("train", range(8)), ("val", range(20, 23))):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        rows[split] = []
        for index, number in enumerate(numbers):
            name, truth = f"{index:07}.png", Image.fromarray(mask(number))
            picture(number).save(root / "images" / split / name)
            truth.save(root / "masks" / split / name)
            rows[split].append({"image": encoded(picture(number)), "annotation": encoded(truth)})
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    tables = {split: datasets.Dataset.from_list(r, features) for split, r in rows.items()}
    common: dict[str, Any] = {
        "image_size": 32,
        "probe.training.epochs": 1,
        "class_names": ["background", "square"],
        "out": tmp_path / "r",
    }
    folder_options = {"dataset.image_suffix": ".png", "dataset.ignored": [255]}
    expected = probe(
        *(encoder, "segmentation"),
        **{"dataset": "paired_folders", "data_root": root, **folder_options, **common},
    )

    for convert in (Image.fromarray, torch.from_numpy, np.asarray):
        sets = {
            split: Items(first, count, target=lambda n, convert=convert: convert(mask(n)))
            for split, first, count in (("train", 0, 8), ("val", 20, 3))
        }
        assert probe(encoder, "segmentation", **sets, **common) == expected
    assert probe(encoder, "segmentation", **tables, **common) == expected


# Hugging Face.


def table_of(columns: dict[str, Any], count: int = 3, **values: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"image": encoded(picture(n)), **{key: make(n) for key, make in values.items()}}
        for n in range(count)
    ]
    return datasets.Dataset.from_list(
        rows, datasets.Features({"image": datasets.Image(), **columns})
    )


def test_boxes_of_a_table_need_a_stated_format():
    datasets = pytest.importorskip("datasets")
    inner = {"bbox": datasets.List(datasets.Value("float32"), length=4)}
    columns = {"objects": datasets.List(inner)}
    table = table_of(columns, objects=lambda _: [{"bbox": [8, 8, 16, 16]}])

    with pytest.raises(ConfigurationError) as error:
        open_sets(images=table)
    assert error.value.hint == ("dataset.box_format=xyxy", "or", "dataset.box_format=xywh")
    dataset = open_sets(PythonDataset(box_format="xywh"), images=table)
    np.testing.assert_array_equal(dataset.discovery()[0].boxes, BOXES)
    # In another format, the same numbers are other boxes.
    others = open_sets(PythonDataset(box_format="xyxy"), images=table).discovery()
    np.testing.assert_array_equal(others[0].boxes, [[8, 8, 16, 16]])
    assert others.fingerprint() != dataset.discovery().fingerprint()
    # Boxes without width are valid only in the format of COCO.
    flat = table_of(columns, objects=lambda _: [{"bbox": [8, 8, 0, 16]}])
    sample = open_sets(PythonDataset(box_format="xywh"), images=flat).discovery()[0]
    np.testing.assert_array_equal(sample.boxes, [[8, 8, 8, 24]])
    with pytest.raises(DataError):
        open_sets(PythonDataset(box_format="xyxy"), images=flat).discovery()


@pytest.mark.parametrize("has_boxes", [True, False])
def test_images_with_boxes_keep_the_orientation_of_their_pixels(has_boxes):
    datasets = pytest.importorskip("datasets")
    exif, memory = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.new("RGB", (40, 32)).save(memory, "JPEG", exif=exif)
    row = {"image": {"bytes": memory.getvalue(), "path": None}, "bbox": [[8.0, 8.0, 16.0, 16.0]]}
    columns = {
        "image": datasets.Image(),
        "bbox": datasets.List(datasets.List(datasets.Value("float32"))),
    }
    if not has_boxes:
        del row["bbox"], columns["bbox"]
    table = datasets.Dataset.from_list([row], datasets.Features(columns))

    dataset = open_sets(PythonDataset(box_format="xywh" if has_boxes else None), images=table)

    image = (dataset.discovery() if has_boxes else dataset.images())[0].image
    assert image.shape == ((32, 40, 3) if has_boxes else (40, 32, 3))


def test_several_fitting_columns_need_a_choice():
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["a", "b"])
    table = table_of({"fine": label, "coarse": label}, fine=lambda n: n % 2, coarse=lambda _: 1)

    with pytest.raises(ConfigurationError) as error:
        open_sets(val=table)
    assert error.value.hint == ("dataset.label_column=fine", "or", "dataset.label_column=coarse")
    dataset = open_sets(PythonDataset(label_column="fine"), val=table)
    assert [sample.label for sample in map(dataset.val().__getitem__, range(3))] == [0, 1, 0]
    with pytest.raises(ConfigurationError):
        open_sets(PythonDataset(label_column="none"), val=table)


def test_a_numeric_column_with_any_name_can_be_the_label():
    datasets = pytest.importorskip("datasets")
    table = table_of({"category": datasets.Value("int64")}, category=lambda n: n % 2)

    dataset = open_sets(PythonDataset(label_column="category"), val=table)

    assert "classification" not in open_sets(val=table).supports
    assert [dataset.val()[n].label for n in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_a_column_of_integers_named_label_is_the_label(dtype):
    datasets = pytest.importorskip("datasets")
    table = table_of({"labels": datasets.Value(dtype)}, labels=lambda n: n % 2)

    assert [open_sets(val=table).val()[n].label for n in range(3)] == [0, 1, 0]
    other = table_of({"labels": datasets.Value(dtype)}, labels=lambda n: (n + 1) % 2)
    sets = [open_sets(val=one).val() for one in (table, other)]
    assert image_digests(sets[0]) == image_digests(sets[1])
    assert sets[0].fingerprint() != sets[1].fingerprint()
    for kind in ("mask", "box"):
        options = PythonDataset(**{f"{kind}_column": "labels"})
        with pytest.raises(ConfigurationError, match=f"dataset.{kind}_column .*, got labels$"):
            open_sets(options, val=table)


def test_the_image_that_is_not_chosen_becomes_the_mask():
    datasets = pytest.importorskip("datasets")
    table = table_of(
        {"photo": datasets.Image()},
        image=lambda n: encoded(Image.fromarray(mask(n))),
        photo=lambda n: encoded(picture(n)),
    )

    sample = open_sets(PythonDataset(image_column="photo"), val=table).val()[1]

    np.testing.assert_array_equal(sample.mask, mask(1))
    np.testing.assert_array_equal(sample.image, np.asarray(picture(1)))


@pytest.mark.parametrize("root", ["org/photos", "photos@v1", "org/photos@v1/2"])
def test_a_hub_dataset_is_named_after_its_repository_and_size(monkeypatch, root):
    datasets = pytest.importorskip("datasets")
    tables = {
        split: table_of({"label": datasets.Value("int64")}, count, label=lambda n: n % 2)
        for split, count in (("train", 3), ("test", 2))
    }
    monkeypatch.setattr(hugging_face, "load_tables", lambda *_: tables)

    assert hugging_face.HuggingFace(root=root).images().name == "photos-5"
    assert hugging_face.HuggingFace(root=root, name="mine").images().name == "mine"


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (("test", "validation", "train"), "train", "validation"),
        (("train", "test", "dev"), "train", "dev"),
        (("test",), None, "test"),
        (("photos", "others"), "photos", None),
    ],
)
def test_splits_of_a_table_are_found_by_their_usual_names(monkeypatch, names, train, val):
    table = table_of({})
    monkeypatch.setattr(hugging_face, "load_tables", lambda *_: dict.fromkeys(names, table))
    dataset = hugging_face.HuggingFace(root="org/photos")
    found = [dataset.select_items(usage) for usage in ("train", "val")]
    assert [one and one.split for one in found] == [train, val]


def test_a_table_with_labels_and_masks_needs_a_choice():
    datasets = pytest.importorskip("datasets")
    table = table_of(
        {"scene": datasets.ClassLabel(names=["in", "out"]), "annotation": datasets.Image()},
        scene=lambda n: n % 2,
        annotation=lambda n: encoded(Image.fromarray(mask(n))),
    )

    with pytest.raises(ConfigurationError):
        open_sets(val=table)
    masks = open_sets(PythonDataset(mask_column="annotation"), val=table)
    assert masks.supports == {"segmentation", "images"}
    np.testing.assert_array_equal(masks.val()[1].mask, mask(1))
    labels = open_sets(PythonDataset(label_column="scene"), val=table)
    assert labels.supports == {"classification", "images"}
    # A column that does not fit is named before other columns need a choice.
    with pytest.raises(ConfigurationError, match=r"^dataset\.image_column "):
        open_sets(PythonDataset(image_column="scene"), val=table)


def test_boxes_of_a_table_with_labels_are_ignored():
    datasets = pytest.importorskip("datasets")
    boxes = datasets.List(datasets.List(datasets.Value("float32"), length=4))
    label = datasets.ClassLabel(names=["a", "b"])
    table = table_of(
        {"label": label, "bbox": boxes}, label=lambda n: n % 2, bbox=lambda _: [[8, 8, 16, 16]]
    )

    dataset = open_sets(val=table)

    assert dataset.supports == {"classification", "images"}
    assert dataset.val()[1].label == 1


@pytest.mark.parametrize("column", ["image", "mask"])
@pytest.mark.parametrize("path", ["no column", None, "missing.png", ".", "a\0b"])
def test_rows_without_a_readable_image_are_named(column, path):
    datasets = pytest.importorskip("datasets")
    table = table_of({"mask": datasets.Image()}, mask=lambda n: encoded(Image.fromarray(mask(n))))
    rows = table.cast_column("image", datasets.Image(decode=False))
    rows = rows.cast_column("mask", datasets.Image(decode=False)).to_list()
    rows[1][column] = None if path == "no column" else {"bytes": None, "path": path}
    table = datasets.Dataset.from_list(rows).cast(table.features)

    for read in (lambda images: images[1], lambda images: images.fingerprint()):
        with pytest.raises(DataError, match=r"image 1\b"):
            read(
                open_sets(images=table).images()
                if column == "image"
                else open_sets(val=table).val()
            )


def test_a_transform_of_a_table_is_refused():
    table = table_of({})
    assert isinstance(open_sets(images=table).images(), ImageSet)
    table.set_transform(lambda batch: batch)

    with pytest.raises(ConfigurationError):
        open_sets(images=table)


def test_rows_are_skipped_limited_and_split_as_files_are(encoder, tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=list(CLASSES))
    table = table_of({"label": label}, 30, label=lambda n: n // 10)
    rows = table.cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"] = {"bytes": b"no image", "path": None}
    folder = tmp_path / "photos"
    folder.mkdir()
    datasets.Dataset.from_list(rows, table.features).to_parquet(folder / "train.parquet")
    words = ["probe", "--task", "knn", "--dataset", f"hf:{folder}", "--checkpoint", encoder]
    words += ["--layer", "0", "--out", str(tmp_path / "r"), "--device", "cpu"]
    assert main(words) == 3
    assert "dataset.train_split=train:0-75%" in capsys.readouterr().err
    words += ["dataset.train_split=train:0-50%", "dataset.val_split=train:50-100%"]

    assert main(words) == 3
    assert "--on-bad-image skip" in capsys.readouterr().err
    assert main([*words, "--on-bad-image", "skip", "--limit", "12", "data.bits=12"]) == 0
    assert main(["data", "check", f"hf:{folder}", "dataset.val_split=train:50-100%"]) == 2
    assert main(["data", "check", f"hf:{folder}", *words[-2:]]) == 3


def test_a_part_of_a_split_takes_the_first_rows_of_each_class(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = table_of({"label": datasets.ClassLabel(names=list(CLASSES))}, 36, label=lambda n: n % 3)
    table.to_parquet(tmp_path / "train.parquet")

    dataset = hugging_face.HuggingFace(
        root=str(tmp_path), train_split="train:0-50%", val_split="train:50-100%"
    )

    assert (dataset.train().split, dataset.val().split) == ("train:0-50%", "train:50-100%")
    assert list(map(int, dataset.train().ids)) == list(range(18))
    assert list(map(int, dataset.val().ids)) == list(range(18, 36))


@pytest.mark.parametrize(
    ("answer", "is_cached", "error"),
    [
        (None, True, None),
        *((code, True, DataError) for code in (401, 403, 404)),
        (500, True, None),
        ("offline", True, None),
        ("offline", False, MachineError),
        (None, False, DataError),
    ],
)
def test_hub_datasets_are_read_at_their_revision_or_from_cache(
    monkeypatch, answer, is_cached, error
):
    datasets = pytest.importorskip("datasets")
    calls: list[tuple[Any, ...]] = []

    def open_url(request: Any) -> io.BytesIO:
        assert request.full_url == f"{hugging_face.huggingface_hub.constants.ENDPOINT}/{path}"
        if isinstance(answer, int):
            raise urllib.error.HTTPError(request.full_url, answer, "", Message(), None)
        if answer == "offline":
            raise DownloadError("no answer")
        return io.BytesIO()

    def load_dataset(*names: str, revision: str) -> dict[str, str]:
        calls.append((*names, revision, datasets.config.HF_HUB_OFFLINE))
        if not is_cached:
            raise ValueError("nothing")
        return {"train": "table"}

    name, was_offline = f"org/{answer}-{is_cached}", datasets.config.HF_HUB_OFFLINE
    path = f"api/datasets/{name}"
    monkeypatch.setattr(hugging_face, "open_url", open_url)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    if error is None:
        assert hugging_face.load_tables(f"{name}@v1", "part") == {"train": "table"}
    else:
        with pytest.raises(error) as raised:
            hugging_face.load_tables(f"{name}@v1", "part")
        hint = ("--dataset", "hf:{folder}") if error is MachineError else ()
        assert tuple(raised.value.hint) == hint
    is_read = error is not DataError or not is_cached
    assert calls == [(name, "part", "v1", answer == "offline" or was_offline)] * is_read
    assert was_offline == datasets.config.HF_HUB_OFFLINE


def test_addresses_without_a_dataset_are_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script, ran = tmp_path / "script", tmp_path / "ran"
    script.mkdir()
    (script / "script.py").write_text(f"open({str(ran)!r}, 'w')")
    words = ["probe", "--task", "knn", "--checkpoint", "demo:skip", "--dataset"]

    assert main([*words, "hf:no-organisation/no-name@v1"]) == 5
    assert "--dataset hf:FOLDER" in capsys.readouterr().err
    # The code of a dataset is never run.
    for address in ("hf:/no/such/folder", "hf:a b", f"hf:{script}"):
        assert main([*words, address]) == 3
    assert not ran.exists()
    for address in ("hf:", "toy:folder", "hf"):
        assert main([*words, address]) in (2, 3)
    assert main([*words, "hf:folder", "--data-root", "folder"]) == 2
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MachineError, match=r"ssl-bench\[hf\]"):
        ssl_bench.probe("demo:skip", task="knn", dataset=f"hf:{tmp_path}")
