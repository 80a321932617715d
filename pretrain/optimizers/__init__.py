"""AdamW and SOAP; `SOAP` is an optimizer of torch for any model."""

from pretrain.optimizers.soap import SOAP

__all__ = ["SOAP"]
