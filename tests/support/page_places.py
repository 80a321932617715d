"""A folder in which the commands of the pages find what they name."""

import json
from itertools import product
from pathlib import Path

import numpy as np

from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, build_vit, save_encoder
from tests.support.faults import mask, photo_folder, picture, save_mask, voc
from tests.support.spair import spair

ENCODER = ViTConfig(image_size=32, patch_size=8, dim=12, depth=12, num_heads=2)
MIXER = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
KEPT = ("runs/skip", "runs/skipless", "runs/vit", "RUN")


def furnish(place: Path) -> None:
    """Encoders under the names of the pages, and a few pictures in every layout."""
    for seed, run in enumerate(KEPT):
        for name, epoch in (("epoch0001", 1), ("epoch0002", 2), ("last", 3)):
            told = {"step": str(2 * epoch), "epoch": f"{epoch}.00"}
            model = build_vit(ENCODER, seed=10 * seed + epoch)
            save_encoder(place / run / f"{name}.safetensors", model, told)
    for name, epoch in (("epoch0100", "100.00"), ("epoch0200", "200.00")):
        model = build_vit(ENCODER, seed=int(name[-3:]))
        save_encoder(place / f"RUN/{name}.safetensors", model, {"step": "9", "epoch": epoch})
    save_encoder(place / "mixer/last.safetensors", build_encoder(MIXER, seed=0), {})
    save_encoder(place / "FILE.safetensors", build_vit(ENCODER, seed=99), {})
    for root in ("data", "data/voc", "part"):
        voc(place / root)
    ade = ("images", "annotations", "training,validation")
    for root in ("data", "data/ade"):
        _pairs(place / root / "ADEChallengeData2016", *ade)
    _pairs(place / "data/coco", "images", "stuffthingmaps", "train2017,val2017")
    _pairs(place / "DIR", "images", "masks", "train,val", numbers=(0, 1), suffix=".png")
    _coco20k(place / "data/coco")
    _ecssd(place / "data/ecssd")
    _pairs(place / "my_masks", "images", "masks", "train,val", numbers=(0, 1))
    spair(place / "data/spair")
    for name in ("data/imagenet", "data/tiny_imagenet", "photos", "classes"):
        _classes(place / name, kinds=2, count=101)
    for name in ("data/cifar10", "data/mnist"):
        _classes(place / name, kinds=10, count=2)
    for name in ("my_photos", "coco/val2017", "coco/first_40"):
        (place / name).parent.mkdir(exist_ok=True)
        photo_folder(place / name)


def _classes(root: Path, *, kinds: int, count: int) -> None:
    for number, (split, kind) in enumerate(product(("train", "val"), range(kinds))):
        (root / split / f"class{kind}").mkdir(parents=True)
        for image in range(count):
            path = root / split / f"class{kind}/{image}.jpg"
            picture(1000 * number + image).save(path, quality=95)


def _pairs(
    root: Path,
    images: str,
    masks: str,
    splits: str,
    *,
    numbers: tuple[int, int] = (3, 8),
    suffix: str = ".jpg",
) -> None:
    """Two images a split, with a square of one class on another."""
    for first, split in enumerate(splits.split(",")):
        for folder in (images, masks):
            (root / folder / split).mkdir(parents=True)
        for image in range(2):
            name = f"{2 * first + image:012d}"
            picture(2 * first + image).save(root / images / split / f"{name}{suffix}")
            labels = np.where(mask() == 8, *reversed(numbers)).astype(np.uint8)
            save_mask(root / masks / split / f"{name}.png", labels)


def _ecssd(root: Path) -> None:
    """Two images with masks of one object, 255 where it is."""
    for folder in ("images", "ground_truth_mask"):
        (root / folder).mkdir(parents=True)
    for number in (0, 1):
        picture(number).save(root / f"images/{number:04d}.jpg")
        save_mask(
            root / f"ground_truth_mask/{number:04d}.png",
            np.where(mask() == 8, 255, 0).astype(np.uint8),
        )


def _coco20k(root: Path) -> None:
    (root / "images/train2014").mkdir(parents=True)
    (root / "annotations").mkdir()
    names = [f"COCO_train2014_{number:012d}.jpg" for number in (7, 9)]
    for number, name in enumerate(names):
        picture(number).save(root / "images/train2014" / name)
    (root / "coco_20k_filenames_subset.txt").write_text("\n".join(names))
    boxes = [{"id": n, "image_id": n, "bbox": [8, 8, 16, 16], "iscrowd": 0} for n in (7, 9)]
    content = {"images": [{"id": 7}, {"id": 9}], "annotations": boxes}
    (root / "annotations/instances_train2014.json").write_text(json.dumps(content))
