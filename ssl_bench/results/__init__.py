"""Records: what they are and where they lie."""

from ssl_bench.results.record import (
    CORRUPTED,
    ENCODER,
    OUTDATED,
    SUPERVISED,
    TRAINED_ON,
    UNRANKED_METRICS,
    Baseline,
    CellKey,
    PerImage,
    PerImageKind,
    Record,
    TrainingImages,
    encoder_id,
    stride_of,
)
from ssl_bench.results.store import ResultStore, to_pandas

__all__ = [
    "CORRUPTED",
    "ENCODER",
    "OUTDATED",
    "SUPERVISED",
    "TRAINED_ON",
    "UNRANKED_METRICS",
    "Baseline",
    "CellKey",
    "PerImage",
    "PerImageKind",
    "Record",
    "ResultStore",
    "TrainingImages",
    "encoder_id",
    "stride_of",
    "to_pandas",
]
