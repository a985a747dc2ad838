"""RoPE: parameters whose angles are not finite are refused, all others give finite tables."""

import numpy as np
import pytest

from tgen.config import ModelConfig, RopeScaling
from tgen.errors import UsageError
from tgen.model.rope import rotary_tables


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-7, 1e31, 1e300, float("inf"), float("nan")])
def test_extreme_parameters_are_an_error(value):
    with pytest.raises(UsageError, match="rope_theta"):
        ModelConfig.of("llama", vocab_size=300, rope_theta=value)
    with pytest.raises(UsageError, match="factor"):
        RopeScaling(factor=value)
    with pytest.raises(UsageError, match="high_freq_factor"):
        RopeScaling(factor=2.0, high_freq_factor=value)


@pytest.mark.parametrize("theta", [1e-6, 1.0, 1e30])
@pytest.mark.parametrize("factor", [1e-6, 1e30])
@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_smallest_and_largest_parameters_give_finite_tables(theta, factor, kind):
    longest = (1 << 31) - 1
    scaling = RopeScaling(kind=kind, factor=factor, original_context_length=longest)
    config = ModelConfig.of("llama", vocab_size=300, rope_theta=theta, rope_scaling=scaling)
    assert all(np.isfinite(table).all() for table in rotary_tables(config, 1000))
