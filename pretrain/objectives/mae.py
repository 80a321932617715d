"""MAE: the encoder sees a part of the patches, and a light decoder paints the others."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pretrain.crops.plain import PlainCrop
from pretrain.objectives.objective import Learner, Objective, Views, part_seed, require_vit
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Depth, OpenFraction, Width, check_fields
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.models import EncoderConfig, VisionTransformer, ViTConfig, build_vit

_EPS = 1e-6
# Below this share of what the mean costs, a decoder has begun to paint.
_LEARNT = 0.99
_STD = 0.02

Images = Float[Tensor, "batch 3 height width"]
Orders = Int64[Tensor, "batch patches"]


@dataclass(frozen=True)
class Mae(Objective):
    """Hyperparameters of MAE.

    The published decoder (512 wide, 8 blocks, 16 heads, for ViT-B and larger) costs as much beside
    a ViT-B of 768 as ours does beside a ViT-S of 384: two thirds of its width, heads of 32.

    Attributes:
        mask_ratio: Share of the patches that the encoder does not see.
        normalised_pixels: Paint every patch with its own mean 0 and deviation 1; the image's
            normalised pixels otherwise.
        gray_decoder: Blocks of the decoder gray their tokens as those of the encoder do.

    Source: https://arxiv.org/abs/2111.06377, and
    https://github.com/facebookresearch/mae/blob/be47fef7a727943547afb0c670cf1b26034c3c89/models_mae.py
    """

    mask_ratio: OpenFraction = 0.75
    decoder_dim: Width = 256
    decoder_depth: Depth = 8
    decoder_heads: Width = 8
    normalised_pixels: bool = True
    gray_decoder: bool = False
    crops: PlainCrop = field(default_factory=PlainCrop)

    def __post_init__(self) -> None:
        check_fields(self, "objective")
        # Sines and cosines of two coordinates share the width.
        if self.decoder_dim % math.lcm(4, self.decoder_heads):
            raise ConfigurationError(
                "objective.decoder_dim must be a multiple of 4 and of objective.decoder_heads = "
                f"{self.decoder_heads}, got {self.decoder_dim}"
            )

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "MaeLearner":
        """An encoder and a decoder; classes are of no interest.

        Raises:
            ConfigurationError: the encoder is no Vision Transformer, or has too few patches.
        """
        del timeline, class_names
        model = require_vit(model, "mae", "others have no patches that can be left out")
        if self.gray_decoder and model.graying == "none":
            raise ConfigurationError(
                "objective.gray_decoder=true grays as the encoder does, got an encoder that does "
                "not",
                hint=("model.graying=svd", "or", "model.graying=dct"),
            )
        num_patches = model.grid_size**2
        # 1 - .9 is a little less than .1, which must not cost a patch.
        num_visible = math.floor(num_patches * (1 - self.mask_ratio) + 1e-9)
        if not 0 < num_visible < num_patches:
            raise ConfigurationError(
                f"objective.mask_ratio={self.mask_ratio} shows {num_visible} of {num_patches} "
                "patches, expected some but not all; change it, or take larger images"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "decoder"))
            decoder = MaeDecoder(model, self, seed=seed)
        network = MaeNetwork(build_vit(model, seed=seed), decoder, num_visible)
        return MaeLearner(self, network)


class MaeDecoder(nn.Module):
    """From the encoder's tokens to the pixels of every patch: blocks as an encoder has them."""

    positions: Tensor

    def __init__(self, encoder: ViTConfig, options: Mae, *, seed: int) -> None:
        super().__init__()
        self.num_prefix_tokens = encoder.num_prefix_tokens
        like = ViTConfig(
            image_size=encoder.image_size,
            patch_size=encoder.patch_size,
            dim=options.decoder_dim,
            depth=options.decoder_depth,
            num_heads=options.decoder_heads,
            position_embedding="sinusoidal",
            graying=encoder.graying if options.gray_decoder else "none",
            graying_exponent=encoder.graying_exponent,
        )
        transformer = build_vit(like, seed=part_seed(seed, "decoder blocks"))
        self.embed = nn.Linear(encoder.dim, like.dim)
        self.mask_token = nn.Parameter(_STD * torch.randn(1, 1, like.dim))
        self.blocks, self.norm = transformer.blocks, transformer.norm
        self.pixels = nn.Linear(like.dim, 3 * like.patch_size**2)
        for linear in (self.embed, self.pixels):
            nn.init.trunc_normal_(linear.weight, std=_STD)
            nn.init.zeros_(linear.bias)
        # Nothing that a checkpoint must keep.
        positions = transformer.pos_embed.detach()[:, 1:]
        self.register_buffer("positions", positions, persistent=False)

    def forward(
        self, tokens: Float[Tensor, "batch visible dim"], order: Orders
    ) -> Float[Tensor, "batch patches values"]:
        """Predicted values of all patches, row by row.

        Args:
            tokens: [CLS] and registers, then the visible patches.
            order: Numbers of all patches, the visible ones first, in the order of their tokens.
        """
        tokens, count = self.embed(tokens), self.num_prefix_tokens
        prefix, visible = tokens[:, :count], tokens[:, count:]
        num_hidden = order.shape[1] - visible.shape[1]
        hidden = self.mask_token.expand(len(tokens), num_hidden, -1)
        patches = take(torch.cat([visible, hidden], dim=1), order.argsort(dim=1))
        x = torch.cat([prefix, patches + self.positions], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.pixels(self.norm(x)[:, count:])


class MaeNetwork(nn.Module):
    """Encoder and decoder."""

    def __init__(self, backbone: VisionTransformer, decoder: MaeDecoder, num_visible: int) -> None:
        super().__init__()
        self.backbone, self.decoder, self.num_visible = backbone, decoder, num_visible

    def forward(self, images: Images, order: Orders) -> Float[Tensor, "batch patches values"]:
        """Predicted values of all patches; the encoder sees the first `num_visible` of `order`."""
        return self.decoder(self.encode(images, order[:, : self.num_visible]), order)

    def encode(
        self, images: Images, visible: Int64[Tensor, "batch visible"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """The encoder's tokens, [CLS] and registers first; other patches never enter a block."""
        tokens, count = self.backbone.embed(images), self.backbone.config.num_prefix_tokens
        x = torch.cat([tokens[:, :count], take(tokens[:, count:], visible)], dim=1)
        for block in self.backbone.blocks:
            x = block(x)
        return self.backbone.norm(x)


class MaeLearner(Learner):
    """A network and its loss."""

    options: Mae
    student: MaeNetwork

    def compilable(self) -> Iterable[nn.Module]:
        return (self.student,)

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Mean squared error over the hidden patches; `views` holds images alone.

        The masks come out of PyTorch's global generator, which the trainer seeds in every step:
        one batch in two parts has other masks than in one.
        """
        del step
        (images,) = views
        # A permutation of the patches for every image, drawn where the images are.
        num_patches = self.student.backbone.config.grid_size**2
        noise = torch.rand(len(images), num_patches, device=images.device)
        order = noise.argsort(dim=1, stable=True)
        hidden = order[:, self.student.num_visible :]
        predictions = take(network(images, order), hidden).float()
        targets = take(self.targets(images), hidden)
        loss = F.mse_loss(predictions, targets)
        # Of painting patches in their own means, or pixels in the mean colour of the hidden.
        if not self.options.normalised_pixels:
            pixels = targets.unflatten(2, (-1, 3))
            targets = pixels - pixels.mean((1, 2), keepdim=True)
        return loss, {"mean_loss": targets.square().mean()}

    def targets(self, images: Images) -> Float[Tensor, "batch patches values"]:
        """What the decoder should say of every patch."""
        patches = patchify(images, self.student.backbone.config.patch_size)
        if not self.options.normalised_pixels:
            return patches
        variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
        return (patches - mean) / (variance + _EPS).sqrt()

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """A decoder that paints all that is hidden in its mean, or worse."""
        if row["loss"] < _LEARNT * row["mean_loss"]:
            return None
        return ConfigurationError(
            f"the loss, {row['loss']:.3f}, is no less than that of painting what is hidden in its "
            f"mean, {row['mean_loss']:.3f}",
            hint=join_alternatives(
                ("optimizer.lr=1.5e-4", "optimizer.betas=[0.9,0.95]"),
                ("objective.mask_ratio={share}",),
            ),
        )


def patchify(images: Images, patch_size: int) -> Float[Tensor, "batch patches values"]:
    """The pixels of every patch, row by row, each of them row by row, three colours a pixel."""
    tiles = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    # batch 3 rows height cols width -> batch rows cols height width 3
    return tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def take(
    values: Float[Tensor, "batch patches dim"], numbers: Int64[Tensor, "batch taken"]
) -> Float[Tensor, "batch taken dim"]:
    """Some of the patches of every image, in the order of their numbers."""
    return values.gather(1, numbers[..., None].expand(-1, -1, values.shape[2]))
