"""Records: what they are and where they lie."""

from ssl_bench.results.record import (
    CORRUPTED,
    ENCODER,
    MOST_DEGENERATE,
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
    is_degenerate,
    stride_of,
)
from ssl_bench.results.store import ResultStore, to_pandas

__all__ = [
    "CORRUPTED",
    "ENCODER",
    "MOST_DEGENERATE",
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
    "is_degenerate",
    "stride_of",
    "to_pandas",
]
