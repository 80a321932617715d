"""Version numbers of the code that computes results.

A result is outdated if code with a lower version number computed it.
"""

PIPELINE_VERSION = 1
"""Version of image decoding, transforms and feature extraction, which all probes share.

Increase this number when a change of that code changes results. All results are then recomputed.
"""

METRIC_VERSIONS = {"discovery": 2, "geometry": 2}
"""`Probe.metric_version` of each task in this repository with a version above 1.

The versions are repeated here, because `ssl-bench table` does not import the probes, which would
import PyTorch. A test compares these versions with the classes of the probes.
"""
