"""The three configurations, with every default in one place: model, training, sampling."""

from tgen.config.model import (
    DEFAULT_FAMILY,
    FAMILIES,
    SIZES,
    Activation,
    Family,
    ModelConfig,
    Norm,
    Position,
    RopeScaling,
    Size,
)
from tgen.config.sampling import (
    CONSTRAINTS,
    DEFAULT_BATCH_SIZE,
    SAMPLERS,
    STORED_BYTES,
    TEXTS,
    Draft,
    Overflow,
    SamplingConfig,
    SamplingOptions,
    StoredAs,
    raw,
)
from tgen.config.training import LossOn, TrainConfig

__all__ = [
    "CONSTRAINTS",
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_FAMILY",
    "FAMILIES",
    "SAMPLERS",
    "SIZES",
    "STORED_BYTES",
    "TEXTS",
    "Activation",
    "Draft",
    "Family",
    "LossOn",
    "ModelConfig",
    "Norm",
    "Overflow",
    "Position",
    "RopeScaling",
    "SamplingConfig",
    "SamplingOptions",
    "Size",
    "StoredAs",
    "TrainConfig",
    "raw",
]
