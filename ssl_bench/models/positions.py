"""Position embeddings: made, and resized to another number of patches."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ssl_bench.system.device import float64_device

_TEMPERATURE = 10_000.0
# Official DINO adds it to the wanted size so that rounding down cannot lose a row. It also enters
# the sampling positions, so leaving it out changes every feature.
DINO_MARGIN = 0.1
_A = -0.75


def sinusoidal_positions(rows: int, cols: int, dim: int) -> Float[Tensor, "patches {dim}"]:
    """Sine and cosine of the column, then of the row, each over dim / 4 frequencies.

    Source: Chen et al., "An empirical study of training self-supervised vision transformers",
    https://arxiv.org/abs/2104.02057.
    """
    quarter = dim // 4
    frequencies = _TEMPERATURE ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequencies for axis in (col, row)]
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat(waves, dim=1).float()


def resize_positions(
    positions: Float[Tensor, "1 tokens dim"],
    *,
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    margin: float = DINO_MARGIN,
) -> Float[Tensor, "1 new_tokens dim"]:
    """Resize the patch part of a position embedding; what stands before it stays.

    Args:
        positions: The last rows * cols of `old_size` belong to the patches.
        old_size: Rows and columns that are stored.
        new_size: Rows and columns that are wanted.
        margin: Added to them in the scale factor; transformers adds nothing.

    Source: `interpolate_pos_encoding` of facebookresearch/dino, vision_transformer.py: bicubic,
    scale factor (n + .1) / n0, no antialiasing.
    """
    if new_size == old_size:
        return positions
    num_patches = old_size[0] * old_size[1]
    prefix, patches = positions[:, :-num_patches], positions[:, -num_patches:]
    scale = [(new + margin) / old for new, old in zip(new_size, old_size, strict=True)]
    image = patches.unflatten(1, old_size).permute(0, 3, 1, 2)  # 1 dim rows cols
    if torch.are_deterministic_algorithms_enabled():
        # The same to rounding; the gradient of `F.interpolate` on CUDA is summed in any order.
        by_row, by_col = (
            _bicubic_weights(old, new, factor, float64_device(image.device)).to(image)
            for old, new, factor in zip(old_size, new_size, scale, strict=True)
        )
        resized = by_row @ image @ by_col.T
    else:
        resized = F.interpolate(image, scale_factor=scale, mode="bicubic")
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def _bicubic_weights(
    old: int, new: int, scale: float, device: torch.device
) -> Float[Tensor, "{new} {old}"]:
    """What each old place gives to each new one along one side; the edge goes on outside.

    Source: Keys, "Cubic convolution interpolation for digital image processing", 1981, equation 4
    with a = -.75, the value of torch and OpenCV.
    """
    source = (torch.arange(new, dtype=torch.float64, device=device) + 0.5) / scale - 0.5
    around = source.floor()[:, None] + torch.arange(-1, 3, device=device)
    distance = (source[:, None] - around).abs()
    near = ((_A + 2) * distance - (_A + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _A - 4 * _A
    weights = torch.where(distance <= 1, near, far)
    places = around.long().clamp(0, old - 1)
    nothing = weights.new_zeros(new, old)
    return nothing.scatter_add(1, places, weights)
