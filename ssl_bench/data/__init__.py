"""Datasets, their image sets, and the samples that image sets return."""
