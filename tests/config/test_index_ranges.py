"""Layers, heads and tokens are chosen as they are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgen.config.index_ranges import parse_indices, parse_slice
from tgen.errors import UsageError


@given(st.lists(st.integers(-12, 11), min_size=1, max_size=6))
def test_numbers_are_read_back(chosen):
    wanted = list(dict.fromkeys(i % 12 for i in chosen))
    assert parse_indices("--layer", ",".join(map(str, chosen)), 12) == wanted


def test_ranges_and_windows():
    assert parse_indices("--layer", "0,2-4", 6) == [0, 2, 3, 4]
    assert parse_indices("--layer", "-2--1", 6) == [4, 5]
    assert parse_indices("--head", "all", 3) == [0, 1, 2]
    assert list(parse_slice("--query", "2:5", 9)) == [2, 3, 4]
    assert list(parse_slice("--query", ":", 3)) == [0, 1, 2]
    assert list(parse_slice("--query", "-2:", 9)) == [7, 8]
    assert list(parse_slice("--query", "-1", 9)) == [8]
    for wrong in ("9", "-10", "", "a", "5:5", "1e3", "--", "1.5", "3:2", "9" * 30):
        with pytest.raises(UsageError, match="--query"):
            parse_slice("--query", wrong, 9)
    for wrong in ("4-2", "0-9", "", ",", "x", "0;1"):
        with pytest.raises(UsageError, match="--layer"):
            parse_indices("--layer", wrong, 6)
