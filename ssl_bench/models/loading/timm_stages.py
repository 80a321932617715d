"""timm's encoders whose blocks differ in grid and width, and CaiT, whose [CLS] comes last."""

from dataclasses import replace
from typing import Any

import timm
from timm.models.cait import Cait

from ssl_bench.models.architecture import of_library
from ssl_bench.models.encoder import Contents, Encoder
from ssl_bench.models.timm_anatomy import STAGED, shape_of_model
from ssl_bench.models.timm_model import TimmBackbone

Staged = (*STAGED, Cait)


def staged_encoder(model: Any, *, uri: str, name: str, sha256: str) -> Encoder:
    """Freeze such a model of timm; images of other sizes than its own are taken too."""
    published: Any = model.pretrained_cfg
    published.pop("state_dict", None)
    architecture = published.get("architecture", type(model).__name__)
    if isinstance(model, Cait):
        # Its positions are resized instead.
        patch_embed: Any = model.patch_embed
        patch_embed.strict_img_size = False
    shape = shape_of_model(model)
    described = of_library(model, "timm", architecture)
    return Encoder(
        module=TimmBackbone(model).eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256,
        architecture={**described, "strides": list(shape.strides)},
        patch_size=shape.strides[0],
        depth=len(shape.strides),
        dim=shape.widths[-1],
        num_heads=shape.num_heads,
        num_prefix_tokens=shape.num_prefix_tokens,
        native_size=tuple(published["input_size"][1:]),
        mean=tuple(published["mean"]),
        std=tuple(published["std"]),
        colours_from=f"timm's {architecture}",
        contents=Contents("timm", f"timm {timm.__version__}"),
        strides=shape.strides,
        widths=shape.widths,
        channels_last=shape.channels_last,
    )


def with_file(encoder: Encoder, keys: tuple[int, int], contents: Contents | None) -> Encoder:
    """The same encoder, of which `keys` weights of a file were used."""
    return replace(
        encoder, loaded_keys=keys[0], total_keys=keys[1], contents=contents or encoder.contents
    )
