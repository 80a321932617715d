"""The first images of a set, for probes that look at a few."""

from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext


def first_samples(
    images: ImageSet, at_most: int, context: ProbeContext, *, task: str
) -> list[Sample]:
    """Decode them; where others are left out, say how to have all."""
    count = min(at_most, len(images))
    if count < len(images):
        context.say(
            f"{task}: the first {count} of {len(images)} images; "
            f"probe.num_images={len(images)} takes all"
        )
    return [images[number] for number in range(count)]
