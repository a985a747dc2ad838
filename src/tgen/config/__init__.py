"""The configurations of the model and of sampling; that of training is in `config.training`."""

from tgen.config.engine import (
    DEFAULT_ENGINE,
    STORED_BYTES,
    CacheDtype,
    Device,
    EngineKind,
    EngineOptions,
    GgufType,
    StoredAs,
    output_dtype,
)
from tgen.config.model import (
    DEFAULT_FAMILY,
    FAMILIES,
    GATED,
    SCALED_EMBEDDINGS,
    Activation,
    Family,
    ModelConfig,
    Rope,
    RopeScaling,
)
from tgen.config.sampling import (
    CONSTRAINTS,
    DEFAULT_BATCH_SIZE,
    SAMPLERS,
    TEXTS,
    Draft,
    SamplingConfig,
    raw,
)
from tgen.config.sizes import SIZES, Size
