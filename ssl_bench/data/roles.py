"""Which dataset can do what."""

import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ssl_bench.composition.fields import check_fields
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError

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
    """Names of this package's datasets that have a role, found by looking at its files."""
    names = set()
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "layouts")]):
        for adapter in vars(import_module(f"ssl_bench.data.layouts.{module.name}")).values():
            # What it offers may hang on its fields.
            if is_dataclass(adapter) and hasattr(adapter, "supports"):
                dataset: Any = adapter()  # type: ignore[operator]
                names |= {dataset.name} if role in dataset.supports else set()
    return sorted(names)
