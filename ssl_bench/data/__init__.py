"""Datasets on disk, and the samples that they return."""
