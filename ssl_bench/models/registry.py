"""Find encoders and parts of their blocks by the names in configurations and checkpoints.

A name of ssl-bench itself has an import path in `_BUILT_IN`. Its module is imported when the name
is first used. Installed packages add names with entry points (docs/extending.md).
"""

from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Annotated, Any

from torch import nn

from ssl_bench.composition.choices import entry_points, load_entry_point
from ssl_bench.errors import ConfigurationError

_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    # Subclasses of `EncoderConfig`, by their `kind`.
    "model": {
        "vit": "config:ViTConfig",
        "conv_mixer": "convolutional:ConvMixerConfig",
        "convnext": "convolutional:ConvNeXtConfig",
        "timm": "timm_config:TimmConfig",
        "state_space": "state_space:StateSpaceConfig",
    },
    # Functions from a configuration to a module, by the value of the field with the group's name.
    "attention": {
        "softmax": "vit:Attention.from_config",
        "linear": "orthogonal:LinearAttention.from_config",
        "osa_qr": "orthogonal:OrthogonalAttention.from_config",
        "osa_newton_schulz": "orthogonal:OrthogonalAttention.from_config",
    },
    "graying": {
        "none": "vit:no_graying",
        "svd": "graying:TokenGraying.from_config",
        "dct": "graying:TokenGraying.from_config",
    },
}


def registered_names(group: str) -> list[str]:
    """Return all names in the group "model", "attention" or "graying"."""
    return [*_BUILT_IN[group], *entry_points(group)]


def find_registered(group: str, name: str) -> Any:
    """Import and return the class or function that has a name.

    Raises:
        ConfigurationError: The group does not contain the name.
        BrokenFile: The module of an installed package cannot be imported.
    """
    if address := _BUILT_IN[group].get(name):
        module, _, attribute = address.partition(":")
        return attrgetter(attribute)(import_module(f"ssl_bench.models.{module}"))
    if name in (points := entry_points(group)):
        return load_entry_point(points[name])
    expected = " or ".join(registered_names(group))
    raise ConfigurationError(f"expected {expected}, got {name!r} as the name of a {group}")


def build_part(group: str, config: Any) -> nn.Module:
    """Build the attention or the graying that a configuration names."""
    return find_registered(group, getattr(config, group))(config)


class RegisteredName:
    """A rule that accepts the names in a group."""

    def __init__(self, group: str) -> None:
        self.group = group

    def contains(self, value: str) -> bool:
        return value in _BUILT_IN[self.group] or value in entry_points(self.group)

    def __str__(self) -> str:
        return " or ".join(registered_names(self.group))


AttentionKind = Annotated[str, RegisteredName("attention")]
GrayingKind = Annotated[str, RegisteredName("graying")]
