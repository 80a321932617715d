"""Test datasets whose images are sorted into one folder per class."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base as Tag

from ssl_bench.data.files.fingerprints import ReadOptions, file_hashes, with_read_options
from ssl_bench.data.files.readable import ImageSubset, count_shared_files
from ssl_bench.data.layouts.class_folders import ClassFolders, LabelledImages
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.python_dataset import PythonDataset
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import mark_as_output


def save_images(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2), (number, 0, 0)).save(path)
    return root


def labels_of(images: LabelledImages) -> dict[str, str]:
    samples = [images[index] for index in range(len(images))]
    return {s.image_id: images.class_names[s.label] for s in samples if s.label is not None}


def test_labels_of_validation_images_number_the_training_folders(tmp_path):
    save_images(tmp_path, "train/a/images/1.JPEG", "train/b/2.png", "train/c/3.png", "test/c/4.png")
    save_images(tmp_path, "other/a/3.png")
    (tmp_path / "train/a/a_boxes.txt").touch()
    dataset = ClassFolders(tmp_path)

    train, val = dataset.train(), dataset.val()

    assert isinstance(dataset, Dataset)
    assert isinstance(val, ImageSet)
    assert labels_of(train) == {"a/images/1.JPEG": "a", "b/2.png": "b", "c/3.png": "c"}
    assert (val.class_names, val[0].label, val.split) == (("a", "b", "c"), 2, "test")
    assert val[0].image[0, 0, 0] == 3
    assert ClassFolders(tmp_path, val_split="other").val().ids == ("a/3.png",)
    with pytest.raises(DataError, match="other"):
        ClassFolders(tmp_path, val_split="nowhere").val()
    exif = Image.Exif()
    exif[Tag.Orientation] = 6
    Image.new("RGB", (3, 2)).save(tmp_path / "train/b/2.png", exif=exif)
    assert ClassFolders(tmp_path).train()[1].image.shape == (3, 2, 3)


def test_tiny_imagenet_lists_the_classes_of_a_flat_folder(tmp_path):
    save_images(tmp_path, "train/n1/images/n1_0.png", "train/n2/images/n2_0.png")
    save_images(tmp_path / "val/images", "val_0.png", "val_1.png")
    listing = tmp_path / "val/val_annotations.txt"
    listing.write_text("val_0.png\tn2\t0\t32\t44\t62\nval_1.png\tn1\t5\t5\t9\t9\n")

    found = labels_of(ClassFolders(tmp_path).val())

    assert found == {"images/val_0.png": "n2", "images/val_1.png": "n1"}
    listing.write_text("val_0.png\tn2\t0\t32\t44\t62\n")
    with pytest.raises(DataError, match=r"images/val_1\.png"):
        ClassFolders(tmp_path).val()


def test_a_class_without_training_images_is_refused_or_left_out(tmp_path):
    save_images(tmp_path, "train/a/1.png", "train/b/1.png", "val/zebra/1.png", "val/b/1.png")

    with pytest.raises(DataError, match="zebra") as caught:
        ClassFolders(tmp_path).val()
    assert caught.value.hint == ("dataset.known_only=true",)
    assert labels_of(ClassFolders(tmp_path, known_only=True).val()) == {"b/1.png": "b"}


def test_a_share_is_taken_of_every_class(tmp_path):
    save_images(tmp_path, *(f"train/{name}/{number}.png" for name in "ab" for number in range(4)))
    halves = ClassFolders(tmp_path, train_split="train:0-50%", val_split="train:50-100%")

    assert halves.train().ids == ("a/0.png", "a/1.png", "b/0.png", "b/1.png")
    assert halves.val().ids == ("a/2.png", "a/3.png", "b/2.png", "b/3.png")
    images = halves.train()
    changed = file_hashes(replace(images, labels=(0, 1, 1, 1))) != file_hashes(images)
    assert changed.tolist() == [False, True, False, False]
    with pytest.raises(ConfigurationError):
        ClassFolders(tmp_path, val_split="train:50-100%").val()
    # The root directly contains class folders, one of which is called train.
    save_images(
        tmp_path / "flat", *(f"{name}/{n}.png" for name in ("train", "bus") for n in range(5))
    )
    save_images(tmp_path / "flat", ".hidden/deep/1.png")
    flat = ClassFolders(tmp_path / "flat")
    assert (len(flat.train()), flat.val().ids) == (8, ("bus/4.png", "train/4.png"))
    # Not every folder contains images directly, so the folders are splits.
    nested = ClassFolders(save_images(tmp_path / "nested", "Photos/1.png", "Train/c/2.png"))
    with pytest.raises(DataError):
        nested.train()
    with pytest.raises(DataError) as caught:
        nested.pretraining_images()
    assert caught.value.hint == (f"data.root={tmp_path / 'nested/Train'}",)


@pytest.mark.parametrize("fingerprint", ["content", "stat"])
def test_copies_are_found_among_files_of_equal_size_and_time(tmp_path, fingerprint):
    save_images(tmp_path, "train/a/1.bmp", "train/b/2.bmp", "train/b/3.bmp", "val/b/4.bmp")
    (tmp_path / "val/b/4.bmp").write_bytes((tmp_path / "train/b/2.bmp").read_bytes())
    for path in tmp_path.rglob("*.bmp"):
        os.utime(path, (1e9, 1e9))
    assert len({path.stat().st_size for path in tmp_path.rglob("*.bmp")}) == 1
    options, dataset = ReadOptions(fingerprint), ClassFolders(tmp_path)
    train, val = (with_read_options(images, options) for images in (dataset.train(), dataset.val()))

    assert count_shared_files(train, val, allowed=True) == 1
    with pytest.raises(DataError, match=r"train/b/2\.bmp is identical"):
        count_shared_files(train, val, allowed=False)
    for indices, count in (((1, 2), 1), ((0, 2), 0)):
        assert count_shared_files(ImageSubset(train, indices), val, allowed=True) == count
    # Images in memory are not compared with files.
    memory = PythonDataset().with_sets({"images": [val[0].image]}).images()
    for pair in ((train, memory), (memory, train)):
        assert count_shared_files(*pair, allowed=False) == 0


def test_a_root_without_class_folders_or_images_is_refused(tmp_path):
    save_images(tmp_path, "train/1.png")

    with pytest.raises(DataError, match=r"1\.png is in no class folder"):
        ClassFolders(tmp_path).train()
    with pytest.raises(DataError, match="has no class folders"):
        ClassFolders(tmp_path / "train").train()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"\.jfif"):
        ImageFolder(tmp_path / "empty").images()


def test_a_folder_that_ssl_bench_wrote_is_no_class(tmp_path):
    save_images(tmp_path, *(f"{kind}/{n}.png" for kind in ("cat", "dog") for n in range(5)))
    save_images(tmp_path, "out/pictures/0.png")
    mark_as_output(tmp_path / "out")

    found = [ClassFolders(tmp_path).train(), ClassFolders(tmp_path).val()]

    assert [(images.class_names, len(images)) for images in found] == [
        (("cat", "dog"), 8),
        (("cat", "dog"), 2),
    ]


def test_only_a_split_of_several_classes_is_suggested_for_division(tmp_path):
    save_images(tmp_path, "photos/cat/0.png", "photos/cat/1.png")
    for more, hint in ((), ()), (("photos/dog/2.png",), ("photos:0-75%", "photos:75-100%")):
        save_images(tmp_path, *more)
        with pytest.raises(DataError) as caught:
            ClassFolders(tmp_path).train()
        assert tuple(word.partition("=")[2] for word in caught.value.hint) == hint


def test_users_may_name_images_but_not_like_published_datasets(tmp_path):
    save_images(tmp_path, "train/cat/1.png", "val/cat/2.png", "train/dog/3.png", "val/dog/4.png")
    named = ClassFolders(tmp_path, name="pets")

    assert named.name == named.train().name == named.val().name == "pets"
    assert named.val().fingerprint() == ClassFolders(tmp_path).val().fingerprint()
    assert limit_dataset(named, 1).val().name == "pets-limit1"
    assert ImageFolder(tmp_path, name="pets").images().name == "pets"
    for layout in (ClassFolders, ImageFolder):
        with pytest.raises(ConfigurationError) as caught:
            layout(tmp_path, name="voc2012")
        assert caught.value.hint == ("dataset.name=my_images",)


def test_pictures_are_found_at_any_depth_and_through_links(tmp_path):
    root = save_images(tmp_path / "root", "b/2.png", "b/1.JPEG", "a.bmp", "c/d/e/3.webp")
    save_images(root, ".hidden/4.png", "b/._1.png")
    save_images(tmp_path / "elsewhere", "0.png", "1.png")
    (root / "readme.txt").touch()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "circle").symlink_to(root)
    dataset = ImageFolder(root)

    images = dataset.images()

    assert isinstance(dataset, Dataset)
    assert images.ids[:4] == ("a.bmp", "b/1.JPEG", "b/2.png", "c/d/e/3.webp")
    assert images.ids[4:] == ("link/0.png", "link/1.png")
    assert images[5].image[0, 0, 0] == 1
    sample = dataset.discovery()[3]
    assert (sample.image.shape, sample.boxes) == ((2, 3, 3), None)


def test_an_archive_is_refused_with_its_command_and_a_folder_of_this_name_is_read(tmp_path):
    for name, command in (("a.zip", "unzip"), ("B.ZIP", "unzip"), ("c.tar.gz", "tar -xf")):
        path = tmp_path / name
        path.touch()
        with pytest.raises(DataError, match=f"{command} {path}$"):
            ImageFolder(path).images()
        path.unlink()
        assert len(ImageFolder(save_images(path, "0.png")).images()) == 1
