"""How many images datasets have as published, and names of what has other numbers."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from ssl_bench.errors import ConfigurationError

PUBLISHED: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "voc2012": {"train": 1464, "val": 1449, "discovery": 11540},
        "voc2007": {"train": 209, "val": 213, "discovery": 5011},
        "ade20k": {"train": 20210, "val": 2000},
        "coco_stuff": {"train": 118287, "val": 5000},
        "coco20k": {"discovery": 19817},
        "cityscapes": {"train": 2975, "val": 500},
        "camvid": {"train": 367, "val": 101},
        "ecssd": {"val": 1000},
        # Pairs of its split test, and all pictures.
        "spair71k": {"val": 12234, "images": 1800},
    }
)


def name_of_images(name: str, found: Mapping[str, Collection[str]]) -> str:
    """The name of a dataset of which these ids are there: NAME itself, or NAME-N for N images.

    Other images in a dataset's layout are another benchmark, and must not pass for it. N counts
    all of them, whatever share of them is trained on or scored, as the split says.

    Args:
        name: As it is published.
        found: By role, before any share is cut; a role that is not there is no difference.
    """
    published = PUBLISHED.get(name, {})
    if all(len(ids) == published.get(role, len(ids)) for role, ids in found.items()):
        return name
    return f"{name}-{len(set().union(*found.values()))}"


def require_own_name(name: str) -> None:
    """Refuse a name that stands for published images, of images that nobody can count.

    Raises:
        ConfigurationError: the name is one of these.
    """
    if name in PUBLISHED:
        raise ConfigurationError(
            f"dataset.name expects a name of your own for your images, got {name!r}, which stands "
            "for a published set; take another"
        )
