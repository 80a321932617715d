"""Store results of probes: records, per-image values, and the folders that contain them."""

from ssl_bench.results.record import (
    CORRUPTION_KEY,
    ENCODER_FIELDS,
    MAX_DEGENERATE_PERCENT,
    OLD_FORMAT,
    SUPERVISED,
    TRAINING_IMAGES_KEY,
    Baseline,
    PerImage,
    PerImageKind,
    Record,
    RecordedEncoder,
    ResultKey,
    TrainingImages,
    block_stride,
    encoder_id,
    is_degenerate,
)
from ssl_bench.results.store import ResultStore, to_pandas

__all__ = [
    "CORRUPTION_KEY",
    "ENCODER_FIELDS",
    "MAX_DEGENERATE_PERCENT",
    "OLD_FORMAT",
    "SUPERVISED",
    "TRAINING_IMAGES_KEY",
    "Baseline",
    "PerImage",
    "PerImageKind",
    "Record",
    "RecordedEncoder",
    "ResultKey",
    "ResultStore",
    "TrainingImages",
    "block_stride",
    "encoder_id",
    "is_degenerate",
    "to_pandas",
]
