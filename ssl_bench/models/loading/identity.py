"""Who an encoder is, without its weights on any device."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ssl_bench.models.architecture import configured
from ssl_bench.models.encoder import identity_of
from ssl_bench.models.loading.addresses import file_of, name_of
from ssl_bench.models.loading.checkpoint import is_ours, stated_colours, stated_identity
from ssl_bench.models.loading.load import load_encoder


@dataclass(frozen=True)
class EncoderIdentity:
    """What names the cells of an encoder; the fields are those of `Encoder`."""

    uri: str
    name: str
    sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    depth: int

    def identity(self) -> dict[str, Any]:
        """As `Encoder.identity`."""
        return identity_of(self.sha256, self.architecture, (self.mean, self.std))


def identify_encoder(uri: str) -> EncoderIdentity:
    """The identity that `load_encoder(uri)` will have.

    Milliseconds for a checkpoint of ours, whose header and sha256 file say it all; any other is
    loaded and let go again.

    Raises:
        CheckpointError: As `load_encoder`; damaged weights are found only there.
    """
    path = file_of(uri)
    if path.suffix == ".safetensors" and path.is_file() and is_ours(path):
        config, digest = stated_identity(path)
        architecture = configured(config)
        return EncoderIdentity(
            uri, name_of(path), digest, architecture, *stated_colours(path), depth=config.depth
        )
    encoder = load_encoder(uri)
    return EncoderIdentity(
        **{item.name: getattr(encoder, item.name) for item in fields(EncoderIdentity)}
    )
