"""Test the error messages about broken files and wrong arguments."""

import os
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm  # noqa: F401 - this import takes seconds, which should not count as a test's time
import torch
from omegaconf import OmegaConf
from PIL import Image

from pretrain.checkpoints import load_state, save_state
from ssl_bench.cli.__main__ import main
from ssl_bench.models import build_vit
from ssl_bench.system.files import file_sha256
from tests.support.faults import (
    DINO_LIKE,
    OBJECT,
    SMALL,
    TRAIN,
    Fault,
    check_fault,
    class_folders,
    coco20k,
    corrupt_file,
    do_nothing,
    make_pretrain_args,
    make_supervised_args,
    mask,
    pickled_mark,
    picture,
    records,
    save_mask,
    voc,
)
from tests.support.spair import PAIRS, spair, write_annotation

Prepare = Callable[[Path], object]
ENCODER = "--checkpoint encoder.safetensors"
PROBE = f"probe {ENCODER} --dataset folder --data-root photos --task"
PCA, STRICT = f"{PROBE} pca", f"{PROBE} pca --on-bad-image fail"
VOC = f"probe {ENCODER} --layer 1 --dataset voc2012 --data-root . --task"
TOKENCUT, SEGMENTATION = f"{VOC} tokencut", f"{VOC} segmentation"
FAST_SEGMENTATION = f"{SEGMENTATION} {' '.join(SMALL['segmentation'])}"
RETRIEVAL = f"{VOC} retrieval {' '.join(SMALL['retrieval'])}"
CLASSES = f"probe {ENCODER} --layer 1 --dataset class_folders --data-root . --task"
KNN = f"{CLASSES} knn {' '.join(SMALL['knn'])}"
CHECK_VOC, CHECK_COCO, CHECK_SPAIR = (
    f"data check {name} --data-root . --subset" for name in ("voc2012", "coco20k", "spair71k")
)
RUN = "pretrain model=vit_tiny_skip data.root=photos --out run"
KEYS = "ssl-bench keys"

# Wrong arguments.


def wrong_argument(command: str, word: str, hint: str = "", name: str = "") -> Fault:
    name = name or word.partition("=")[0].lstrip("+~-")
    words = shlex.join([*shlex.split(command), word])
    return Fault(f"{command.split()[-1]} {word[:40]}", do_nothing, words, 2, name, hint)


NO_USER = "~nosuchuser/x"
PATH_FLAGS = [
    f"{PCA} --out", f"{PCA} --data-root", f"{PCA} --checkpoint", "pretrain --out",
    "pretrain --data-root", "table --figure", "report --into", "sweep --slurm-logs",
    "data verify photos --manifest", "data verify", "data check voc2012 --data-root", "models",
    "quickstart --out",
]  # fmt: skip
ARGUMENTS = [
    # The configuration must not name code to run.
    wrong_argument(PCA, "probe._target_=probes.knn.KNN", KEYS),
    wrong_argument(PCA, "++probe._target_=os.system", KEYS),
    wrong_argument(PCA, "+probe._partial_=true", KEYS),
    wrong_argument(PCA, "probe._args_=[left]", KEYS),
    wrong_argument(PCA, "probe._convert_=none"),
    wrong_argument(PCA, "probe.align_to={_target_: pathlib.Path.touch, self: left}", KEYS),
    wrong_argument(PCA, "dataset={_target_: os.mkdir, path: left}", KEYS),
    wrong_argument(PCA, "hydra.searchpath=[file:///tmp]", KEYS),
    wrong_argument(PCA, "+/tmp=evil", KEYS, name="tmp"),
    wrong_argument(PCA, "~probe._target_"),
    # Values of keys.
    *(wrong_argument(PCA, word) for word in (
        "seed=99999999999999999999999", "data.root=???", "dtype=${dtype}", "dtype=8",
        "data.fingerprint=times", "probe.panels=1,2", "probe.panels=[1,2]", "probe.panels=two",
        "probe.panels=", "probe.panels=${oc.env:HOME}", "++probe.new=1", "~probe.panels",
        "probe=tokencut=1", "dataset=nowhere")),
    wrong_argument(PCA, "probe.facet=8", "\"probe.facet='8'\""),
    wrong_argument(PCA, "probe.protocol=bacth", name="bacth"),
    wrong_argument(PCA, "prob.panels=1", "probe.panels=VALUE"),
    wrong_argument("probe --task", "pca,segmentaton", "--task segmentation", name="segmentaton"),
    wrong_argument(PCA, "--chekpoint", "--checkpoint"),
    wrong_argument(f"{PROBE} knn", "probe.batch_size=0"),
    wrong_argument(f"{PROBE} classification", "probe.training.c_values=[nan]", name="c_values"),
    wrong_argument(f"{PROBE} segmentation", "probe.training.weight_decay=-1", name="weight_decay"),
    wrong_argument(f"{PROBE} tokencut", "probe.tau=7"),
    *(wrong_argument(RUN, word) for word in (
        "optimizer.lr=-1", "optimizer.lr=nan", "optimizer.betas=[0.9]", "objective.momentum=2",
        "objective.crops.global_scale=[0.1]", "train.epochs=0", "objective={}",
        "model.init_options.mlp_mean=nan", "model.init_options.mlp_mean=???",
        "model.dim=100000000000", "data.image_size=0")),
    wrong_argument(f"{RUN} objective=mae", "objective.crops.flip_probability=7"),
    wrong_argument(RUN, "train=3", KEYS),
    # Paths.
    *(wrong_argument(flag, NO_USER, name=" path") for flag in PATH_FLAGS),
    *(wrong_argument(f"{PCA} --out", path, name=" path") for path in ("", "a" * 300, "b/" * 3000)),
    *(wrong_argument(f"{PCA} --checkpoint", path, name=" path") for path in ("", "a" * 300)),
    wrong_argument(PCA, f"data.root='{NO_USER}'", name=NO_USER),
    *(wrong_argument("pretrain --out run", f"{key}='{NO_USER}'", name=NO_USER)
      for key in ("data.root", "monitor.root", "init_from")),
    wrong_argument(f"{RUN} monitor.accuracy_epochs=1", f"monitor.results='{NO_USER}'"),
    Fault("more neighbours than images", class_folders, f"{CLASSES} knn probe.neighbours=[7]", 2,
          "at most 6"),
    Fault("more neighbours than patches", voc,
          f"{VOC} retrieval probe.image_size=32 probe.neighbours=9999", 2, "at most 64"),
]  # fmt: skip


# Folders, devices and networks.


def link_to_itself(path: str) -> Prepare:
    return lambda folder: (folder / path).symlink_to(folder / path)


def file_and_no_encoder(folder: Path) -> None:
    # The command must fail because of the file, before it notices the missing encoder.
    (folder / "a_file").touch()
    (folder / "encoder.safetensors").unlink()


def weights(name: str) -> Prepare:
    return lambda folder: torch.save({name: torch.ones(3)}, folder / "weights.pth")


def foreign_weights(network: str, tensor: str) -> Fault:
    words = (network, "timm")
    return Fault(network, weights(tensor), "models weights.pth", 4, words, "ssl-bench models")


LOOP = link_to_itself("loop")
DEVICES = ("meta", *(() if torch.cuda.is_available() else ("cuda", "cuda:3", "mps")))
PLACES = [
    Fault("a link to itself as a model", LOOP, "models loop", 4, "loop"),
    Fault("a link to itself as a checkpoint", LOOP, f"{PCA} --checkpoint loop", 4, "loop"),
    Fault("a link to itself for results", LOOP, f"{PCA} --out loop", 5, "loop"),
    Fault("a link to itself for data", LOOP, f"{PCA} --data-root loop", 3, "loop"),
    Fault("a file in the path of results", file_and_no_encoder, f"{PCA} --out a_file/results", 5,
          "a_file/results", "--out "),
    Fault("a folder that cannot be written", file_and_no_encoder, f"{PCA} --out /proc/results", 5,
          "/proc/results", "--out "),
    Fault("a file in the path of a run", file_and_no_encoder,
          "pretrain --data-root photos --out a_file/run", 5, "a_file/run"),
    *(Fault(f"no {device}", do_nothing, f"{PCA} --device {device}", 5, device, "--device cpu")
      for device in DEVICES),
    Fault("a network of torchvision", do_nothing, f"{PCA} --checkpoint torchvision:resnet50", 4,
          "torchvision:resnet50"),
    Fault("an unsupported network of timm", do_nothing, f"{PCA} --checkpoint timm:mvitv2_tiny", 4,
          "mvitv2_tiny", "--checkpoint FILE.py:NAME"),
    foreign_weights("a ResNet", "layer1.0.conv1.weight"),
    foreign_weights("a ConvNeXt", "stages.0.blocks.0.gamma"),
    foreign_weights("a Swin", "layers.0.blocks.0.norm1.weight"),
    foreign_weights("a BEiT", "blocks.0.attn.relative_position_bias_table"),
]  # fmt: skip


# Images, masks and lists.


def spoilt_photo(how: str) -> Prepare:
    return lambda folder: corrupt_file(folder / "photos/1.jpg", how)


def end_photo_early(folder: Path) -> None:
    # The appended bytes mark the end of a JPEG file.
    path = folder / "photos/1.jpg"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff\xd9")


def link_to_nothing(folder: Path) -> None:
    (folder / "photos/2.jpg").unlink()
    (folder / "photos/2.jpg").symlink_to("not there.jpg")


def changed_voc(change: Callable[[Path], object]) -> Prepare:
    return lambda folder: change(voc(folder))


def save_colour_mask(base: Path) -> None:
    path = base / "SegmentationClass/t0.png"
    Image.open(path).convert("RGB").save(path)


def save_label_21(name: str, base: Path) -> None:
    indices = mask()
    indices[0, 0] = 21
    save_mask(base / f"SegmentationClass/{name}.png", indices)


def save_wide_mask(base: Path) -> None:
    save_mask(base / "SegmentationClass/v1.png", mask(32, 41))


def remove_files(pattern: str, base: Path) -> None:
    # The command must fail because of the three files, before it notices the missing encoder.
    for number in (1, 2, 3):
        (base / pattern.format(number)).unlink()
    (base.parents[1] / "encoder.safetensors").unlink()


def empty_masks(base: Path) -> None:
    for name in TRAIN:
        save_mask(base / f"SegmentationClass/{name}.png", np.zeros((32, 40), np.uint8))


def remove_a_class(folder: Path) -> None:
    for path in class_folders(folder).glob("*/dog/*"):
        path.unlink()


def nest_classes(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name / "old").mkdir(parents=True)
        picture(0).save(folder / name / "old/0.jpg")


def list_absent_images(base: Path) -> None:
    names = [*TRAIN, *(f"absent{number}" for number in range(9))]
    (base / "ImageSets/Main/trainval.txt").write_text("\n".join(names))


def wrong_digests(name: str, line: str, word: str) -> Fault:
    def prepare(folder: Path) -> None:
        (folder / "photos/SHA256SUMS").write_text(f"{line}\n")

    return Fault(f"{name} in a list of digests", prepare, "data verify photos", 3, word)


IMAGES = [
    Fault("an empty image", spoilt_photo("empty"), STRICT, 3, ("photos/1.jpg", "empty")),
    Fault("a cut image", spoilt_photo("half"), STRICT, 3, ("photos/1.jpg", "cut short")),
    Fault("two lost bytes", spoilt_photo("last2"), STRICT, 3, ("photos/1.jpg", "cut short")),
    Fault("a web page", spoilt_photo("html"), STRICT, 3, ("photos/1.jpg", "web page")),
    Fault("a Git LFS pointer", spoilt_photo("lfs"), STRICT, 3, ("photos/1.jpg", "Git LFS")),
    Fault("half an image with an end marker", end_photo_early, STRICT, 3,
          "photos/1.jpg is damaged", remedy="--on-bad-image skip"),
    Fault("half an image with an end marker to learn from", end_photo_early,
          shlex.join(make_pretrain_args(Path("photos"), "run")), 3, "photos/1.jpg is damaged"),
    Fault("a broken link", link_to_nothing, STRICT, 3, "photos/2.jpg"),
    Fault("a broken link to skip", link_to_nothing, PCA, 3, "photos/2.jpg"),
    Fault("a broken link to learn from", link_to_nothing,
          "pretrain --data-root photos --out run", 3, "photos/2.jpg"),
    Fault("a link to itself", link_to_itself("photos/loop"), "data verify photos", 3,
          "photos/loop"),
    Fault("an image instead of a folder", do_nothing, f"{PCA} --data-root photos/0.jpg", 3,
          "0.jpg"),
    Fault("no folder to verify", do_nothing, "data verify absent", 3, "absent"),
    wrong_digests("a line without a digest", "no digest  0.jpg", "line 1"),
    *(wrong_digests(path, f"{'0' * 64}  {path}", path)
      for path in ("/etc/hostname", "../encoder.safetensors")),
    Fault("a mask of colours", changed_voc(save_colour_mask), SEGMENTATION, 3,
          ("t0.png", "colours")),
    Fault("a label out of range in a training image", changed_voc(partial(save_label_21, "t0")),
          SEGMENTATION, 3, ("t0.png", "21")),
    Fault("a label out of range in a scored image", changed_voc(partial(save_label_21, "v0")),
          CHECK_VOC, 3, ("v0.png", "21")),
    Fault("a mask of another size", changed_voc(save_wide_mask), CHECK_VOC, 3,
          ("v1.png", "41 x 32")),
    Fault("a mask of another size is no image to skip", changed_voc(save_wide_mask),
          f"{FAST_SEGMENTATION} --on-bad-image skip", 3, ("v1.png", "41 x 32")),
    Fault("missing images", changed_voc(partial(remove_files, "JPEGImages/t{}.jpg")),
          SEGMENTATION, 3, ("3 of 4 images", "t1.jpg, t2.jpg, t3.jpg")),
    Fault("missing masks", changed_voc(partial(remove_files, "SegmentationClass/t{}.png")),
          SEGMENTATION, 3, ("3 of 4 masks", "t1.png, t2.png, t3.png")),
    Fault("missing annotations", changed_voc(partial(remove_files, "Annotations/t{}.xml")),
          TOKENCUT, 3, ("3 of 7 annotations", "t1.xml, t2.xml, t3.xml")),
    Fault("more than five missing images", changed_voc(list_absent_images), TOKENCUT, 3,
          ("9 of 13 images", "absent4.jpg, ...")),
    Fault("an empty list",
          changed_voc(lambda base: (base / "ImageSets/Segmentation/val.txt").write_text("\n\n")),
          SEGMENTATION, 3, "val.txt"),
    Fault("masks of a single class", changed_voc(empty_masks), FAST_SEGMENTATION, 3, "class"),
    Fault("a single class", remove_a_class, KNN, 3, "class"),
    Fault("classes within classes", nest_classes, "data check class_folders --data-root .", 3,
          "SPLIT/CLASS/IMAGE or CLASS/IMAGE"),
]  # fmt: skip


def wrong_folder(dataset: str, task: str, tree: str, *, exists: bool) -> Fault:
    command = f"probe --task {task} --dataset {dataset} --data-root elsewhere {ENCODER}"
    prepare = lambda folder: exists and (folder / "elsewhere/things").mkdir(parents=True)  # noqa: E731
    name = f"{'another' if exists else 'no'} folder for {dataset}"
    return Fault(name, prepare, command, 3, ("elsewhere", tree))


LAYOUTS = [
    wrong_folder(*row, exists=exists)
    for exists in (True, False)
    for row in (
        ("voc2012", "tokencut", "VOCdevkit/VOC2012/{JPEGImages,SegmentationClass"),
        ("ade20k", "segmentation", "ADEChallengeData2016/{images,annotations}"),
        ("coco20k", "tokencut", "annotations/instances_train2014.json, images/train2014/*.jpg"),
        ("coco_stuff", "segmentation", "images/{train2017,val2017}/*.jpg and stuffthingmaps/"),
        ("cityscapes", "segmentation", "leftImg8bit/{train,val}/*_leftImg8bit.png and gtFine/"),
        ("camvid", "segmentation", "{train,val}/*.png and {train,val}annot/*.png"),
        ("spair71k", "correspondence", "JPEGImages/CLASS/*.jpg, PairAnnotation/SPLIT/*.json"),
        ("paired_folders", "segmentation", "images/{train,val}/*.jpg and masks/{train,val}/*.png"),
        ("class_folders", "knn", "train/CLASS/IMAGE"),
        ("folder", "pca", "images"),
    )
]


# Boxes and other annotations.


def voc_box(*corners: object, more: str = "", before: str = "") -> Prepare:
    def prepare(folder: Path) -> None:
        path = voc(folder) / "Annotations/t0.xml"
        names = ("xmin", "ymin", "xmax", "ymax")
        box = "".join(f"<{name}>{n}</{name}>" for name, n in zip(names, corners, strict=True))
        one = f"<object><name>cat</name><bndbox>{box}</bndbox></object>"
        path.write_text(f"<annotation>{more}{before}{one}</annotation>")

    return prepare


def voc_xml(old: str, new: str) -> Prepare:
    def prepare(folder: Path) -> None:
        size = "<size><width>40</width><height>32</height></size>"
        voc_box(9, 9, 24, 24, more=size)(folder)
        path = folder / "VOCdevkit/VOC2012/Annotations/t0.xml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return prepare


def coco(bbox: object = (8, 8, 16, 16), width: object = 40, **changed: object) -> Prepare:
    def prepare(folder: Path) -> None:
        one = {"id": 7, "image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": bbox}
        image = {"id": 1, "width": width, "height": 32}
        coco20k(folder, [1], {"images": [image], "annotations": [one | changed]})

    return prepare


def rename_coco_images(folder: Path) -> None:
    coco()(folder)
    images = folder / "images/train2014"
    (images / "COCO_train2014_000000000001.jpg").rename(images / "cat.jpg")
    (folder / "coco_20k_filenames.txt").write_text("train2014/cat.jpg\n")


def wrong_box(*corners: object, before: str = "", command: str = CHECK_VOC) -> Fault:
    prepare, number = voc_box(*corners, before=before), "object 2" if before else "object 1"
    return Fault(f"VOC: box {corners}", prepare, command, 3, ("t0.xml", number))


def wrong_xml(name: str, old: str, new: str, command: str = CHECK_VOC) -> Fault:
    return Fault(name, voc_xml(old, new), command, 3, "t0.xml")


def wrong_coco(*words: str, **changed: object) -> Fault:
    words = ("instances_train2014.json", *words)
    return Fault(f"COCO: {changed}", coco(**changed), CHECK_COCO, 3, words)


def wrong_pair(words: str, **changed: object) -> Fault:
    def prepare(folder: Path) -> None:
        write_annotation(spair(folder), PAIRS[0], **changed)

    file = PAIRS[0].line.replace(":", "_").partition("_")[0]
    return Fault(f"SPair: {changed}", prepare, CHECK_SPAIR, 3, (file, words))


FIRST = OBJECT.removeprefix("<annotation>").removesuffix("</annotation>")
EASY = f"{CHECK_VOC} dataset.exclude_difficult=true"
BOXES = [
    # Corners that are no numbers, reversed, equal, outside of the image, or far outside of it.
    *(wrong_box(*corners) for corners in (
        (9, 9, "2_4", 24), (9, 9, "٢٤", 24), ("", 9, 24, 24), (24, 9, 9, 24), (9, 24, 24, 9),
        (9, 9, 8, 24), (9, 9, 24, 8), (41, 9, 60, 24), (9, 33, 24, 60), (-30, 9, 0, 24),
        (9, 9, 1e308, 1e308), (9, 9, 81, 24), (-40, 9, 24, 24))),
    wrong_box(9, 9, 8, 24, before=FIRST),
    wrong_box(9, 9, 8, 24, command=TOKENCUT),
    wrong_xml("an empty width", "<width>40", "<width>"),
    wrong_xml("another width than the image", "<width>40", "<width>80"),
    wrong_xml("no box", "bndbox>", "box>"),
    wrong_xml("cut XML", "</annotation>", ""),
    wrong_xml("another root element", "annotation>", "html>"),
    wrong_xml("a text for difficult", "<bndbox>", "<difficult>yes</difficult><bndbox>", EASY),
    wrong_xml("difficult is 2", "<bndbox>", "<difficult>2</difficult><bndbox>", EASY),
    *(wrong_coco(bbox=bbox) for bbox in (
        [8, 8, 1e300, 16], [8, 8, True, 16], [8, 8, 16], {"x": 8, "y": 8, "w": 16, "h": 16},
        [8, 8, -4, 16])),
    wrong_coco("object 7", "[41.0, 8.0, 57.0, 24.0]", bbox=[41, 8, 16, 16]),
    wrong_coco("object 7", iscrowd=False),
    wrong_coco("object 7", iscrowd=2),
    *(wrong_coco("object 7", image_id=number) for number in (1.6, 2**63, -(2**63))),
    wrong_coco(id=True),
    *(wrong_coco(width=width) for width in (80, "40")),
    Fault("COCO: other file names", rename_coco_images, CHECK_COCO, 3, "cat is not"),
    wrong_pair("trg_bndbox", trg_bndbox=None),
    wrong_pair("x = 30", trg_bndbox=[30, 8, 5, 58]),
    wrong_pair("y = 8", trg_bndbox=[5, 8, 30, 8]),
    wrong_pair("trg_bndbox", trg_bndbox=[400, 8, 430, 58]),
    wrong_pair("trg_kps", trg_kps=[[True, 8], [24, 16], [36, 24]]),
    wrong_pair("src_kps", src_kps=[]),
    wrong_pair("src_kps", src_kps=[[1, 2, 3]]),
    wrong_pair("3 src_kps and 1 trg_kps", trg_kps=[[1, 2]]),
    wrong_pair("outside the 40 x 60", trg_kps=[[1, 2], [3, 4], [41, 5]]),
    wrong_pair("cat", category="dog"),
]  # fmt: skip


# Images that are both fitted to and scored.

ALLOW = "data.allow_overlap=true"
ONE_STEP = "train.max_minutes=0.0"
ALL = "6 of 6 scored images"


def repeat_an_image(dataset: str, how: str, folder: Path) -> None:
    if dataset == "voc2012":
        base, names = voc(folder), ("JPEGImages/t1.jpg", "JPEGImages/v2.jpg")
    else:
        base, names = class_folders(folder), ("train/cat/1.jpg", "val/dog/0.jpg")
    train, val = (base / name for name in names)
    val.unlink()
    make = {"copy": shutil.copy, "link": lambda one, other: other.symlink_to(one), "hard": os.link}
    make[how](train, val)


def repeat_all_images(folder: Path) -> None:
    data = class_folders(folder / "data")
    shutil.rmtree(data / "val")
    shutil.copytree(data / "train", data / "val")


def monitor_training_images(folder: Path) -> None:
    data = class_folders(folder / "data")
    shutil.copytree(data / "train", folder / "monitored/val")
    shutil.copytree(data / "val", folder / "monitored/train")


def repeated_image(command: str, how: str, remedy: str = "") -> Fault:
    dataset = "voc2012" if command.startswith(VOC) else "class_folders"
    words = ("t1.jpg", "v2.jpg") if dataset == "voc2012" else ("train/cat/1.jpg", "val/dog/0.jpg")
    name = f"a {how} of a training image: {command.partition('--task ')[2]}"
    return Fault(name, partial(repeat_an_image, dataset, how), command, 3, words, ALLOW, remedy)


MONITORED = make_supervised_args(
    Path("data"), "run", "monitor.root=monitored", "monitor.accuracy_epochs=1"
)
NEIGHBOURS = make_pretrain_args(Path("data"), "run", "monitor.knn_epochs=1", "monitor.neighbours=1")
ALL_REPEATED = f"{KNN} --data-root data"
OVERLAPS = [
    repeated_image(KNN, "copy", remedy=ALLOW),
    repeated_image(f"{CLASSES} classification", "copy"),
    repeated_image(f"{VOC} clustering probe.protocol=patches", "copy"),
    repeated_image(FAST_SEGMENTATION, "copy"),
    repeated_image(RETRIEVAL, "copy", remedy=ALLOW),
    repeated_image(f"{KNN} data.fingerprint=content", "link"),
    repeated_image(f"{KNN} data.fingerprint=stat", "link"),
    repeated_image(f"{KNN} data.fingerprint=stat", "hard"),
    Fault("unreadable images are skipped", repeat_all_images,
          f"{ALL_REPEATED} --on-bad-image skip", 3, ALL, ALLOW),
    Fault("a limited number", repeat_all_images, f"{ALL_REPEATED} --limit 6", 3, ALL, ALLOW),
    Fault("corrupted images", repeat_all_images, f"{ALL_REPEATED} corrupt=snow:1", 3, ALL, ALLOW),
    Fault("a monitor that scores training images", monitor_training_images,
          shlex.join(MONITORED), 3, ALL, ALLOW, remedy=f"{ALLOW} {ONE_STEP}"),
    Fault("a monitor whose neighbours are scored", repeat_all_images,
          shlex.join(NEIGHBOURS), 3, ALL, ALLOW, remedy=f"{ALLOW} {ONE_STEP}"),
]  # fmt: skip


# Checkpoints.

TIMM = "timm:vit_tiny_patch16_224@"
OURS = "encoder.safetensors"
# Functions from the size of a file to its size after it is cut.
CUTS: dict[str, Callable[[int], int]] = {
    "nothing left": lambda _: 0,
    "10 bytes": lambda _: 10,
    "half": lambda size: size // 2,
    "the last byte lost": lambda size: size - 1,
}


def write_malicious_pickle(name: str, folder: Path, *, zipped: bool = True) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    pickled_mark(folder / name, folder / "mark", zipped=zipped)


def save_dino(folder: Path, change: Callable[[Any], Any] = lambda weights: weights) -> Path:
    path = folder / "dino.pth"
    torch.save(change(build_vit(DINO_LIKE, seed=0).state_dict()), path)
    return path


def cut(path: Path, length: Callable[[int], int]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: length(len(content))])


def cut_encoder(length: Callable[[int], int], folder: Path, *, is_ours: bool = True) -> None:
    path = folder / OURS
    if not is_ours:
        path.with_name(f"{OURS}.sha256").unlink()
        safetensors.torch.save_file(build_vit(DINO_LIKE, seed=0).state_dict(), path)
    cut(path, length)


def flip_a_bit(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)


def flip_a_bit_of_dino(folder: Path) -> None:
    path = save_dino(folder)
    path.with_name("dino.pth.sha256").write_text(f"{file_sha256(path)}  dino.pth\n")
    flip_a_bit(path, 0.5)


def rename_tensors(weights):
    return {n.replace("blocks.1.attn", "encoder.1.attn"): w for n, w in weights.items()}


def wrap_tensors(weights):
    return {**{f"net.{n}": w for n, w in weights.items()}, "b.c": torch.zeros(1)}


def cut_a_tensor(weights):
    return {n: w[:-1] if n == "blocks.1.mlp.fc1.weight" else w for n, w in weights.items()}


def add_omegaconf(weights):
    return {"teacher": weights, "cfg": OmegaConf.create({"lr": 0.1})}


def wrong_checkpoint(name: str, prepare: Prepare, uri: str, *words: str) -> Fault:
    return Fault(name, prepare, f"{PCA} --layer 1 --checkpoint {uri}", 4, words)


def wrong_dino(name: str, change: Callable[[Any], Any], uri: str, *words: str) -> Fault:
    return wrong_checkpoint(name, partial(save_dino, change=change), uri, *words)


def malicious(name: str, file: str, uri: str, *, zipped: bool = True) -> Fault:
    prepare = partial(write_malicious_pickle, file, zipped=zipped)
    return wrong_checkpoint(f"a malicious {name}", prepare, uri, Path(file).name)


CHECKPOINTS = [
    malicious(".pth", "evil.pth", "evil.pth"),
    malicious("pickle without a zip", "evil.pth", "evil.pth", zipped=False),
    malicious("pickle named safetensors", "evil.safetensors", "evil.safetensors"),
    malicious("encoder of a run", "run/last.safetensors", "run/last.safetensors"),
    malicious(".pth for timm", "evil.pth", f"{TIMM}evil.pth"),
    malicious("pickle without a zip for timm", "evil.pth", f"{TIMM}evil.pth", zipped=False),
    *(wrong_checkpoint(f"a cut .pth: {name}",
                       lambda folder, length=length: cut(save_dino(folder), length),
                       uri, "dino.pth", "again")
      for name, length in CUTS.items()
      for uri in ("dino.pth", *([f"{TIMM}dino.pth"] if name == "half" else []))),
    *(wrong_checkpoint(f"cut safetensors: {name}", partial(cut_encoder, length, is_ours=False),
                       OURS, "again")
      for name, length in CUTS.items()),
    *(wrong_checkpoint(f"our checkpoint is cut: {name}", partial(cut_encoder, CUTS[name]), OURS,
                       "again") for name in ("nothing left", "half")),
    *(wrong_checkpoint(f"a flipped bit at {share}",
                       lambda folder, share=share: flip_a_bit(folder / OURS, share),
                       OURS, word, "again")
      # The bit is in the header, in the middle of the weights, or in the last weight.
      for share, word in ((0.02, OURS), (0.5, "has sha256"), (0.999, "has sha256"))),
    wrong_checkpoint("a flipped bit of a .pth", flip_a_bit_of_dino, "dino.pth", "has sha256",
                     "again"),
    wrong_dino("other objects beside the weights", add_omegaconf, "dino.pth", "omegaconf",
               "safetensors.torch.save_file"),
    wrong_dino("renamed tensors", rename_tensors, "dino.pth", "dino.pth", "26/30 keys fit"),
    wrong_dino("wrapped tensors", wrap_tensors, "dino.pth", "dino.pth"),
    wrong_dino("tensors that timm does not know", rename_tensors, f"{TIMM}dino.pth",
               "does not fit"),
    wrong_dino("a tensor of another shape", cut_a_tensor, "dino.pth", "29/30 keys fit",
               "blocks.1.mlp.fc1.weight (255 x 64, expected 256 x 64)"),
]  # fmt: skip
FAULTS = [
    *(*ARGUMENTS, *PLACES, *IMAGES, *LAYOUTS, *BOXES, *OVERLAPS, *CHECKPOINTS),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_command_reports_a_fault_in_one_line(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)

    # Neither configurations nor checkpoints run code.
    assert not (workdir / "left").exists()
    assert not (workdir / "mark").exists()
    if fault.remedy == ALLOW:
        assert {record.settings["fitted_and_scored"] for record in records()} == {1}


# Runs.

PHOTOS = Path("photos")
RESUME = shlex.join([*make_pretrain_args(PHOTOS, "run", ONE_STEP), "--resume"])
FROM_FIRST = shlex.join(make_pretrain_args(PHOTOS, "second", ONE_STEP, "init_from=first"))
MEAN = "data.mean=[0.48145466,0.4578275,0.40821073]"
SHAPE = ("model.num_heads=3", "model.qkv_bias=False", "model.graying_layers=[0]")
SKIPPING = shlex.join([*make_pretrain_args(PHOTOS, "new"), "--on-bad-image", "skip"])
WITH_LABELS = make_supervised_args(Path("classes"), "labels", ONE_STEP)


def remove_from_state(*names: str) -> Prepare:
    def prepare(folder: Path) -> None:
        state = folder / "run/state.pt"
        whole = part = torch.load(state, weights_only=True)
        for name in names[:-1]:
            part = part[name]
        del part[names[-1]]
        torch.save(whole, state)
        (folder / "run/state.pt.sha256").unlink()

    return prepare


def set_step(step: object, folder: Path) -> None:
    state, _ = load_state(folder / "run", torch.device("cpu"))
    save_state(folder / "run", {**state, "step": step})


def write_malicious_state(folder: Path) -> None:
    state = folder / "run/state.pt"
    pickled_mark(state, folder / "mark", zipped=True)
    state.with_name("state.pt.sha256").write_text(f"{file_sha256(state)}  state.pt\n")


def change_an_image(folder: Path) -> None:
    picture(77).save(folder / "photos/0.jpg", quality=50)


def move_an_image_to_another_class(folder: Path) -> None:
    root = class_folders(folder / "classes")
    assert main(WITH_LABELS) == 0
    (root / "train/dog/2.jpg").rename(root / "train/cat/9.jpg")


def spoil_all_photos(folder: Path) -> None:
    for path in (folder / "photos").iterdir():
        corrupt_file(path, "half")


def first_run(*settings: str) -> Prepare:
    def prepare(_: Path) -> None:
        assert main([*make_pretrain_args(PHOTOS, "first", ONE_STEP), *settings]) == 0

    return prepare


RUNS = [
    *(Fault(f"a state without {name}", remove_from_state(name), RESUME, 4,
            (f"ssl-bench: run/state.pt lacks '{name}'",))
      for name in ("configuration", "left_out", "optimizer")),
    *(Fault(f"a state without {'.'.join(names)}", remove_from_state(*names), RESUME, 4,
            ("run/state.pt", names[-1]))
      for names in (["learner", "center"], ["optimizer", "state"])),
    *(Fault(f"a state with step {step!r}", partial(set_step, step), RESUME, 4,
            ("run/state.pt", f"{step!r}"), "--overwrite` or `--out FOLDER")
      for step in (-3, "7", None, 1000)),
    Fault("an empty state", lambda folder: corrupt_file(folder / "run/state.pt", "empty"), RESUME,
          4, "state.pt", "--overwrite"),
    Fault("a malicious state", write_malicious_state, RESUME, 4, "state.pt"),
    Fault("other images", change_an_image, RESUME, 2, "image_files: "),
    Fault("other classes", move_an_image_to_another_class,
          shlex.join([*WITH_LABELS, "--resume"]), 2, "image_files: "),
    Fault("a folder with a run", do_nothing, RESUME.replace(" --resume", ""), 2, "run",
          "--resume` continues it, `--overwrite"),
    Fault("another configuration", do_nothing,
          f"{RESUME} train.max_steps=7 model.depth=3 train.num_workers=1 optimizer.lr=0.1", 2,
          ("model.depth: 2 -> 3", "train.max_steps: 6 -> 7", "optimizer.lr")),
    Fault("another precision", do_nothing, f"{RESUME} train.precision=bfloat16", 2,
          "train.precision: "),
    Fault("a longer run", do_nothing, f"{RESUME} train.max_steps=8", 2, "max_steps", "--extend",
          remedy="--extend"),
    Fault("initial weights with another mean", first_run(MEAN), FROM_FIRST, 2, hint=MEAN,
          remedy=MEAN),
    Fault("initial weights of another architecture", first_run("model.graying=dct", *SHAPE),
          FROM_FIRST, 2, SHAPE, remedy=f"model.graying=dct {' '.join(SHAPE)}"),
    Fault("no readable image", spoil_all_photos, SKIPPING, 3, "none of the 4 images"),
]  # fmt: skip


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("fault", RUNS, ids=lambda fault: fault.name)
def test_a_run_with_a_fault_is_not_continued(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)

    assert not (workdir / "mark").exists()
