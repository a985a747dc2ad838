"""Families for the tests of generation, which sees a model only through its engine."""

import pytest

from support.models import DIFFERENT_POSITIONS


@pytest.fixture(params=DIFFERENT_POSITIONS)
def family(request: pytest.FixtureRequest) -> str:
    """Return the name of a family."""
    return str(request.param)
