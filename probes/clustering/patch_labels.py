"""Classes of the pixels under patches, and how often they meet clusters in each image."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer, UInt8
from scipy.sparse import csr_array

from probes.clustering.agreement import Met
from ssl_bench.scores import IGNORED


@dataclass(frozen=True, eq=False)
class PatchLabels:
    """How many pixels of a class lie under a patch, for all pairs that meet.

    Attributes:
        patches: Row by row; of several images one image after the other.
    """

    patches: Int64[np.ndarray, " pairs"]
    classes: Int64[np.ndarray, " pairs"]
    pixels: Int64[np.ndarray, " pairs"]

    @classmethod
    def of_mask(
        cls, mask: UInt8[np.ndarray, "height width"], rows: int, cols: int
    ) -> "PatchLabels":
        """Of one image, at the size of its mask: each pixel lies under the patch over its middle.

        Pixels of class 255 lie under none.
        """
        down, across = (
            (2 * np.arange(length) + 1) * cells // (2 * length)
            for length, cells in zip(mask.shape, (rows, cols), strict=True)
        )
        cells = (down[:, None] * cols + across) * (IGNORED + 1) + mask
        counts = np.bincount(cells.ravel(), minlength=rows * cols * (IGNORED + 1))
        counts = counts.reshape(rows * cols, IGNORED + 1)[:, :IGNORED]
        patches, classes = counts.nonzero()
        return cls(patches, classes, counts[patches, classes].astype(np.int64))

    @classmethod
    def joined(cls, images: Sequence["PatchLabels"], patches: int) -> "PatchLabels":
        """Of all images, each of so many patches."""
        return cls(
            np.concatenate([one.patches + patches * n for n, one in enumerate(images)]),
            np.concatenate([one.classes for one in images]),
            np.concatenate([one.pixels for one in images]),
        )


@dataclass(frozen=True, eq=False)
class Meetings:
    """Pixels by cluster and class, of all images and of each.

    Attributes:
        by_image: A row for each image, cluster * classes + class along it.
    """

    met: Met
    by_image: csr_array

    @classmethod
    def of(
        cls,
        labels: PatchLabels,
        clusters: Integer[np.ndarray, "images patches"],
        num_clusters: int,
        num_classes: int,
    ) -> "Meetings":
        cells = clusters.ravel()[labels.patches].astype(np.int64) * num_classes + labels.classes
        images = labels.patches // clusters.shape[1]
        shape = (len(clusters), num_clusters * num_classes)
        by_image = csr_array((labels.pixels, (images, cells)), shape=shape)
        met = np.asarray(by_image.sum(0)).reshape(num_clusters, num_classes)
        return cls(met, by_image)
