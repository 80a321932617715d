"""Sheets of PCA maps beside their photographs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from probes.pca.probe import PCA
from probes.pictures import (
    Picture,
    blocks_name,
    heading,
    sheet,
    svg_sheet,
)
from ssl_bench.data.samples import Sample
from ssl_bench.system.naming import image_name

SMALL_SPREAD = 10.0
"""Percent of the mean square; a variance below it is said beside a map."""
_TILES_A_ROW = 13


def draw_tiles(
    pictures: Mapping[int, list[Picture]], samples: Sequence[Sample], folder: Path
) -> None:
    """A picture for each block and image: the map beside its photograph."""
    photographs = _photographs(samples)
    for layer, column in pictures.items():
        for sample, *both in zip(samples, photographs, column, strict=True):
            tiles = [picture.tile() for picture in both]
            sheet([tiles], folder / f"block{layer:02d}" / image_name(sample.image_id))


def draw_overview(
    probe: PCA,
    encoder: str,
    pictures: Mapping[int, list[Picture]],
    samples: Sequence[Sample],
    folder: Path,
) -> None:
    """All blocks of all images on one sheet.

    Args:
        probe: What was drawn.
        encoder: Its name.
        pictures: By block, one an image.
        samples: The images.
        folder: Where the sheet goes.
    """
    of_images = [
        [photograph, *(column[i] for column in pictures.values())]
        for i, photograph in enumerate(_photographs(samples))
    ]
    # Several images in a row where each has few blocks.
    step = max(1, _TILES_A_ROW // (1 + len(pictures)))
    rows = [
        [picture for row in of_images[i : i + step] for picture in row]
        for i in range(0, len(of_images), step)
    ]
    name = blocks_name(list(pictures))
    line = f"{encoder}: {_legend(probe, len(samples))}"
    if "png" in probe.grid_kinds:
        tiles = [[picture.tile() for picture in row] for row in rows]
        sheet([[heading(line)], *tiles], folder / f"{name}.png")
    if "svg" in probe.grid_kinds:
        svg_sheet(rows, folder / f"{name}.svg", line)


def _legend(probe: PCA, num_images: int) -> str:
    """What the colours of the overview are."""
    fitted = {
        "image": "fitted to each image",
        "batch": f"fitted to these {num_images} images",
        "dataset": "fitted to the whole dataset",
    }
    left_out = ", one side of the first component left out" if probe.background != "keep" else ""
    return (
        f"three principal components of {probe.scored_facet} features, "
        f"{fitted[probe.protocol]}{left_out}; above, their share of the variance "
        f"(and the variance in percent of the mean square, where below {SMALL_SPREAD:g})"
    )


def _photographs(samples: Sequence[Sample]) -> list[Picture]:
    """The photographs under their names."""
    return [Picture(sample.image, (sample.image_id,)) for sample in samples]
