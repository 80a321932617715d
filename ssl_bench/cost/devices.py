"""What devices can do, from their makers' sheets."""

import math
from dataclasses import dataclass

import torch

_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
)
_RTX_4090 = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
_LAUNCHES = "https://developer.nvidia.com/blog/cuda-graphs/"

# Best products that were published reach .79 of an H100's sheet (a square of 8,192 or so,
# https://gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405) and .74 of an A100's
# (https://github.com/mli/transformers-benchmarks); those of a ViT-S are narrower. One number for
# all, so that what is wrong with it is wrong everywhere alike.
_ATTAINABLE = 0.7
# QR and eigenvectors are panels of matrix-vector products, bound by memory: a guess.
_ATTAINABLE_FACTORISING = 0.05


@dataclass(frozen=True)
class Device:
    """A device by its rates.

    Attributes:
        bfloat16: FLOP/s of dense products, as `tf32`, `float32` and `float64`.
        bandwidth: Bytes/s of its memory.
        memory: Bytes.
        link: Bytes/s from the host's memory and back, one way.
        launch: Seconds from one operation to the next where they are short.
        wait: Seconds that a wait of the host costs beside the work it waits for.
        attainable: Share of these FLOP/s that products reach, as `attainable_factorising` for QR,
            eigenvectors and singular values.
        functions: Values/s of exponentials and the like, `searches` of picking, `sorts` of
            sorting; a GPU is bound by its memory first.
        source: Where the figures stand, one address or several.
    """

    name: str
    bfloat16: float
    tf32: float
    float32: float
    float64: float
    bandwidth: float
    memory: float
    link: float
    source: str
    # Measured on a V100 for kernels of 2.9 microseconds: 3.8 apart in a row, 9.6 with waits.
    launch: float = 4e-6
    wait: float = 1e-5
    attainable: float = _ATTAINABLE
    attainable_factorising: float = _ATTAINABLE_FACTORISING
    functions: float = math.inf
    searches: float = math.inf
    sorts: float = math.inf

    def peak(self, dtype: torch.dtype | None) -> float:
        """FLOP/s of products of this type; of float32 as torch is set, which is without TF32."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.bfloat16
        if dtype == torch.float64:
            return self.float64
        exact = torch.get_float32_matmul_precision() == "highest"
        return self.float32 if exact else self.tf32


DEVICES: dict[str, Device] = {
    "h100": Device(
        "H100 SXM", 989.4e12, 494.7e12, 66.9e12, 66.9e12, 3.35e12, 80e9, 64e9,
        f"{_H100}, {_LAUNCHES}",
    ),
    "h200": Device(
        "H200 SXM", 989.4e12, 494.7e12, 66.9e12, 66.9e12, 4.8e12, 141e9, 64e9,
        f"{_H200}, {_LAUNCHES}",
    ),
    "a100": Device(
        "A100 SXM 80GB", 312e12, 156e12, 19.5e12, 19.5e12, 2.039e12, 80e9, 32e9,
        f"{_A100}, {_LAUNCHES}",
    ),
    "rtx4090": Device(
        "RTX 4090", 165.2e12, 82.6e12, 82.6e12, 1.29e12, 1.008e12, 24e9, 32e9,
        f"{_RTX_4090}, {_LAUNCHES}",
    ),
}  # fmt: skip
"""By the name that is typed. Sheets give products with sparse weights twice these rates."""
