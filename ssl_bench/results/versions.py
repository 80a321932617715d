"""Versions of the code that computes results. Results of lower versions are outdated."""

PIPELINE_VERSION = 1
"""Version of decoding, transforms and feature extraction, which all probes share.

Raise it when a change there changes results. All results are then computed again.
"""

METRIC_VERSIONS = {"discovery": 2, "geometry": 2}
"""`Probe.metric_version` of each task in this repository that has a higher version than 1.

They are repeated here because `ssl-bench table` does not import probes, which import PyTorch. A
test compares them with the classes.
"""
