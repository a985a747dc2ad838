"""The configurations of the model and of sampling; that of training is in `config.training`."""

from tgen.config.engine import DEFAULT_ENGINE, Device, EngineKind, EngineOptions
from tgen.config.model import (
    DEFAULT_FAMILY,
    FAMILIES,
    GATED,
    SCALED_EMBEDDINGS,
    SIZES,
    Activation,
    Family,
    ModelConfig,
    Rope,
    RopeScaling,
    Size,
)
from tgen.config.sampling import (
    CONSTRAINTS,
    DEFAULT_BATCH_SIZE,
    SAMPLERS,
    STORED_BYTES,
    TEXTS,
    CacheDtype,
    Draft,
    GgufType,
    SamplingConfig,
    StoredAs,
    output_dtype,
    raw,
)
