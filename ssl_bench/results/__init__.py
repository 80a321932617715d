"""Records: what they are and where they lie."""

from ssl_bench.results.record import (
    CORRUPTED,
    ENCODER_FIELDS,
    MAX_DEGENERATE_PERCENT,
    OLD_FORMAT,
    SUPERVISED,
    TRAINED_ON,
    UNRANKED_METRICS,
    Baseline,
    PerImage,
    PerImageKind,
    Record,
    ResultKey,
    TrainingImages,
    block_stride,
    encoder_id,
    is_degenerate,
)
from ssl_bench.results.store import ResultStore, to_pandas

__all__ = [
    "CORRUPTED",
    "ENCODER_FIELDS",
    "MAX_DEGENERATE_PERCENT",
    "OLD_FORMAT",
    "SUPERVISED",
    "TRAINED_ON",
    "UNRANKED_METRICS",
    "Baseline",
    "PerImage",
    "PerImageKind",
    "Record",
    "ResultKey",
    "ResultStore",
    "TrainingImages",
    "block_stride",
    "encoder_id",
    "is_degenerate",
    "to_pandas",
]
