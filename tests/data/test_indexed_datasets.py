"""Datasets of Python and of Hugging Face: what they may hold, and that every form scores alike."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import ssl_bench
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.python_dataset import PythonDataset
from ssl_bench.data.samples import ImageSet
from ssl_bench.data.splits import limit_images
from ssl_bench.errors import ConfigurationError, DataError, MachineError, UnreadableImage

CLASSES = ("light red", "green", "blue")
TO_FLOATS = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
tv_boxes: Any = tv_tensors.BoundingBoxes
BOXES = np.array([[8, 8, 24, 24]])


def picture(number: int) -> Image.Image:
    """Return noise whose mean colour is that of class `number % 3`."""
    pixels = np.random.default_rng(number).integers(0, 150, (32, 40, 3), np.uint8)
    pixels[..., number % 3] += 100
    return Image.fromarray(pixels)


def mask(number: int) -> np.ndarray:
    """Return class 1 in a square and 255 in a row."""
    classes = np.zeros((32, 40), np.uint8)
    classes[8:24, 8 + number % 4 : 24] = 1
    classes[0] = 255
    return classes


class Items(torch.utils.data.Dataset):
    """Images with the numbers `first` to `first + count - 1`, whose class is `number % 3`."""

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


def open_sets(**sets: Any) -> PythonDataset:
    return PythonDataset().with_sets(sets)


def encoded(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def probe(task: str, **inputs: Any) -> list[tuple[Any, ...]]:
    """Return facet, metric, value and interval of all results of two blocks."""
    settings: dict[str, Any] = {"layer": [0, 11], "device": "cpu", "pictures": 0, **inputs}
    found = ssl_bench.probe("demo:skip", task=task, **settings)
    return [(r.layer, r.facet, r.metric, r.value, r.ci95) for r in found]


# Python.


def test_targets_are_recognised_by_the_first_item():
    kinds = {
        "label": 3,
        "mask": Image.fromarray(mask(0)),
        "boxes": [[1, 2, 30, 20]],
    }
    for kind, target in kinds.items():
        dataset = open_sets(val=Items(0, 2, target=lambda _, target=target: target))
        assert dataset.available()["val"].annotations == {kind}
    assert not open_sets(images=[picture(0)]).available()["images"].annotations


@pytest.mark.parametrize(
    "target",
    [
        BOXES,
        BOXES.tolist(),
        tv_boxes([[8, 8, 16, 16]], format="XYWH", canvas_size=(32, 40)),
        {"boxes": torch.tensor(BOXES), "labels": torch.tensor([1])},
        [{"bbox": [8, 8, 16, 16], "iscrowd": 0}, {"bbox": [0, 0, 1, 1], "iscrowd": 1}],
        {
            "annotation": {
                "object": [{"bndbox": {"xmin": "9", "ymin": "9", "xmax": "24", "ymax": "24"}}]
            }
        },
    ],
)
def test_boxes_of_every_form_are_the_same_corners(target):
    sample = open_sets(images=Items(0, 1, target=lambda _: target)).discovery()[0]

    assert sample.boxes is not None
    np.testing.assert_array_equal(sample.boxes, BOXES)


def test_the_first_image_of_coco_may_have_no_boxes(capsys):
    # COCO has boxes without width, which are allowed in its format only.
    targets = [[], [{"bbox": [8, 8, 0, 16], "iscrowd": 0}]]
    images = open_sets(images=Items(0, 2, target=targets.__getitem__)).discovery()

    assert "xyxy" not in capsys.readouterr().err
    boxes: list[Any] = [images[index].boxes for index in range(2)]
    assert [found.tolist() for found in boxes] == [[], [[8, 8, 8, 24]]]


def test_boxes_are_read_as_the_user_states_them():
    dataset = PythonDataset(box_format="xywh").with_sets(
        {"images": Items(0, 1, target=lambda _: [[8, 8, 16, 16]])}
    )
    np.testing.assert_array_equal(dataset.discovery()[0].boxes, BOXES)


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


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (Items(0, 2, image=v2.Compose([TO_FLOATS, v2.Normalize([0.5] * 3, [0.5] * 3)])), DataError),
        (Items(0, 2, image=lambda image: np.asarray(image) / 255), DataError),
        (Items(0, 2, target=lambda _: "cat"), DataError),
        (Items(0, 2, target=lambda _: Image.new("RGB", (40, 32))), DataError),
        (Items(0, 0), DataError),
        ([(picture(0), 1, 2)], DataError),
        (iter([]), ConfigurationError),
        ({"train": Items(0, 2)}, ConfigurationError),
        (torch.utils.data.DataLoader(Items(0, 2)), ConfigurationError),
    ],
)
def test_unsupported_content_is_refused(dataset, kind):
    with pytest.raises(kind):
        open_sets(val=dataset).val()


def test_the_identity_is_that_of_the_content():
    def fingerprint(**changes: Any) -> str:
        return open_sets(val=Items(**{"first": 0, "count": 3, **changes})).val().fingerprint()

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(first=3),
        fingerprint(count=2),
        fingerprint(target=lambda number: (number + 1) % 3),
        PythonDataset(class_names=["a", "b", "c"])
        .with_sets({"val": Items(0, 3)})
        .val()
        .fingerprint(),
    ]
    assert len({fingerprint(), *others}) == 5


def test_a_random_transform_is_refused():
    images = open_sets(val=Items(0, 2, image=v2.RandomResizedCrop(16))).val()
    images.fingerprint()

    with pytest.raises(DataError, match="random"):
        images[0]


def test_an_unreadable_item_can_be_skipped(tmp_path):
    def image(index: int) -> Image.Image:
        if index == 1:
            raise OSError("no such file")
        return picture(index)

    class Broken(Items):
        def __getitem__(self, index):
            return image(index), index % 3

    with pytest.raises(UnreadableImage) as error:
        open_sets(val=Broken(0, 4)).val()[1]
    assert "OSError" in str(error.value)
    inputs = {"train": Items(20, 12), "val": Broken(0, 4), "out": tmp_path / "r"}
    with pytest.raises(UnreadableImage) as error:
        probe("knn", **inputs)
    assert error.value.hint == ("--on-bad-image", "skip")
    found = ssl_bench.probe(
        "demo:skip", task="knn", layer=0, device="cpu", on_bad_image="skip", **inputs
    )
    assert {record.num_images for record in found} == {3}


def test_class_names_come_from_the_dataset_the_user_or_the_labels():
    train, val = Items(0, 3), Items(3, 3)
    subset = torch.utils.data.Subset(val, [0, 1])
    assert open_sets(train=train, val=subset).val().class_names == CLASSES
    named = PythonDataset(class_names=["x", "y", "z"]).with_sets({"val": val})
    assert named.val().class_names == ("x", "y", "z")
    plain = [(picture(number), number % 3) for number in range(3)]
    assert open_sets(train=plain[:2], val=plain).train().class_names == ("0", "1", "2")
    with pytest.raises(DataError):
        PythonDataset(class_names=["x", "y"]).with_sets({"val": val}).val()[2]


def test_a_limit_reads_only_the_images_that_remain():
    images: Any = open_sets(val=Items(0, 30)).val()

    few = limit_images(images, 5)
    assert few.name == "Items-30-limit5"
    assert few.ids == ("0000000", "0000006", "0000012", "0000018", "0000024")
    few.fingerprint()
    assert len(images.items._identities) == 5


def test_masks_of_0_and_255_need_a_meaning():
    def stored(_: int) -> Image.Image:
        return Image.fromarray(np.where(mask(0) == 1, 255, 0).astype(np.uint8))

    sets = {"val": Items(0, 1, target=stored)}
    with pytest.raises(DataError) as error:
        PythonDataset(one_object=True).with_sets(sets).val()
    assert error.value.hint == ("dataset.numbers=[0,255]", "or", "dataset.ignored=[255]")
    dataset = PythonDataset(one_object=True, numbers=[0, 255]).with_sets(sets)
    assert dataset.supports == {"saliency", "images"}
    mask_of_first: Any = dataset.val()[0].mask
    assert np.unique(mask_of_first).tolist() == [0, 1]


def test_images_that_are_fitted_and_scored_are_refused_unless_allowed(tmp_path):
    inputs = {"train": Items(0, 12), "val": Items(9, 6), "out": tmp_path}
    with pytest.raises(DataError) as error:
        probe("knn", **inputs)
    assert error.value.hint == ("data.allow_overlap=true",)
    settings: dict[str, Any] = {"data.allow_overlap": True}
    found = ssl_bench.probe("demo:skip", task="knn", layer=0, device="cpu", **inputs, **settings)
    assert {record.settings["fitted_and_scored"] for record in found} == {3}


def test_a_name_of_a_published_dataset_is_refused():
    sets = {"train": Items(0, 3), "val": Items(3, 3)}
    with pytest.raises(ConfigurationError):
        ssl_bench.probe("demo:skip", task="knn", dataset_name="voc2012", **sets)
    with pytest.raises(ConfigurationError):
        ssl_bench.probe("demo:skip", task="knn", dataset="toy", **sets)


def test_a_missing_role_is_named(capsys):
    with pytest.raises(DataError, match="train=DATASET"):
        ssl_bench.probe("demo:skip", task="knn", val=Items(0, 3))
    assert main(["probe", "--task", "knn", "--dataset", "python"]) == 2
    assert "ssl_bench.probe(" in capsys.readouterr().err


def test_results_of_a_python_dataset_are_kept_and_shown(tmp_path, capsys):
    inputs = {"train": Items(0, 12), "val": Items(20, 6), "out": tmp_path, "pictures": 0}
    found = ssl_bench.probe("demo:skip", task="knn", layer=0, device="cpu", **inputs)
    capsys.readouterr()
    again = ssl_bench.probe("demo:skip", task="knn", layer=0, device="cpu", **inputs)

    assert "already exist" in capsys.readouterr().err
    assert again.records == found.records
    assert {record.dataset for record in found} == {"Items-18"}
    for command in ("report", "table"):
        assert main([command, "--out", str(tmp_path)]) == 0


def test_the_images_of_a_probe_without_training_need_no_labels():
    dataset = open_sets(images=Items(0, 4))

    assert dataset.supports == {"classification", "discovery", "images"}
    assert dataset.images()[0].label is None
    assert dataset.discovery()[0].boxes is None


# Every form scores alike.


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Return class folders with 12 training and 6 validation images as PNG."""
    root = tmp_path / "folders"
    for split, numbers in (("train", range(12)), ("val", range(20, 26))):
        for number in numbers:
            folder = root / split / f"{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            picture(number).save(folder / f"{number:02}.png")
    return root


def labelled_table(folder: ImageFolder) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["0", "1", "2"])}
    )
    rows = [{"image": encoded(image), "label": label} for image, label in folder]
    return datasets.Dataset.from_list(rows, features)


def test_k_nn_has_the_same_values_in_every_form(folders, tmp_path):
    sets = {split: ImageFolder(folders / split) for split in ("train", "val")}
    expected = probe("knn", dataset="class_folders", data_root=folders, out=tmp_path / "r")

    assert probe("knn", **sets, out=tmp_path / "r") == expected
    tables = {split: labelled_table(folder) for split, folder in sets.items()}
    assert probe("knn", **tables, out=tmp_path / "r") == expected
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    for split, table in tables.items():
        table.to_parquet(parquet / f"{split}.parquet")
    assert probe("knn", dataset=f"hf:{parquet}", out=tmp_path / "r") == expected
    assert probe("knn", dataset="hf", data_root=parquet, out=tmp_path / "r") == expected


def test_segmentation_has_the_same_values_in_every_form(tmp_path):
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
    expected = probe(
        "segmentation",
        dataset="paired_folders",
        data_root=root,
        **{"dataset.image_suffix": ".png", "dataset.ignored": [255]},
        **common,
    )

    for convert in (Image.fromarray, torch.from_numpy, np.asarray):
        sets = {
            split: Items(first, count, target=lambda n, convert=convert: convert(mask(n)))
            for split, first, count in (("train", 0, 8), ("val", 20, 3))
        }
        assert probe("segmentation", **sets, **common) == expected
    assert probe("segmentation", **tables, **common) == expected


# Hugging Face.


def table_of(columns: dict[str, Any], count: int = 3, **values: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    image = {"image": datasets.Image()} if "image" not in columns else {}
    rows = [
        {"image": encoded(picture(n)), **{key: make(n) for key, make in values.items()}}
        for n in range(count)
    ]
    return datasets.Dataset.from_list(rows, datasets.Features({**image, **columns}))


def box_columns() -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    inner = {"bbox": datasets.List(datasets.Value("float32"), length=4)}
    return {"objects": datasets.List(inner)}


def test_boxes_of_a_table_need_a_stated_format():
    table = table_of(box_columns(), objects=lambda _: [{"bbox": [8, 8, 16, 16]}])

    with pytest.raises(ConfigurationError) as error:
        open_sets(images=table)
    assert error.value.hint == ("dataset.box_format=xyxy", "or", "dataset.box_format=xywh")
    dataset = PythonDataset(box_format="xywh").with_sets({"images": table})
    np.testing.assert_array_equal(dataset.discovery()[0].boxes, BOXES)


def test_several_fitting_columns_are_an_error_that_names_them():
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["a", "b"])
    table = table_of({"fine": label, "coarse": label}, fine=lambda n: n % 2, coarse=lambda _: 1)

    with pytest.raises(ConfigurationError) as error:
        open_sets(val=table)
    assert error.value.hint == ("dataset.label_column=fine", "or", "dataset.label_column=coarse")
    dataset = PythonDataset(label_column="fine").with_sets({"val": table})
    assert [sample.label for sample in map(dataset.val().__getitem__, range(3))] == [0, 1, 0]
    with pytest.raises(ConfigurationError):
        PythonDataset(label_column="none").with_sets({"val": table})


def test_a_table_with_labels_and_masks_needs_a_choice():
    datasets = pytest.importorskip("datasets")
    table = table_of(
        {"scene": datasets.ClassLabel(names=["in", "out"]), "annotation": datasets.Image()},
        scene=lambda n: n % 2,
        annotation=lambda n: encoded(Image.fromarray(mask(n))),
    )

    with pytest.raises(ConfigurationError):
        open_sets(val=table)
    masks = PythonDataset(mask_column="annotation").with_sets({"val": table})
    assert masks.supports == {"segmentation", "images"}
    np.testing.assert_array_equal(masks.val()[1].mask, mask(1))
    labels = PythonDataset(label_column="scene").with_sets({"val": table})
    assert labels.supports == {"classification", "images"}


def test_rows_are_skipped_limited_and_split_as_files_are(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    table = table_of(
        {"label": datasets.ClassLabel(names=list(CLASSES))}, 30, label=lambda n: n // 10
    )
    rows = table.cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"] = {"bytes": b"no image", "path": None}
    folder = tmp_path / "photos"
    folder.mkdir()
    datasets.Dataset.from_list(rows, table.features).to_parquet(folder / "train.parquet")
    words = ["probe", "--task", "knn", "--dataset", f"hf:{folder}", "--checkpoint", "demo:skip"]
    words += ["--layer", "0", "--out", str(tmp_path / "r"), "--device", "cpu"]
    assert main(words) == 3
    assert "dataset.train_split=train:0-75%" in capsys.readouterr().err
    words += ["dataset.train_split=train:0-50%", "dataset.val_split=train:50-100%"]

    assert main(words) == 3
    assert "--on-bad-image skip" in capsys.readouterr().err
    assert main([*words, "--on-bad-image", "skip"]) == 0
    assert main([*words, "--on-bad-image", "skip", "--limit", "12", "data.bits=12"]) == 0
    assert main(["data", "check", f"hf:{folder}", "dataset.val_split=train:50-100%"]) == 2
    assert main(["data", "check", f"hf:{folder}", *words[-2:]]) == 3


def test_a_dataset_of_the_hub_cannot_be_reached(monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["probe", "--task", "knn", "--checkpoint", "demo:skip", "--dataset"]

    assert main([*words, "hf:no-organisation/no-name@v1"]) == 5
    assert "--dataset hf:FOLDER" in capsys.readouterr().err
    for address in ("hf:/no/such/folder", "hf:a b"):
        assert main([*words, address]) == 3
    for address in ("hf:", "toy:folder", "hf"):
        assert main([*words, address]) in (2, 3)
    assert main([*words, "hf:folder", "--data-root", "folder"]) == 2


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(MachineError, match=r"ssl-bench\[hf\]"):
        ssl_bench.probe("demo:skip", task="knn", dataset=f"hf:{tmp_path}")


def test_datasets_with_own_code_are_refused(tmp_path, capsys):
    pytest.importorskip("datasets")
    folder, ran = tmp_path / "script", tmp_path / "ran"
    folder.mkdir()
    (folder / "script.py").write_text(f"open({str(ran)!r}, 'w')")

    words = ["probe", "--task", "knn", "--checkpoint", "demo:skip", "--dataset", f"hf:{folder}"]
    assert main(words) == 3
    assert not ran.exists()


def test_a_transform_of_a_table_is_refused():
    table = table_of({})
    table.set_transform(lambda batch: batch)

    with pytest.raises(ConfigurationError):
        open_sets(images=table)


def test_sets_of_both_forms_are_image_sets():
    assert isinstance(open_sets(val=Items(0, 2)).val(), ImageSet)
    assert isinstance(open_sets(images=table_of({})).images(), ImageSet)
