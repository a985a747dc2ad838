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
    DEFAULT_MAX_NEW_TOKENS,
    SAMPLERS,
    Draft,
    SamplingConfig,
    StoredAs,
    StringConfig,
)
from tgen.config.training import LossOn, TrainConfig

__all__ = [
    "DEFAULT_FAMILY",
    "DEFAULT_MAX_NEW_TOKENS",
    "FAMILIES",
    "SAMPLERS",
    "SIZES",
    "Activation",
    "Draft",
    "Family",
    "LossOn",
    "ModelConfig",
    "Norm",
    "Position",
    "RopeScaling",
    "SamplingConfig",
    "Size",
    "StoredAs",
    "StringConfig",
    "TrainConfig",
]
