"""AdamW and SOAP; `SOAP` is an optimizer of torch for any model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.optimizers.soap import SOAP

__all__ = ["SOAP"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: recipes are read without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pretrain.optimizers import soap

    return getattr(soap, name)
