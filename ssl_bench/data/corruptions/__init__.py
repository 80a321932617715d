"""The common corruptions of ImageNet-C, of any image and always with the same draws."""
