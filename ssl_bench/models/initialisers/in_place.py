"""Initialisers as functions on a ViT of one's own, in place as those of `torch.nn.init`."""

from typing import Any, TypeVar

from torch import Generator, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.initialisers.blocks import initialiser_of, set_block

Model = TypeVar("Model", bound=nn.Module)


def skipless_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """Draw the blocks of a ViT as "Cutting the Skip" does, so that it trains without skips.

    What `model.init=skipless` draws for a model of timm, to the bit; the global RNG is left alone.
    All biases of the blocks become 0, and whatever is no attention or MLP stays.

    Args:
        model: Has `blocks`, each with `attn.qkv`, `attn.proj`, `attn.num_heads`, `mlp.fc1` and
            `mlp.fc2`, as a ViT of `timm.create_model` or of this suite.
        seed: Decides what is drawn.
        options: Those of `ssl_bench.models.initialisers.options.SkiplessOptions`.

    Returns:
        The same model.

    Raises:
        ConfigurationError: No such anatomy, or no such option.
    """
    return _drawn(model, "skipless", seed, options)


def mimetic_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """As `skipless_`: attention that looks trained, of "Mimetic initialization", section 3.2."""
    return _drawn(model, "mimetic", seed, options)


def _drawn(model: Model, name: str, seed: int, options: dict[str, Any]) -> Model:
    initialiser, generator = initialiser_of(name, options), Generator().manual_seed(seed)
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        raise ConfigurationError(
            f"expected a ViT with blocks as timm names them, got {type(model).__name__} without"
        )
    for block in blocks:
        try:
            set_block(block, initialiser, generator)
        except AttributeError as error:
            raise ConfigurationError(
                f"expected blocks with attn.qkv, attn.proj, attn.num_heads, mlp.fc1 and mlp.fc2, "
                f"got {type(block).__name__} of {type(model).__name__}: {error}"
            ) from error
    return model
