"""Keys that belong to no component: where and how data are read, the seed, the type of numbers."""

from collections.abc import Mapping
from typing import Any, Literal

from omegaconf import DictConfig

from ssl_bench.composition.compose import value_of
from ssl_bench.composition.fields import Bits, Count, Place, Seed, require
from ssl_bench.data.corruptions import KEY as CORRUPT
from ssl_bench.data.files.fingerprints import FingerprintKind

DType = Literal["float32", "float16", "bfloat16"]
"""As torch names them."""
Limit = Count | None
SHARED: Mapping[str, Any] = {
    "data.root": Place,
    "data.fingerprint": FingerprintKind,
    "data.bits": Bits,
    "data.limit": Limit,
    "data.allow_overlap": bool,
    CORRUPT: str | None,
    "seed": Seed,
    "dtype": DType,
}
"""What the keys take that belong to no component."""


def shared_values(config: DictConfig) -> dict[str, Any]:
    """What the keys of `SHARED` hold that are composed; a command on data alone has only those.

    Raises:
        ConfigurationError: one of them takes no such value.
    """
    values = {key: value_of(config, key) for key in SHARED if key.split(".")[0] in config}
    for key, value in values.items():
        require(key, SHARED[key], value)
    return values


def views_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The forms in which `shared_values` ask for a dataset, but for a corruption."""
    return {name: values[f"data.{name}"] for name in ("fingerprint", "bits", "limit")}
