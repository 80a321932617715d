"""Datasets: files in, samples out."""
