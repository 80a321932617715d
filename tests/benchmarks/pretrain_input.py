"""Images a second and a core: the official input of DINO, restated, against ours.

    python -m tests.benchmarks.pretrain_input --data FOLDER

The official structure, as published: one PIL image at a time, ten random resized crops of it, and
for each of them flip, colour jitter, grey, blur, solarize, to tensor and normalise by torchvision
on the CPU. Ours: decode, draw all random numbers, crop to 8 bits; the device does the rest. Both
read the same files in turns, with one thread, up to the stacked batch. Seconds are CPU time, so
that what else runs on the machine hardly matters.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms

from pretrain.crops.multi import MultiCrop
from pretrain.options import DataOptions
from pretrain.runtime.batches import Batches, Share, sample_generator
from ssl_bench.data.samples import ImageSet
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD
from tests.benchmarks.provenance import provenance

BATCH = 32
SIZES = {"224": (224, 96), "64": (64, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description="official input of DINO against ours")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--sizes", default="224,64", help="sides of the large crops, of 224 and 64")
    parser.add_argument("--rounds", type=int, default=20, help="batches of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance())
    print(f"one core, CPU time, medians over {options.rounds} batches of {BATCH}")
    print("| crops | official, images/s | ours, images/s | ratio | decode / draw / crop, us |")
    print("|---|---|---|---|---|")
    for name in options.sizes.split(","):
        print(compare(options.data, SIZES[name], options.rounds), flush=True)


def compare(folder: Path, sizes: tuple[int, int], rounds: int) -> str:
    """Read the same batches both ways, the one right after the other."""
    images = DataOptions(root=str(folder)).open()
    ours, official = our_batches(images, sizes), OfficialViews(*sizes)
    times, parts = [], []
    for part in range(rounds + 1):
        chosen = [index for _, index, _ in ours.keys(part)]
        files = [folder / images.ids[index] for index in chosen]
        times.append((seconds(lambda f=files: official(f)), seconds(lambda p=part: ours[p])))
        parts.append(split(ours, chosen, sizes))
    # The first round fills the caches.
    theirs, own = (median(column) for column in zip(*times[1:], strict=True))
    ratio = median(one / other for one, other in times[1:])
    shares = " / ".join(
        f"{1e6 / BATCH * median(column):.0f}" for column in zip(*parts[1:], strict=True)
    )
    large, small = sizes
    speeds = f"{BATCH / theirs:.0f} | {BATCH / own:.0f} | {ratio:.1f}"
    return f"| 2 x {large} + 8 x {small} | {speeds} | {shares} |"


def our_batches(images: ImageSet, sizes: tuple[int, int]) -> Batches:
    crops = MultiCrop()

    def cut(images: list, generators: list) -> object:
        return crops.cut(images, generators, sizes)

    return Batches(images, cut, Share(BATCH), seed=0)


def split(ours: Batches, chosen: Sequence[int], sizes: tuple[int, int]) -> tuple[float, ...]:
    """Seconds of a batch for reading, drawing, and the rest of cutting."""
    crops = MultiCrop()
    samples = [ours.images[index] for index in chosen]
    image_sizes = np.array([sample.image.shape[:2] for sample in samples])

    def generators() -> list[np.random.Generator]:
        return [sample_generator(0, 0, index) for index in chosen]

    decode = seconds(lambda: [ours.images[index] for index in chosen])
    drawing = seconds(lambda: crops.draw(generators(), image_sizes))
    cutting = seconds(lambda: crops.cut(samples, generators(), sizes))
    return decode, drawing, cutting - drawing


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class OfficialViews:
    """The augmentation as it was published, image by image and crop by crop."""

    def __init__(self, large: int, small: int) -> None:
        recipe = MultiCrop()
        first, second, local = (
            _looks(blur, solarize)
            for blur, solarize in zip(
                recipe.blur_probability, recipe.solarize_probability, strict=True
            )
        )
        self.views = [
            transforms.Compose([_resized_crop(large, recipe.global_scale), first]),
            transforms.Compose([_resized_crop(large, recipe.global_scale), second]),
            *[transforms.Compose([_resized_crop(small, recipe.local_scale), local])]
            * recipe.num_locals,
        ]

    def __call__(self, files: Sequence[Path]) -> list[torch.Tensor]:
        samples = []
        for path in files:
            with path.open("rb") as file:
                image = Image.open(file).convert("RGB")
            samples.append([view(image) for view in self.views])
        return [torch.stack(views) for views in zip(*samples, strict=True)]


def _resized_crop(size: int, scale: Sequence[float]) -> Callable:
    bicubic = transforms.InterpolationMode.BICUBIC
    return transforms.RandomResizedCrop(size, (scale[0], scale[1]), interpolation=bicubic)


def _looks(blur_probability: float, solarize_probability: float) -> Callable:
    jitter = transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)
    return transforms.Compose(
        [
            transforms.RandomHorizontalFlip(0.5),
            transforms.RandomApply([jitter], 0.8),
            transforms.RandomGrayscale(0.2),
            _sometimes(blur_probability, _blurred),
            _sometimes(solarize_probability, ImageOps.solarize),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def _sometimes(probability: float, change: Callable[[Image.Image], Image.Image]) -> Callable:
    return lambda image: change(image) if random.random() < probability else image


def _blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


if __name__ == "__main__":
    main()
