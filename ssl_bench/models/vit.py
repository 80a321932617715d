"""The Vision Transformer with and without skip connections."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import ViTConfig, build_submodule
from ssl_bench.models.initialisers import INITIALISERS, init_block_, init_uniform_, make_initialiser
from ssl_bench.system.device import disable_autocast, float64_device

_TOKEN_STD = 0.02
# Bound for `truncated_tokens`. Source: Zhang and Martens, "Orthogonal Self-Attention", appendix D.
_CUT = 2 * _TOKEN_STD
_TEMPERATURE = 10_000.0
# Official DINO adds this margin to the new grid size, so that rounding cannot drop a row. The
# margin also shifts the sampling positions, so all features depend on it.
DINO_MARGIN = 0.1
_BICUBIC = -0.75

Tokens = Float[Tensor, "batch tokens dim"]
HeadTokens = Float[Tensor, "batch heads tokens width"]


class EncoderModule(nn.Module):
    """Base class of this suite's encoders, which are built from an `EncoderConfig`.

    Attributes:
        config: The configuration from which the module was built.
        blocks: The blocks in order, as a `ModuleList`.
        norm: The final norm, or the identity.
    """

    config: Any
    blocks: Any
    norm: Any

    @property
    def position_rule(self) -> str | None:
        """Text that describes how the position embedding is resized for other image sizes.

        The value is None if there is no position embedding.
        """
        return None


class PatchEmbed(nn.Module):
    """Linear embedding of non-overlapping square patches of RGB images."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch dim rows cols"]:
        height, width = images.shape[-2:]
        # The convolution would silently ignore the remaining pixels.
        if height % self.patch_size or width % self.patch_size:
            raise ConfigurationError(
                f"image sides must be multiples of the patch size {self.patch_size}, "
                f"got {height} x {width}. Pad or resize the image"
            )
        if not images.is_cuda:
            return self.proj(images)
        # Use a matrix product, because cuDNN's convolution over three channels takes 8 % of a
        # training step.
        size = self.patch_size
        parts = images.unflatten(2, (-1, size)).unflatten(4, (-1, size))
        patches = parts.permute(0, 2, 4, 1, 3, 5).flatten(3)  # batch rows cols pixels
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Multi-head self-attention. Logits are divided by the square root of the head width."""

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    @classmethod
    def from_config(cls, config: ViTConfig) -> "Attention":
        return cls(config.dim, config.num_heads, qkv_bias=config.qkv_bias)

    def forward(self, x: Tokens) -> Tokens:
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.proj(self.mix_values(q, k, v).transpose(1, 2).flatten(2))

    def mix_values(self, q: HeadTokens, k: HeadTokens, v: HeadTokens) -> HeadTokens:
        """Return the sum of the values, weighted by attention, for each head and token."""
        if not (q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu"):
            return F.scaled_dot_product_attention(q, k, v)
        # Use float32. On a CPU with up to 150 tokens, the gradients take two to eight times as long
        # in bfloat16. With 257 tokens, both dtypes take equally long.
        with disable_autocast(q.device):
            wide = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        return wide.to(q.dtype)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tokens) -> Tokens:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Transformer block: optional token graying, then pre-norm attention, then a pre-norm MLP.

    Let x be the tokens after graying. With a skip connection, the attention replaces x by x +
    attention(norm(x)). Without a skip connection, the attention replaces x by attention(norm(x)).
    Likewise, the MLP replaces x by x + mlp(norm(x)) or by mlp(norm(x)).

    Args:
        config: Configuration of the encoder. The fields `graying_layers` and `drop_path` have no
            effect on a single block.
        drop_path: Probability of dropping the output of a sub-block (attention or MLP) for a sample
            in training.
    """

    def __init__(self, config: ViTConfig, *, drop_path: float) -> None:
        super().__init__()
        self.skip_attention, self.skip_mlp = config.skip_attention, config.skip_mlp
        self.drop_path = drop_path
        self.graying = build_submodule("graying", config)
        self.norm1 = _build_norm(config)
        self.attn = build_submodule("attention", config)
        self.norm2 = _build_norm(config)
        self.mlp = Mlp(config.dim, config.hidden_dim)

    def forward(self, x: Tokens) -> Tokens:
        x = self.graying(x)
        x = self._add_skip(x, self.attn(self.norm1(x)), skip=self.skip_attention)
        return self._add_skip(x, self.mlp(self.norm2(x)), skip=self.skip_mlp)

    def _add_skip(self, x: Tokens, update: Tokens, *, skip: bool) -> Tokens:
        if not skip:
            return update
        if self.training and self.drop_path:
            is_kept = torch.rand(len(x), 1, 1, device=x.device) >= self.drop_path
            update = update * is_kept / (1 - self.drop_path)
        return x + update


class VisionTransformer(EncoderModule):
    """A Vision Transformer with DINO's parameter names. Create it with `build_vit`.

    Args:
        config: Architecture of the encoder.
        grid_size: Rows and columns of the position embedding. The default is the square grid of
            `config`. Checkpoints of other libraries may have a different grid.

    Attributes:
        position_margin: Number that is added to the new grid size when the position embedding is
            resized. The default is DINO's 0.1. Checkpoints of other libraries may need a different
            margin.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, grid_size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.config = config
        self.grid_size = grid_size or (config.grid_size, config.grid_size)
        self.position_margin = DINO_MARGIN
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        if config.num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, config.dim))
        self.pos_embed = nn.Parameter(
            torch.zeros(1, 1 + math.prod(self.grid_size), config.dim),
            requires_grad=config.position_embedding == "learned",
        )
        if config.position_embedding == "sinusoidal":
            positions = sinusoidal_positions(*self.grid_size, config.dim)
            self.pos_embed.data[0, 1:] = config.position_scale * positions
        step = config.drop_path / max(1, config.depth - 1)
        layers = range(config.depth)
        gray_layers = layers if config.graying_layers is None else config.graying_layers
        without_graying = replace(config, graying="none")
        self.blocks = nn.ModuleList(
            Block(config if layer in gray_layers else without_graying, drop_path=step * layer)
            for layer in layers
        )
        self.norm = _build_norm(config)

    @property
    def position_rule(self) -> str | None:
        return describe_resampling(self.position_margin)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """Return the [CLS] token of each image after the final norm.

        The images must be normalised, and their sides must be multiples of the patch size.
        """
        return self.forward_features(images)[:, 0]

    def forward_features(self, images: Float[Tensor, "batch 3 height width"]) -> Tokens:
        """Return all tokens after the final norm: [CLS], registers, then patches row by row."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, images: Float[Tensor, "batch 3 height width"]) -> Tokens:
        """Return the tokens that enter the first block: [CLS], registers, then the patches.

        The patches are in row-major order. The position embedding is already added.
        """
        patches = self.patch_embed(images)
        rows, cols = patches.shape[-2:]
        cls_token = self.cls_token.expand(len(images), -1, -1)
        x = torch.cat([cls_token, patches.flatten(2).transpose(1, 2)], dim=1)
        x = x + resize_positions(
            self.pos_embed,
            old_size=self.grid_size,
            new_size=(rows, cols),
            margin=self.position_margin,
        )
        if self.config.num_registers:
            registers = self.reg_token.expand(len(images), -1, -1)
            x = torch.cat([x[:, :1], registers, x[:, 1:]], dim=1)
        return x


def _build_norm(config: ViTConfig) -> nn.Module:
    return nn.LayerNorm(config.dim, eps=1e-6) if config.norm == "layernorm" else nn.Identity()


@torch.no_grad()
def build_vit(
    config: ViTConfig, *, seed: int, grid_size: tuple[int, int] | None = None
) -> VisionTransformer:
    """Return a ViT with initial weights, which depend only on `config` and `seed`.

    The initialisers "skipless" and "mimetic" decompose a dim x dim matrix per head, which takes
    seconds for ViT-S.
    """
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(config, grid_size)
    generator = torch.Generator().manual_seed(seed)
    # Official DINO keeps PyTorch's initialisation of the patch convolution.
    init_uniform_(model.patch_embed.proj, generator)
    for name in ("cls_token", "reg_token", "pos_embed"):
        parameter = getattr(model, name, None)
        if parameter is None or not parameter.requires_grad:
            continue
        nn.init.trunc_normal_(parameter, std=_TOKEN_STD, generator=generator)
        if config.truncated_tokens:
            # Use a separate generator, so that this option does not change the weights drawn later.
            separate = Generator().manual_seed(int(parameter.flatten()[0].view(torch.int32)))
            truncated = torch.empty_like(parameter)
            nn.init.trunc_normal_(truncated, 0, _TOKEN_STD, -_CUT, _CUT, generator=separate)
            parameter.copy_(torch.where(parameter.abs() > _CUT, truncated, parameter))
    initialiser = make_initialiser(INITIALISERS, config.init, config.init_options)
    shift = {"mlp_mean": config.mlp_mean, "mlp_input_std": config.mlp_input_std}
    for block in model.blocks:
        init_block_(block, initialiser, generator, **shift)
    return model


def sinusoidal_positions(rows: int, cols: int, dim: int) -> Float[Tensor, "patches {dim}"]:
    """Return position embeddings: sin and cos of the column, then sin and cos of the row.

    Each of these four parts has dim / 4 frequencies. The patches are in row-major order.

    Source: Chen et al., "An empirical study of training self-supervised vision transformers",
    https://arxiv.org/abs/2104.02057.
    """
    quarter = dim // 4
    frequencies = _TEMPERATURE ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequencies for axis in (col, row)]
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat(waves, dim=1).float()


def resize_positions(
    positions: Float[Tensor, "1 tokens dim"],
    *,
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    margin: float = DINO_MARGIN,
) -> Float[Tensor, "1 new_tokens dim"]:
    """Resize the position embedding of the patches to another grid size.

    Args:
        positions: Position embedding, with the patches after all other tokens. The embedding of the
            other tokens, such as [CLS], does not change.
        old_size: Rows and columns of the patches in `positions`.
        new_size: Rows and columns of the result.
        margin: Number that is added to the new rows and columns when the scale factor is computed.
            DINO uses 0.1, and the transformers library uses 0.

    Source: `interpolate_pos_encoding` in vision_transformer.py of facebookresearch/dino: bicubic
    interpolation without antialiasing. The scale factor from the old size n0 to the new size n is
    (n + 0.1) / n0.
    """
    if new_size == old_size:
        return positions
    num_patches = old_size[0] * old_size[1]
    prefix, patches = positions[:, :-num_patches], positions[:, -num_patches:]
    scale = [(new + margin) / old for new, old in zip(new_size, old_size, strict=True)]
    image = patches.unflatten(1, old_size).permute(0, 3, 1, 2)  # 1 dim rows cols
    if torch.are_deterministic_algorithms_enabled():
        # On CUDA, the gradient of `F.interpolate` is not deterministic. Matrix products give the
        # same result up to rounding.
        by_row, by_col = (
            _bicubic_weights(old, new, factor, float64_device(image.device)).to(image)
            for old, new, factor in zip(old_size, new_size, scale, strict=True)
        )
        resized = by_row @ image @ by_col.T
    else:
        # Without a margin, pass the size. The product of scale factor and old size can be slightly
        # below the new size, and PyTorch would round it down.
        target: Any = {"scale_factor": scale} if margin else {"size": new_size}
        resized = F.interpolate(image, **target, mode="bicubic")
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def describe_resampling(margin: float = DINO_MARGIN) -> str:
    """Return a text that describes how `resize_positions` resizes a position embedding.

    With DINO's margin, it is "bicubic, scale (n + 0.1) / n0, no antialiasing" for old size n0 and
    new size n.
    """
    scale = f"(n + {margin:g}) / n0" if margin else "n / n0"
    return f"bicubic, scale {scale}, no antialiasing"


def _bicubic_weights(
    old: int, new: int, scale: float, device: torch.device
) -> Float[Tensor, "{new} {old}"]:
    """Return the bicubic weight of each old position for each new position along one axis.

    Positions outside the grid take the value of the nearest edge. `scale` is the ratio of the new
    to the old size.

    Source: Keys, "Cubic convolution interpolation for digital image processing", 1981, equation 4
    with a = -0.75, as in PyTorch and OpenCV.
    """
    source = (torch.arange(new, dtype=torch.float64, device=device) + 0.5) / scale - 0.5
    neighbours = source.floor()[:, None] + torch.arange(-1, 3, device=device)
    distance = (source[:, None] - neighbours).abs()
    near = ((_BICUBIC + 2) * distance - (_BICUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _BICUBIC - 4 * _BICUBIC
    weights = torch.where(distance <= 1, near, far)
    return weights.new_zeros(new, old).scatter_add(1, neighbours.long().clamp(0, old - 1), weights)
