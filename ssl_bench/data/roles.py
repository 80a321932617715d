"""What layouts have in common: their roles, where they lie, how many images were published."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ssl_bench.composition.choices import config_names
from ssl_bench.composition.fields import check_fields
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.paths import expand_path

OFFERED = {
    "segmentation": "masks",
    "classification": "class labels",
    "correspondence": "pairs with points",
    # A folder of pictures has the first as well: objects can be looked for and shown.
    "discovery": "boxes",
    "boxes": "boxes",
    "saliency": "masks of one object",
    "images": "images",
}
"""What a dataset holds that has a role."""

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
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")


class Layout:
    """A dataset on disk: asked for a role that it does not have it says who has it.

    Of a dataclass every field is held to its type.
    """

    # A text, of some a property.
    name: Any

    def __post_init__(self) -> None:
        if is_dataclass(self):
            check_fields(self, "dataset")

    def train(self) -> ImageSet:
        raise lacking(self.name, "segmentation")

    def val(self) -> ImageSet:
        raise lacking(self.name, "segmentation")

    def discovery(self) -> ImageSet:
        raise lacking(self.name, "discovery")


def lacking(dataset: str, role: str) -> DataError:
    """The error for a role that a dataset does not have."""
    return DataError(
        f"{dataset} has no {OFFERED[role]}; datasets for {role}: {', '.join(datasets_with(role))}"
    )


def datasets_with(role: str) -> list[str]:
    """Names of the datasets of `configs/dataset` that have a role."""
    # Here, because Hydra takes longer than all that `data list` says.
    from ssl_bench.composition.compose import build, compose_config

    found = []
    for name in config_names("dataset"):
        # One that cannot be built is no answer.
        with suppress(Exception):
            # What it offers may hang on what its file says.
            dataset = build(compose_config("data", [f"dataset={name}"]), "dataset")
            found += [name] if role in dataset.supports else []
    return sorted(found)


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
    """Refuse a name that stands for published images, of images that nobody can count."""
    if name in PUBLISHED:
        raise ConfigurationError(
            f"dataset.name expects a name of your own for your images, got {name!r}, which stands "
            "for a published set; take another"
        )


def find_root(
    root: str | Path | None,
    *,
    name: str,
    inside: Sequence[str],
    landmarks: Sequence[str],
    tree: str,
) -> Path:
    """The folder of a dataset: the given one, or one of those that may be `inside` it.

    The first is taken that holds at least one of the `landmarks`; `tree` tells the user, on one
    line, what should be there.

    Raises:
        DataError: nothing was given, or no candidate holds a landmark.
    """
    expected = f"expected {tree}; docs/data.md says where to get it"
    if root is None:
        raise DataError(
            f"{name} lies in a folder that you name: {expected}", hint=("--data-root", "{folder}")
        )
    given = given_folder(root)
    for folder in (given, *(given / part for part in inside)):
        if any((folder / landmark).is_dir() for landmark in landmarks):
            return folder
    problem = "does not hold" if given.is_dir() else "is not a folder with"
    raise DataError(f"{given} {problem} {name}: {expected}")


def given_folder(root: str | Path) -> Path:
    """The path of a dataset as it was typed, unless it is that of an archive."""
    path = expand_path(root)
    if path.name.lower().endswith(_ARCHIVES) and not path.is_dir():
        command = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        raise DataError(f"expected a folder, got the archive {path}; unpack it: {command} {path}")
    return path


def first_folder(candidates: Sequence[Path]) -> Path:
    """The first of several usual places that exists; one has to."""
    for folder in candidates:
        if folder.is_dir():
            return folder
    names = " or ".join(str(folder) for folder in candidates)
    raise DataError(f"expected the folder {names}; docs/data.md shows the layout")
