"""Sum the log-normalisers of pixels in one Triton kernel, and compute the gradient.

The log-normaliser of a pixel is the logsumexp of its upsampled class logits. The kernel bilinearly
upsamples the logits of patches in registers, once for the log-normalisers and once for the
gradient. The kernel never writes upsampled logits to memory.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# Number of pixels in one program. Their logits and running sums fit into registers.
_PIXELS_OF_PROGRAM = 1024


def sum_with_kernel(
    padded: Float[Tensor, "heads classes batch tall wide"],
    pixel_weights: Float[Tensor, "pixels batch cell_rows cell_cols"],
    weights: Float[Tensor, "pixels 4"],
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "4 heads classes batch cell_rows cell_cols"]]:
    """For each head, sum the log-normalisers of pixels with Triton, and compute the gradient.

    The log-normaliser of a pixel is the logsumexp of its upsampled class logits.

    Args:
        padded: Logits of the patches in float32. The patches at the edge of the grid are repeated
            once beyond it.
        pixel_weights: Weight of each pixel of each cell in the sum. A cell is the area between four
            patch centers.
        weights: Bilinear weights of the four patches at the corners of a cell, for each of its
            pixels.

    Returns:
        The weighted sum for each head, and its gradients with respect to the logits at the four
        corners of each cell. A patch is a corner of several cells, and its gradients in these cells
        are not added up.
    """
    heads, classes, images, tall, wide = padded.shape
    padded, pixel_weights, weights = (
        padded.contiguous(),
        pixel_weights.contiguous(),
        weights.to(padded),
    )
    cells = images * (tall - 1) * (wide - 1)
    sums = padded.new_empty(heads, cells)
    by_corner = padded.new_empty(4, heads, classes, images, tall - 1, wide - 1)
    # The length of a range in Triton must be a power of two.
    pixels_in_registers = triton.next_power_of_2(len(weights))
    cells_of_program = max(1, _PIXELS_OF_PROGRAM // pixels_in_registers)
    # Triton starts kernels on the current device.
    with torch.cuda.device_of(padded):
        _kernel[(triton.cdiv(cells, cells_of_program), heads)](
            padded, pixel_weights, weights, sums, by_corner, len(weights), classes, images, tall,
            wide, cells_of_program, pixels_in_registers,
        )  # fmt: skip
    return sums.sum(1), by_corner


@triton.jit
def _upsample(logits, corners, wide, is_cell, w0, w1, w2, w3):
    """Return the upsampled logits of one class, with cells as rows and their pixels as columns.

    A cell is the area between four patch centers. `corners` are the memory offsets of the patches
    at the upper left corners of the cells. `wide` is the number of patches in a row of the padded
    grid. w0 to w3 are the bilinear weights of the four corners.
    """
    upper_left = tl.load(logits + corners, is_cell, 0.0)[:, None]
    upper_right = tl.load(logits + corners + 1, is_cell, 0.0)[:, None]
    lower_left = tl.load(logits + corners + wide, is_cell, 0.0)[:, None]
    lower_right = tl.load(logits + corners + wide + 1, is_cell, 0.0)[:, None]
    return upper_left * w0 + upper_right * w1 + lower_left * w2 + lower_right * w3


# Without this option, Triton compiles again for values that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["pixels", "classes", "images", "tall", "wide"])
def _kernel(
    padded, pixel_weights, weights, sums, by_corner,
    pixels, classes, images, tall, wide,
    cells_of_program: tl.constexpr, pixels_in_registers: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    cells_of_image = (tall - 1) * (wide - 1)
    cells = images * cells_of_image
    cell = tl.program_id(0) * cells_of_program + tl.arange(0, cells_of_program)
    is_cell = cell < cells
    image, row = cell // cells_of_image, cell % cells_of_image // (wide - 1)
    corners = (image * tall + row) * wide + cell % (wide - 1)
    pixel = tl.arange(0, pixels_in_registers)
    is_pixel = pixel < pixels
    w0 = tl.load(weights + 4 * pixel, is_pixel, 0.0)[None]
    w1 = tl.load(weights + 4 * pixel + 1, is_pixel, 0.0)[None]
    w2 = tl.load(weights + 4 * pixel + 2, is_pixel, 0.0)[None]
    w3 = tl.load(weights + 4 * pixel + 3, is_pixel, 0.0)[None]
    exists = is_cell[:, None] & is_pixel[None]
    weight = tl.load(pixel_weights + pixel[None] * cells + cell[:, None], exists, 0.0)

    # The sum of exponentials is relative to the largest logit so far.
    first = padded + head * classes * images * tall * wide
    stride = images * tall * wide
    largest = tl.full((cells_of_program, pixels_in_registers), float("-inf"), tl.float32)
    total = tl.zeros((cells_of_program, pixels_in_registers), tl.float32)
    for number in range(classes):
        logits = _upsample(first + number * stride, corners, wide, is_cell, w0, w1, w2, w3)
        larger = tl.maximum(largest, logits)
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
    normaliser = largest + tl.log(total)
    tl.store(sums + head * cells + cell, tl.sum(normaliser * weight, 1), is_cell)

    next_corner = heads * classes * cells
    for number in range(classes):
        logits = _upsample(first + number * stride, corners, wide, is_cell, w0, w1, w2, w3)
        gradient = tl.exp(logits - normaliser) * weight
        out = by_corner + (head * classes + number) * cells + cell
        tl.store(out, tl.sum(gradient * w0, 1), is_cell)
        tl.store(out + next_corner, tl.sum(gradient * w1, 1), is_cell)
        tl.store(out + 2 * next_corner, tl.sum(gradient * w2, 1), is_cell)
        tl.store(out + 3 * next_corner, tl.sum(gradient * w3, 1), is_cell)
