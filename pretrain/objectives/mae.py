"""MAE: the encoder sees some patches of an image, and a small decoder predicts the others."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pretrain.crops.plain import PlainCrop
from pretrain.objectives.objective import Learner, Objective, Views, derive_seed, require_vit
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Depth, OpenFraction, Width, check_fields
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.models import EncoderConfig, VisionTransformer, ViTConfig, build_vit

# Added to the variance of a patch.
_EPS = 1e-6
# A decoder counts as trained if its loss is below this share of the loss of predicting the mean.
_LEARNED_SHARE = 0.99
# Standard deviation of the decoder's initial weights outside its blocks.
_STD = 0.02

Images = Float[Tensor, "batch 3 height width"]
Orders = Int64[Tensor, "batch patches"]


@dataclass(frozen=True)
class Mae(Objective):
    """Hyperparameters of MAE.

    The published decoder for ViT-B and larger encoders has a width of 512, 8 blocks and 16 heads.
    The default decoder is meant for ViT-S. Like the published decoder for ViT-B, the default
    decoder has two thirds of the encoder's width and a width of 32 per head.

    Attributes:
        mask_ratio: Fraction of the patches that the encoder does not see.
        normalised_pixels: Whether to normalise the target pixels of each patch to mean 0 and
            standard deviation 1. If false, the targets are the pixels of the normalised image.
        gray_decoder: Whether the decoder blocks also use the token graying of the encoder. Token
            graying increases the small singular values of the token matrix.

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
        # One half of the sinusoidal position embedding encodes the row, and the other the column.
        # Each half consists of as many sines as cosines.
        step = math.lcm(4, self.decoder_heads)
        if self.decoder_dim % step:
            next_multiple = math.ceil(self.decoder_dim / step) * step
            raise ConfigurationError(
                "objective.decoder_dim must be a multiple of 4 and of objective.decoder_heads = "
                f"{self.decoder_heads}, got {self.decoder_dim}",
                hint=(f"objective.decoder_dim={next_multiple}",),
            )

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "MaeLearner":
        """Build a learner with an encoder and a decoder. The argument `class_names` is not used.

        Raises:
            ConfigurationError: The model is not a Vision Transformer, or the mask ratio hides none
                or all of its patches. The error is also raised if `gray_decoder` is true, but the
                encoder has no token graying.
        """
        del timeline, class_names
        model = require_vit(model, "mae", "other encoders cannot leave out patches")
        if self.gray_decoder and model.graying == "none":
            raise ConfigurationError(
                "objective.gray_decoder=true adds the token graying of the encoder to the decoder, "
                "but the encoder does not use token graying (model.graying=none)",
                hint=("model.graying=svd", "or", "model.graying=dct"),
            )
        num_patches = model.grid_size**2
        # In floating point, 1 - 0.9 is slightly smaller than 0.1. This must not hide another patch.
        num_visible = math.floor(num_patches * (1 - self.mask_ratio) + 1e-9)
        if not 0 < num_visible < num_patches:
            raise ConfigurationError(
                f"objective.mask_ratio={self.mask_ratio} leaves {num_visible} of {num_patches} "
                "patches visible, expected some but not all",
                hint=("objective.mask_ratio={share}", "or", "data.image_size={larger}"),
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "decoder"))
            decoder = MaeDecoder(model, self, seed=seed)
        network = MaeNetwork(build_vit(model, seed=seed), decoder, num_visible)
        return MaeLearner(self, network)


class MaeLearner(Learner):
    """An encoder with a decoder, and the MAE loss on the hidden patches."""

    options: Mae
    student: "MaeNetwork"

    def compilable(self) -> Iterable[nn.Module]:
        return (self.student,)

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the mean squared error of the pixels in the hidden patches.

        PyTorch's global random generator, which the trainer seeds at each step, selects the patches
        to hide. A different number of micro-batches may hide different patches of an image.

        Args:
            network: The student network, possibly wrapped for training on several devices.
            views: One tensor of normalised images [batch, 3, height, width].
            step: Ignored.

        Returns:
            The loss, and `mean_loss` for the log, which is the loss of a constant prediction. The
            constant prediction is the mean of each hidden patch or, if `normalised_pixels` is
            false, the mean colour of all hidden pixels of an image.
        """
        del step
        (images,) = views
        # A random permutation of the patches for each image, drawn on the device of the images.
        num_patches = self.student.backbone.config.grid_size**2
        noise = torch.rand(len(images), num_patches, device=images.device)
        order = noise.argsort(dim=1, stable=True)
        hidden = order[:, self.student.num_visible :]
        predictions = gather_patches(network(images, order), hidden).float()
        targets = gather_patches(self.targets(images), hidden)
        loss = F.mse_loss(predictions, targets)
        if not self.options.normalised_pixels:
            pixels = targets.unflatten(2, (-1, 3))
            targets = pixels - pixels.mean((1, 2), keepdim=True)
        return loss, {"mean_loss": targets.square().mean()}

    def targets(self, images: Images) -> Float[Tensor, "batch patches values"]:
        """Return the target pixels of each patch, normalised if `normalised_pixels` is true."""
        patches = patchify(images, self.student.backbone.config.patch_size)
        if not self.options.normalised_pixels:
            return patches
        variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
        return (patches - mean) / (variance + _EPS).sqrt()

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Return an error if this row of the log shows that the decoder predicts only the mean.

        A decoder that predicts only the mean has about the same loss as a constant prediction for
        each image or patch.
        """
        if row["loss"] < _LEARNED_SHARE * row["mean_loss"]:
            return None
        return ConfigurationError(
            f"the loss {row['loss']:.3f} is no lower than {row['mean_loss']:.3f}, the loss of a "
            "decoder that predicts only the mean of the hidden pixels",
            hint=join_alternatives(
                ("optimizer.lr=1.5e-4", "optimizer.betas=[0.9,0.95]"),
                ("objective.mask_ratio={share}",),
            ),
        )


class MaeNetwork(nn.Module):
    """An encoder for the visible patches, and a decoder that predicts all patches."""

    def __init__(
        self, backbone: VisionTransformer, decoder: "MaeDecoder", num_visible: int
    ) -> None:
        super().__init__()
        self.backbone, self.decoder, self.num_visible = backbone, decoder, num_visible

    def forward(self, images: Images, order: Orders) -> Float[Tensor, "batch patches values"]:
        """Return the predicted pixels of all patches.

        Args:
            images: Normalised images.
            order: A permutation of the patch indices for each image. The encoder sees only the
                first `num_visible` patches of this permutation.
        """
        return self.decoder(self.encode(images, order[:, : self.num_visible]), order)

    def encode(
        self, images: Images, visible: Int64[Tensor, "batch visible"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Return the encoder's output tokens for [CLS], the registers and the visible patches.

        No block of the encoder processes the hidden patches.

        Args:
            images: Normalised images.
            visible: Indices of each image's visible patches, in the order of the output tokens.
        """
        tokens, num_prefix = self.backbone.embed(images), self.backbone.config.num_prefix_tokens
        patches = gather_patches(tokens[:, num_prefix:], visible)
        x = torch.cat([tokens[:, :num_prefix], patches], dim=1)
        for block in self.backbone.blocks:
            x = block(x)
        return self.backbone.norm(x)


class MaeDecoder(nn.Module):
    """A small Vision Transformer that predicts the pixels of all patches from visible tokens."""

    positions: Tensor

    def __init__(self, encoder: ViTConfig, options: Mae, *, seed: int) -> None:
        super().__init__()
        self.num_prefix_tokens = encoder.num_prefix_tokens
        config = ViTConfig(
            image_size=encoder.image_size,
            patch_size=encoder.patch_size,
            dim=options.decoder_dim,
            depth=options.decoder_depth,
            num_heads=options.decoder_heads,
            position_embedding="sinusoidal",
            graying=encoder.graying if options.gray_decoder else "none",
            graying_exponent=encoder.graying_exponent,
        )
        transformer = build_vit(config, seed=derive_seed(seed, "decoder blocks"))
        self.embed = nn.Linear(encoder.dim, config.dim)
        self.mask_token = nn.Parameter(_STD * torch.randn(1, 1, config.dim))
        self.blocks, self.norm = transformer.blocks, transformer.norm
        self.pixels = nn.Linear(config.dim, 3 * config.patch_size**2)
        for linear in (self.embed, self.pixels):
            nn.init.trunc_normal_(linear.weight, std=_STD)
            nn.init.zeros_(linear.bias)
        # Checkpoints do not contain the positions, because they are constant.
        positions = transformer.pos_embed.detach()[:, 1:]
        self.register_buffer("positions", positions, persistent=False)

    def forward(
        self, tokens: Float[Tensor, "batch visible dim"], order: Orders
    ) -> Float[Tensor, "batch patches values"]:
        """Return the predicted pixels of all patches in row-major order.

        Args:
            tokens: Output of the encoder: [CLS], registers and visible patches.
            order: A permutation of the patch indices for each image. The visible patches come
                first, in the order of `tokens`.
        """
        tokens, num_prefix = self.embed(tokens), self.num_prefix_tokens
        prefix, visible = tokens[:, :num_prefix], tokens[:, num_prefix:]
        num_hidden = order.shape[1] - visible.shape[1]
        hidden = self.mask_token.expand(len(tokens), num_hidden, -1)
        patches = gather_patches(torch.cat([visible, hidden], dim=1), order.argsort(dim=1))
        x = torch.cat([prefix, patches + self.positions], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.pixels(self.norm(x)[:, num_prefix:])


def patchify(images: Images, patch_size: int) -> Float[Tensor, "batch patches values"]:
    """Divide images into patches in row-major order, and return the pixels of each patch.

    The pixels within a patch are also in row-major order. The three colour values of each pixel are
    consecutive in the last axis.
    """
    tiles = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    # batch 3 rows height cols width -> batch rows cols height width 3
    return tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def gather_patches(
    values: Float[Tensor, "batch patches dim"], numbers: Int64[Tensor, "batch selected"]
) -> Float[Tensor, "batch selected dim"]:
    """Select patches of each image by their indices in `numbers`."""
    return values.gather(1, numbers[..., None].expand(-1, -1, values.shape[2]))
