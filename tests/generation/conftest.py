"""Families for the tests of generation, which sees a model only through its engine."""

import pytest


# Positions of all kinds, with and without a window, in all layers and in some.
@pytest.fixture(params=["classic", "gpt2", "mistral", "qwen3", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    """Return the name of a family."""
    return str(request.param)
