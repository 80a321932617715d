"""What enters and leaves every block for some images, in float64."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from probes.conditioning.decomposition import Parts, decompose_block
from probes.conditioning.probe import require_fitting
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, tokens_among
from ssl_bench.models import Encoder, EncoderModule, build_encoder, encoder_from_model
from ssl_bench.system.device import float64_device


@dataclass(frozen=True)
class BlockPass:
    """One block and one image.

    Attributes:
        entered: All tokens, [CLS] and registers among them.
        left: What the block made of them.
        parts: None where the block cannot be taken apart.
    """

    block: nn.Module
    entered: Float[Tensor, "tokens dim"]
    left: Float[Tensor, "tokens dim"]
    parts: Parts | None

    def whole(self, tokens: Tensor) -> Tensor:
        """The block itself, as a function of one image's tokens."""
        return tokens_among(self.block(tokens[None]))[0]


Passes = dict[int, list[BlockPass]]


def block_passes(
    encoder: Encoder, samples: Sequence[Sample], image_size: int, context: ProbeContext
) -> tuple[Passes, Float[Tensor, "images tokens dim"]]:
    """By layer the passes of all images, squeezed to squares of one size, and what enters block 0.

    Raises:
        UnfitEncoder: The encoder has no attention, or stages.
        CheckpointError: Features are not finite.
    """
    require_fitting(encoder)
    device = float64_device(context.device)
    double = in_float64(encoder, device)
    extractor = FeatureExtractor(double, layers=context.layers, device=device)
    blocks = double.module.get_submodule("blocks")
    asked = {layer: blocks.get_submodule(str(layer)) for layer in context.layers}
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = [
        block.register_forward_hook(_keeper(seen, layer), prepend=True)
        for layer, block in asked.items()
    ]
    embedded: list[Tensor] = []
    handles.append(
        blocks.get_submodule("0").register_forward_pre_hook(
            lambda _block, inputs: embedded.append(inputs[0][0])
        )
    )
    found: Passes = {layer: [] for layer in context.layers}
    try:
        for sample in context.progress(samples, "conditioning", len(samples)):
            image = squared(sample.image, image_size)
            extractor(image[None].to(device), [sample.image_id])
            for layer, block in asked.items():
                entered, left = seen[layer]
                with torch.no_grad():
                    parts = decompose_block(block, entered, left, encoder.num_heads)
                found[layer].append(BlockPass(block, entered, left, parts))
    finally:
        for handle in handles:
            handle.remove()
    return found, torch.stack(embedded)


def _keeper(seen: dict[int, tuple[Tensor, Tensor]], layer: int) -> Any:
    def keep(_block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen[layer] = (inputs[0][0], tokens_among(output)[0])

    return keep


def in_float64(encoder: Encoder, device: torch.device) -> Encoder:
    """A copy whose weights and activations are float64: rounding ends at 1e16, not at 1e7."""
    module = copy.deepcopy(encoder.module).to(device).double()
    module.register_forward_pre_hook(lambda _module, images: images[0].double())
    return replace(encoder, module=module)


def initialised_again(encoder: Encoder, seed: int) -> Encoder:
    """The same architecture before any training, with the weights of a seed.

    Raises:
        ConfigurationError: The encoder does not tell how it was initialised.
    """
    if not isinstance(encoder.module, EncoderModule):
        raise ConfigurationError(
            f"probe.at_initialisation needs a checkpoint of ssl-bench pretrain, got {encoder.name}"
        )
    model = build_encoder(encoder.module.config, seed=seed)
    colours = (encoder.mean, encoder.std)
    return encoder_from_model(model, name=encoder.name, uri=encoder.uri, colours=colours)


def squared(
    image: UInt8[np.ndarray, "height width 3"], side: int
) -> Float[Tensor, "3 {side} {side}"]:
    """Squeeze an image to a square, RGB in [0, 1]: condition numbers depend on the token count."""
    resized = Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1).float() / 255
