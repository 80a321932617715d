"""Checkpoint x probe x dataset x layers -> records, and the interface of a probe."""

from ssl_bench.evaluation.cells import Question, cell_keys, cell_settings, trained_on
from ssl_bench.evaluation.evaluate import Evaluation
from ssl_bench.evaluation.probe import Probe, ProbeContext, Progress, Score, called

__all__ = [
    "Evaluation",
    "Probe",
    "ProbeContext",
    "Progress",
    "Question",
    "Score",
    "called",
    "cell_keys",
    "cell_settings",
    "trained_on",
]
