"""From the description of a linear segmentation to the run with all its parts."""

from collections.abc import Sequence

from probes.features.split import TrainingSplit
from probes.features.tiers.cache import TrainingPass
from probes.features.tiers.room import Room
from probes.features.views import ResizedCrops, ScaledCrops, TrainingViews, WholeImage
from probes.heads.losses import PixelLoss
from probes.heads.sgd import Heads
from probes.segmentation.probe import Segmentation
from probes.segmentation.run import SegmentationRun
from ssl_bench.data.locations import cache_folder
from ssl_bench.data.samples import ImageSet
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor


def prepared(probe: Segmentation, context: ProbeContext) -> SegmentationRun:
    """See `Segmentation.prepared`."""
    train_images = probe.training_images(context.dataset)
    split = TrainingSplit.draw(
        train_images, at_most=probe.train_images, holdout=probe.holdout, seed=context.seed
    )
    training_pass = _training_pass(probe, context, train_images, split.indices)
    val_images, cache = probe.split(context.dataset), cache_folder(probe.cache)
    return SegmentationRun(
        training_pass=training_pass,
        training=probe.training.of_heads(_heads(probe, context, len(val_images.class_names))),
        scoring=probe.inference.of_images(probe.image_size, context.encoder),
        split=split,
        val_images=val_images,
        sources=probe.sources(context.layers),
        refit=probe.training.refit,
        room=Room(probe.tier, probe.memory_gib, probe.disk_gib, cache / "features"),
        kept=cache / "heads",
        keep_minutes=probe.keep_minutes,
        facet=probe.scored_facet,
        folder=context.artifacts,
        names=probe.names(context.seed),
        panels=probe.panels,
    )


def _training_pass(
    probe: Segmentation, context: ProbeContext, images: ImageSet, indices: Sequence[int]
) -> TrainingPass:
    patch = context.encoder.patch_size
    layers = {layer for source in probe.sources(context.layers) for layer in source}
    return TrainingPass(
        extractor=FeatureExtractor(
            context.encoder,
            layers=sorted(layers),
            facets=(probe.scored_facet,),
            device=context.device,
            dtype=context.dtype,
        ),
        facet=probe.scored_facet,
        images=images,
        indices=indices,
        image_size=probe.image_size,
        views=_views(probe, context),
        label_size=_loss(probe, patch).label_size(probe.image_size // patch),
        batch_size=probe.training.batch_size,
        workers=probe.num_workers,
        progress=context.progress,
        say=context.say,
    )


def _heads(probe: Segmentation, context: ProbeContext, classes: int) -> Heads:
    return Heads(
        loss=_loss(probe, context.encoder.patch_size),
        standardize=probe.norm == "standardize",
        classes=classes,
        seed=context.seed,
        device=context.device,
    )


def _loss(probe: Segmentation, patch: int) -> PixelLoss:
    return probe.loss.of_pixels(probe.image_size, patch)


def _views(probe: Segmentation, context: ProbeContext) -> TrainingViews:
    if probe.crops == "resized":
        return ResizedCrops(probe.views, context.seed)
    if probe.crops == "scaled":
        return ScaledCrops(probe.views, context.seed, context.encoder.mean)
    return WholeImage(probe.views)
