"""Patches of a training set that are remembered: which have labels, their features and classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float16, Int64, UInt8
from torch import Tensor

from probes.features.labels import label_histograms
from probes.features.tiers import TrainingPass
from ssl_bench.scores import IGNORED
from ssl_bench.system.transfers import fetched, sent


@dataclass(frozen=True)
class PatchMemory:
    """Remembered patches, in the order of the images.

    Attributes:
        features: As float16, in host memory.
        shares: Of each class among the labelled pixels of the patch.
    """

    features: Float16[Tensor, "layers memory dim"]
    shares: Float[Tensor, "memory classes"]


def labelled_patches(training_pass: TrainingPass, patch: int) -> Int64[Tensor, " labelled"]:
    """Patches with a labelled pixel, counted over all entries; from one pass over the labels."""
    side = training_pass.label_size // patch
    entries = len(training_pass.indices) * training_pass.views.count
    found = torch.empty(entries, side, side, dtype=torch.bool)

    def look(some: Sequence[int], labels: UInt8[Tensor, "some height width"]) -> None:
        found[list(some)] = is_labelled(labels, patch)

    training_pass.read_labels(look)
    return found.flatten().nonzero()[:, 0]


def is_labelled(
    labels: UInt8[Tensor, "some height width"], patch: int
) -> Bool[Tensor, "some rows cols"]:
    labelled = (labels != IGNORED).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return labelled.any(4).any(2)


def remembered(
    training_pass: TrainingPass,
    layers: Sequence[int],
    chosen: Int64[Tensor, " memory"],
    classes: int,
) -> PatchMemory:
    """Features and labels of these patches, ascending; only images that have one are encoded.

    Raises:
        CheckpointError: a feature is not finite in float16.
    """
    extractor = training_pass.extractor
    patches = (training_pass.image_size // extractor.patch_size) ** 2
    width = extractor.width(training_pass.facet)
    features = torch.empty(len(layers), len(chosen), width, dtype=torch.float16)
    shares = torch.empty(len(chosen), classes)
    by_batch = list(_by_batch(chosen, patches, training_pass.batch_size))
    read = training_pass.stream(layers, [entries for entries, _ in by_batch], extractor.device)
    shown = training_pass.progress(read, "remembered images", len(by_batch))
    start = 0
    for batch, (_, within) in zip(shown, by_batch, strict=True):
        here = slice(start, start := start + len(within))
        where = sent(within, extractor.device)
        counts = (
            label_histograms(batch.labels, extractor.patch_size, classes).flatten(1)[:, where].T
        )
        found = [batch.features.flatten(1, 3)[:, where], counts]
        features[:, here], counts = fetched(found)
        shares[here] = counts / counts.sum(1, keepdim=True)
    return PatchMemory(features, shares)


def _by_batch(
    chosen: Int64[Tensor, " memory"], patches: int, batch_size: int
) -> Iterator[tuple[Int64[Tensor, " entries"], Int64[Tensor, " some"]]]:
    """Entries that pass the encoder together, and which patches of theirs are remembered."""
    entries, counts = (chosen // patches).unique_consecutive(return_counts=True)
    by_entry = (chosen % patches).split(counts.tolist())
    for first in range(0, len(entries), batch_size):
        some = by_entry[first : first + batch_size]
        within = [patch + number * patches for number, patch in enumerate(some)]
        yield entries[first : first + batch_size], torch.cat(within)
