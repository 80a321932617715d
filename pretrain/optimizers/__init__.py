"""Optimizers of pretraining. `SOAP` is a `torch.optim.Optimizer` for any model."""

from pretrain.optimizers.soap import SOAP

__all__ = ["SOAP"]
