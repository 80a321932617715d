"""Datasets, the image sets of their splits, and the samples that image sets return."""
