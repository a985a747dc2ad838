"""Compiled functions compute what Python computes."""

import ctypes
import gc
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.compiling import link
from tgen.engine.cpu import compiler, forward
from tgen.engine.cpu.compiler import Compiled, Parameter, compiled
from tgen.engine.cpu.intrinsics import f32, f64, i1, load_float, store_double, store_float

NUMBERS = st.integers(-(1 << 31), 1 << 31)


@compiled
def divide(x, y):
    quotient, remainder = x // y, x % y
    return quotient * 1_000_003 + remainder


@compiled
def combine_bits(x, y):
    return (x & 0xFF | y << 3) >> 2


@compiled
def choose(x, y):
    larger, smaller = max(x, y, -5), min(x, y)
    if (x > 0 and y > 0) or not x:
        return larger
    if x in (-1, y):
        return -smaller
    return smaller if x <= y - 1 else larger + int(x != y)


@compiled
def walk(x, y):
    total = 0
    for i in range(x % 50, -1, -3):
        for j in range(y % 7, 20):
            if (i + j) % 5 == 0:
                continue
            if j > 12:
                break
            total += i * j
    i = 0
    while True:
        i += 1
        if i * i > total:
            break
    return total * 100 + i


@compiled
def scale_and_round(x, y):
    value = np.float32(x) / np.float32(3)
    wide = np.float64(value) * y
    return int(wide + np.float64(np.float32(math.sqrt(np.float32(x % 100)))))


@pytest.mark.parametrize("function", [combine_bits, choose, walk, scale_and_round])
@given(x=NUMBERS, y=NUMBERS)
@settings(deadline=None)
def test_result_equals_pythons(function: Compiled, x: int, y: int):
    assert call(function, x, y) == function.function(x, y)


@given(x=NUMBERS, y=NUMBERS.filter(bool))
@settings(deadline=None)
def test_division_rounds_down(x: int, y: int):
    assert call(divide, x, y) == divide.function(x, y)


_linked = {}


def call(function: Compiled, *arguments: int) -> int:
    if function not in _linked:
        _linked[function] = link(function)
    return _linked[function](*arguments)


@compiled
def count_down(n):
    """A generator whose loop skips numbers."""
    while n > 0:
        n -= 1
        if n % 4 == 0:
            continue
        yield n


@compiled
def sum_generated(n, limit):
    total = 0
    for i in count_down(n):
        if i % 3 == 0:
            continue
        for j in count_down(i):
            total += j
        if i < limit:
            return -total
    return total


@pytest.mark.parametrize(("n", "limit"), [(0, 0), (9, 0), (30, 0), (30, 5)])
def test_generator_is_inlined_into_its_loop(n, limit):
    def generate(n):
        return [i for i in range(n - 1, -1, -1) if i % 4]

    expected = 0
    for i in generate(n):
        if i % 3 == 0:
            continue
        expected += sum(generate(i))
        if i < limit:
            expected = -expected
            break
    assert call(sum_generated, n, limit) == expected


@compiled(result=f64)
def mean(x, n):
    total = 0.0
    for i in range(n):
        total += load_float(x, i)
    return total / n


@compiled(result=i1)
def is_above(value, limit):
    return value > limit or np.isnan(value)


@compiled(result=f32, inline=True)
def clip(value, limit):
    return limit if is_above(value, limit) else value


@compiled
def clip_all(x, n, out):
    for i in range(n):
        store_float(x, i, clip(load_float(x, i), np.float32(1.5)))
    store_double(out, 0, mean(x, n))


def test_functions_call_each_other_with_numbers_of_all_types():
    x = np.array([0.25, np.nan, 7, -3, np.inf], np.float32)
    out = ctypes.c_double()
    call(clip_all, x.ctypes.data, len(x), ctypes.addressof(out))
    assert x.tolist() == [0.25, 1.5, 1.5, -3, 1.5]
    assert out.value == x.astype(np.float64).mean()


KIND: Any = Parameter()


def make_nested(factor):
    @compiled
    def nested(x):
        if KIND == 0:
            return x * factor
        return missing(x)  # type: ignore[name-defined] # noqa: F821

    return nested


def test_parameters_leave_out_branches():
    double, triple = (link(make_nested(factor), {KIND: 0}) for factor in (2, 3))
    assert (double(7), triple(7)) == (14, 21)
    with pytest.raises(AttributeError, match="missing") as error:
        link(make_nested(2), {KIND: 1})
    assert "test_compiler.py" in error.value.__notes__[0]


@compiled
def decide(x):
    if KIND == 1 and load_float(x, 0) > 2:
        return 1
    if x != 0 and KIND == 0 and load_float(x, 0) > 2:
        return 2
    return int(x == 0 or load_float(x, 0) < 0)


def test_conditions_evaluate_up_to_the_operand_that_decides():
    """Address 0 cannot be read."""
    negative, three = (np.array([value], np.float32) for value in (-1, 3))
    for kind, expected in ((0, (1, 1, 2)), (1, (1, 1, 1))):
        function = link(decide, {KIND: kind})
        if kind == 0:
            assert function(0) == expected[0]
        assert function(negative.ctypes.data) == expected[1]
        assert function(three.ctypes.data) == expected[2]


def let_others_run(*_):
    return sum(range(50))  # code in which another thread may take over


def test_threads_parse_a_file_at_the_same_time(request):
    """Python 3.11's parser fails if another thread parses while garbage is collected."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    request.addfinalizer(lambda: gc.set_threshold(*thresholds))
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    gc.set_threshold(50, 2, 2)
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(let_others_run)
    request.addfinalizer(lambda: gc.callbacks.remove(let_others_run))
    parse = compiler._functions_of_file.__wrapped__
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(parse, [forward.__file__] * 8)]
    assert all(len(one) == len(results[0]) for one in results)
