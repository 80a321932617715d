"""Graphs of patches and the second eigenvectors of their normalised cut."""
