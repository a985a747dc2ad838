"""Shapes with a given number of parameters."""

import pytest

from tgen.config import FAMILIES, ModelConfig
from tgen.errors import UsageError
from tgen.planning.costs import n_parameters
from tgen.planning.shape_search import find_shape, nearest_size

SIZES = [100_000, 777_777, 10_000_000]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_shape_of_every_size_within_2_percent(family):
    for parameters in SIZES:
        for vocab_size in (512, 2048, 8192):
            for tied in (True, False):
                fields = {"vocab_size": vocab_size, "context_length": 256, "tied_embeddings": tied}
                if vocab_size * (2 - tied) * 16 > parameters:
                    continue  # there are not enough for embeddings of 16 dimensions
                shape = find_shape(family, parameters, fields)
                model = ModelConfig.of(family, **fields, **shape._asdict())
                assert abs(n_parameters(model) / parameters - 1) <= 0.02, (fields, shape)


def test_shapes_are_like_those_of_the_sizes():
    fields = {"vocab_size": 1024, "context_length": 128}
    shapes = [find_shape("llama", parameters, fields) for parameters in SIZES]
    assert all(8 <= shape.d_model / shape.n_layers <= 128 for shape in shapes), shapes
    assert all(20 <= shape.d_model / shape.n_heads <= 64 for shape in shapes), shapes
    assert nearest_size(1_000_000) == "tiny"


def test_too_few_parameters_for_the_vocabulary_are_refused():
    fields = {"vocab_size": 16_384, "context_length": 128, "tied_embeddings": False}
    for family in FAMILIES:
        with pytest.raises(UsageError, match=r"parameters: no model of the .* 100 with") as error:
            find_shape(family, 100, fields)
        enough = int(error.value.hint.split()[3].replace(",", ""))
        assert find_shape(family, enough, fields)
