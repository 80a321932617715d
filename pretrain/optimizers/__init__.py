"""Optimizers for pretraining. `SOAP` is a `torch.optim.Optimizer` that works with any model."""

from pretrain.optimizers.soap import SOAP

__all__ = ["SOAP"]
