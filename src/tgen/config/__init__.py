"""The three configurations with every default: model, training, sampling."""

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
    StoredAs,
    raw,
)
from tgen.config.training import LossOn, Parallel, ResolvedTrainConfig, TrainConfig

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
    "Parallel",
    "Position",
    "ResolvedTrainConfig",
    "RopeScaling",
    "SamplingConfig",
    "Size",
    "StoredAs",
    "TrainConfig",
    "raw",
]
