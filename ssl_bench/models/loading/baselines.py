"""Load untrained baselines: encoders with initial weights, and the raw colours of patches."""

import re
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.encoder import (
    Encoder,
    WeightsInfo,
    build_encoder,
    encoder_from_model,
    state_dict_sha256,
)
from ssl_bench.models.loading.load import load_encoder
from ssl_bench.models.vit import EncoderModule, VisionTransformer, build_vit

_SEED = 0
_NATIVE_SIZE = 224
_LARGEST_PATCH = 256


def load_random(uri: str) -> Encoder:
    """Load the baseline `random:URI`: the encoder at URI with random initial weights.

    The weights are drawn with seed 0. Encoders of this suite and timm encoders are initialised as
    for training. Encoders from other weights files get this suite's default initialisation. The
    mean and standard deviation of the images do not change.

    Raises:
        CheckpointError: The initialisation of the encoder is unknown.
    """
    trained = load_encoder(uri.partition(":")[2])
    normalization = (trained.mean, trained.std)
    if isinstance(trained.module, EncoderModule):
        if isinstance(trained.module, VisionTransformer):
            grid_size = trained.module.grid_size
            model = build_vit(trained.module.config, seed=_SEED, grid_size=grid_size)
            model.position_margin = trained.module.position_margin
        else:
            model = build_encoder(trained.module.config, seed=_SEED)
        for drawn, original in zip(model.modules(), trained.module.modules(), strict=True):
            if isinstance(drawn, nn.LayerNorm) and isinstance(original, nn.LayerNorm):
                drawn.eps = original.eps
        return encoder_from_model(
            model,
            name=f"{trained.name} (random)",
            uri=uri,
            normalization=normalization,
            normalization_source=trained.normalization_source,
        )
    # timm takes seconds to import.
    from ssl_bench.models.loading.timm_encoder import load_timm
    from ssl_bench.models.timm_model import TimmBackbone

    if not isinstance(trained.module, TimmBackbone):
        raise CheckpointError(
            f"{uri}: the initialisation of this encoder is unknown. Write a Python file with a "
            "function that returns the untrained module",
            hint=("--checkpoint", "{file}.py:{name}"),
        )
    drawn = load_timm(f"timm:{trained.architecture['name']}")
    if drawn.architecture != trained.architecture:
        raise CheckpointError(
            f"{uri}: the architecture of {trained.uri} differs from timm's "
            f"{trained.architecture['name']}, so its initialisation is unknown",
            hint=("--checkpoint", "timm:{timm_name}"),
        )
    return replace(
        drawn,
        uri=uri,
        mean=trained.mean,
        std=trained.std,
        normalization_source=trained.normalization_source,
    )


class ColourPatches(nn.Module):
    """Baseline encoder without weights, whose patch tokens contain the colours of the pixels.

    It has a single block. The [CLS] token is the mean of all patch tokens. Queries, keys and values
    equal the tokens, so that probes can use any of these features.
    """

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.blocks = nn.ModuleList([_IdentityBlock()])
        self.norm = nn.Identity()

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """Return the [CLS] token of each image, which is the mean of its patch tokens.

        The width `dim` is 3 * patch_size ** 2, one number for each colour of each pixel.
        """
        patches = F.unfold(images, self.patch_size, stride=self.patch_size).transpose(1, 2)
        tokens = torch.cat([patches.mean(1, keepdim=True), patches], 1)
        return self.norm(self.blocks[0](tokens))[:, 0]


class _IdentityBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": _RepeatThrice()})

    def forward(self, tokens: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        self.attn["qkv"](tokens)
        return tokens


class _RepeatThrice(nn.Module):
    def forward(self, tokens: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch three_dims"]:
        return tokens.repeat(*[1] * (tokens.ndim - 1), 3)


def load_colours(uri: str) -> Encoder:
    """Load the raw-colour baseline `colours:PATCH`, where PATCH is the patch size in pixels."""
    size = uri.removeprefix("colours:")
    if not re.fullmatch(r"[0-9]{1,3}", size) or not 1 <= int(size) <= _LARGEST_PATCH:
        raise CheckpointError(
            f"expected colours:PATCH with a side of 1 to {_LARGEST_PATCH} pixels, got {uri!r}",
            hint=("--checkpoint", "colours:16"),
        )
    patch_size = int(size)
    module = ColourPatches(patch_size).eval()
    # The multiple of the patch size that is nearest to 224.
    side = max(1, round(_NATIVE_SIZE / patch_size)) * patch_size
    return Encoder(
        module=module,
        name=f"colours of {patch_size} x {patch_size} pixels",
        uri=uri,
        sha256=state_dict_sha256(module),
        architecture={"kind": "colours", "patch_size": patch_size},
        patch_size=patch_size,
        depth=1,
        dim=3 * patch_size**2,
        num_heads=0,
        num_prefix_tokens=1,
        native_size=(side, side),
        weights_info=WeightsInfo("colours"),
    )
