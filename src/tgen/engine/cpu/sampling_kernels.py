"""Sampling of a token from a row of float32 logits, and what the report about a token needs.

Probabilities are float32 exponentials, added as float64. Only as many candidates are sorted as the
sample needs, since the most likely ones almost always suffice.
"""

import numpy as np
from llvmlite import ir

from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.intrinsics import (
    address,
    f32,
    f64,
    i1,
    i64,
    load_double,
    load_float,
    load_int,
    primitive,
    store_double,
    store_float,
    store_int,
)
from tgen.engine.cpu.job_layout import (
    CANDIDATE_LOGITS_PTR,
    CANDIDATES_PTR,
    LANES,
    LOG_MIN_P,
    N_CANDIDATES,
    RESULT,
    ROW_PTR,
    SAMPLE_POSITION,
    SAMPLE_SEED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
)
from tgen.engine.cpu.simd import (
    VECTOR,
    ZEROS,
    add,
    broadcast,
    element,
    exp,
    exp_vector,
    integer,
    larger,
    load,
    loop,
    reduce,
    store,
)

_FIRST_CANDIDATES, _GROWTH = 64, 16  # sorted at first; how many times as many next
_PARTS, _MIN_PART = 128, 8  # of a row, whose maxima bound the best numbers; their size
_WIDE = ir.VectorType(f64, LANES)
_WIDE_ZEROS = ir.Constant(_WIDE, [0.0] * LANES)
_F = np.float32
# Philox's factors, and the steps of its keys
_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_I128 = ir.IntType(128)


@primitive(i64, i64)
def _uniform(b, seed, position):
    """The number in [0, 1) that `random_numbers.uniforms` returns for a token: from 10 rounds of
    Philox (Salmon et al. 2011), for the key (seed, 0) and a counter of four words."""
    words = [b.add(position, integer(1)), *3 * [integer(0)]]  # as NumPy counts
    keys = [seed, integer(0)]
    for _ in range(10):
        halves = []
        for word, factor in zip(words[::2], _FACTORS, strict=True):
            product = b.mul(b.zext(word, _I128), ir.Constant(_I128, factor))
            high = b.lshr(product, ir.Constant(_I128, 64))
            halves.append((b.trunc(high, i64), b.trunc(product, i64)))
        (high, low), (other_high, other_low) = halves
        words = [
            b.xor(b.xor(other_high, words[1]), keys[0]),
            other_low,
            b.xor(b.xor(high, words[3]), keys[1]),
            low,
        ]
        keys = [b.add(key, integer(step)) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return b.fmul(b.uitofp(b.lshr(words[0], integer(11)), f64), ir.Constant(f64, 2.0**-53))


@primitive(address, i64)
def _vector_maximum(b, x, n):
    """The largest of n numbers in whole vectors; NaN if there is one."""
    lowest, one = (ir.Constant(VECTOR, [value] * LANES) for value in (-np.inf, 1.0))
    with loop(b, n, 2, step=LANES, start=lowest) as (j, (most, is_nan), new):
        value = load(b, element(b, x, j, 4), VECTOR)
        new.append(larger(b, value, most))
        new.append(b.select(b.fcmp_unordered("uno", value, value), one, is_nan))
    most, is_nan = (reduce(b, vector, larger) for vector in new)
    found = b.fcmp_ordered(">", is_nan, ir.Constant(f32, 0.0))
    return b.select(found, ir.Constant(f32, np.nan), most)


@primitive(address, i64, f32, f32)
def _vector_exp_sum(b, x, n, maximum, factor):
    """The sum of e^(factor * (x[i] - maximum)) over n numbers in whole vectors."""
    with loop(b, n, 1, step=LANES, start=_WIDE_ZEROS) as (j, (total,), new):
        shifted = b.fsub(load(b, element(b, x, j, 4), VECTOR), broadcast(b, maximum))
        value = exp_vector(b, b.fmul(shifted, broadcast(b, factor)))
        new.append(b.fadd(total, b.fpext(value, _WIDE)))
    return reduce(b, new[0], add)


@primitive(address, i64, f32, f32)
def _exponentiate(b, x, n, maximum, factor):
    """x[i] = e^(factor * (x[i] - maximum)) for n numbers, rounded up to whole vectors."""
    with loop(b, n, 0, step=LANES) as (j, _, _):
        pointer = element(b, x, j, 4)
        shifted = b.fsub(load(b, pointer, VECTOR), broadcast(b, maximum))
        store(b, exp_vector(b, b.fmul(shifted, broadcast(b, factor))), pointer)


@primitive(address, i64, f32)
def _vector_weighted_sum(b, x, n, maximum):
    """The sum of e^s * s, s = x[i] - maximum, over n numbers in whole vectors."""
    with loop(b, n, 1, step=LANES, start=_WIDE_ZEROS) as (j, (total,), new):
        s = b.fsub(load(b, element(b, x, j, 4), VECTOR), broadcast(b, maximum))
        s = larger(b, s, ir.Constant(VECTOR, [-1e4] * LANES))  # -inf would make NaN of 0
        new.append(b.fadd(total, b.fpext(b.fmul(exp_vector(b, s), s), _WIDE)))
    return reduce(b, new[0], add)


@primitive(address, i64, f32)
def _vector_count_above(b, x, n, limit):
    """Count those of n numbers, in whole vectors, that are above the limit."""
    with loop(b, n, 1, step=LANES) as (j, (count,), new):
        above = b.fcmp_ordered(">", load(b, element(b, x, j, 4), VECTOR), broadcast(b, limit))
        new.append(b.fadd(count, b.select(above, ir.Constant(VECTOR, [1.0] * LANES), ZEROS)))
    return reduce(b, new[0], add)


@primitive(address, i64, address)
def _part_maxima(b, x, n, out):
    """The largest of each of _PARTS parts of n numbers, a multiple of _PARTS."""
    lowest, n_vectors = ir.Constant(VECTOR, [-np.inf] * LANES), _PARTS // LANES
    with loop(b, n, n_vectors, step=_PARTS, start=lowest) as (j, most, new):
        for u, vector in enumerate(most):
            pointer = b.add(element(b, x, j, 4), integer(4 * LANES * u))
            new.append(larger(b, load(b, pointer, VECTOR), vector))
    for u, vector in enumerate(new):
        store(b, vector, b.add(out, integer(4 * LANES * u)))


@compiled(result=f32)
def _lower_bound(x, n, k, maximum, scratch):
    """A number that k or more of the n numbers exceed, and few others, or -inf."""
    if n < _MIN_PART * _PARTS:
        return _F(-np.inf)
    _part_maxima(x, n // _PARTS * _PARTS, scratch)
    bound, step = _F(-np.inf), _F(32)
    while step > 0.1:
        tried = max(bound, maximum - _F(64)) + step
        if _vector_count_above(scratch, _PARTS, tried) >= k:
            bound = tried
        step *= _F(0.5)
    return bound


@compiled(result=f32)
def _maximum(x, n):
    whole = n // LANES * LANES
    most = _vector_maximum(x, whole) if whole else _F(-np.inf)
    for i in range(whole, n):
        value = load_float(x, i)
        if value > most or np.isnan(value):
            most = value
    return most


@compiled(result=f64)
def _exp_sum(x, n, maximum, factor):
    whole = n // LANES * LANES
    total = _vector_exp_sum(x, whole, maximum, factor) if whole else 0.0
    for i in range(whole, n):
        total += exp((load_float(x, i) - maximum) * factor)
    return total


@compiled(result=i1, inline=True)
def _is_worse(ids, values, i, j):
    x, y = load_float(values, i), load_float(values, j)
    return x < y or (x == y and load_int(ids, i) > load_int(ids, j))


@compiled(inline=True)
def _swap(ids, values, i, j):
    token, value = load_int(ids, i), load_float(values, i)
    store_int(ids, i, load_int(ids, j))
    store_float(values, i, load_float(values, j))
    store_int(ids, j, token)
    store_float(values, j, value)


@compiled
def _sift_down(ids, values, i, n):
    """Restore the heap of the worst below index i."""
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and _is_worse(ids, values, child + 1, child):
            child += 1
        if _is_worse(ids, values, i, child):
            break
        _swap(ids, values, i, child)
        i = child


@compiled
def _sort_best(x, n, k, maximum, ids, values):
    """Write the k best tokens, best first, equals by ascending id; return how many there are, fewer
    if other logits are -inf."""
    found, i, bound = 0, 0, _lower_bound(x, n, k, maximum, values)
    while i < n:
        # Skip vectors without a better number.
        if found == k:
            bound = load_float(values, 0)
        if i + LANES <= n and _vector_count_above(x + i * 4, LANES, bound) == 0:
            i += LANES
            continue
        end = min(n, i + LANES)
        while i < end:
            value = load_float(x, i)
            if found < k and value > bound:
                store_int(ids, found, i)
                store_float(values, found, value)
                found += 1
                if found == k:
                    for parent in range(k // 2, -1, -1):
                        _sift_down(ids, values, parent, k)
            elif found == k and value > load_float(values, 0):
                store_int(ids, 0, i)
                store_float(values, 0, value)
                _sift_down(ids, values, 0, k)
            i += 1
    if found < k:
        for parent in range(found // 2, -1, -1):
            _sift_down(ids, values, parent, found)
    for last in range(found - 1, 0, -1):  # a heap sort: the worst goes last
        _swap(ids, values, 0, last)
        _sift_down(ids, values, 0, last)
    return found


@compiled
def _sample_candidate(request, x, n, ids, values, maximum, found, is_all):
    """Return the sampled token, or -1 if more candidates than the `found` first ones are needed."""
    top_p, log_min_p = load_double(request, TOP_P), load_double(request, LOG_MIN_P)
    factor = _F(1 / load_double(request, TEMPERATURE))
    if top_p < 1:
        total = 0.0
        if is_all:
            for i in range(found):
                total += exp(load_float(values, i) - maximum)
        else:
            total = _exp_sum(x, n, maximum, _F(1))
        more_likely, kept = 0.0, 0
        while kept < found and (kept == 0 or more_likely < top_p * total):
            more_likely += exp(load_float(values, kept) - maximum)
            kept += 1
        if kept == found and not is_all and more_likely < top_p * total:
            return -1
        found, is_all = kept, True
    if log_min_p > -np.inf:
        kept = 0
        while kept < found and np.float64(load_float(values, kept)) >= maximum + log_min_p:
            kept += 1
        if kept == found and not is_all:
            return -1
        found, is_all = kept, True
    total = 0.0
    _exponentiate(values, found, maximum, factor)
    if is_all:
        for i in range(found):
            total += load_float(values, i)
    else:
        total = _exp_sum(x, n, maximum, factor)
    u = _uniform(load_int(request, SAMPLE_SEED), load_int(request, SAMPLE_POSITION))
    limit, sum_so_far = u * total, 0.0
    for i in range(found):
        sum_so_far += load_float(values, i)
        if sum_so_far > limit:
            return load_int(ids, i)
    return load_int(ids, found - 1) if is_all else -1


@compiled
def sample_row(request):
    """Sample a token by top-k, top-p, min-p and temperature, in this order; write it as the result,
    or -1 if the largest logit is not finite.

    `LOG_MIN_P` is the logarithm of min-p, and top-k 0 keeps all. `CANDIDATES_PTR` and
    `CANDIDATE_LOGITS_PTR` have room for n int64 numbers and whole vectors of n float32 numbers.
    """
    x, n = int(load_double(request, ROW_PTR)), int(load_double(request, N_CANDIDATES))
    ids, values = (
        int(load_double(request, CANDIDATES_PTR)),
        int(load_double(request, CANDIDATE_LOGITS_PTR)),
    )
    top_k, maximum = int(load_double(request, TOP_K)), _maximum(x, n)
    token, k = -1, min(n, top_k if top_k else _FIRST_CANDIDATES)
    while token < 0 and np.isfinite(maximum):
        found = _sort_best(x, n, k, maximum, ids, values)
        is_all = top_k > 0 or k == n or found < k
        token = _sample_candidate(request, x, n, ids, values, maximum, found, is_all)
        k = min(n, _GROWTH * k)
    store_double(request, RESULT, np.float64(token))


@compiled
def describe_token(request):
    """Write the logarithm of a token's probability, how many tokens are more likely, and the
    entropy in nats."""
    x, n = int(load_double(request, ROW_PTR)), int(load_double(request, N_CANDIDATES))
    maximum, chosen = _maximum(x, n), load_float(x, int(load_double(request, TOKEN)))
    total, whole = _exp_sum(x, n, maximum, _F(1)), n // LANES * LANES
    weighted, rank = 0.0, 0.0
    if whole:
        weighted = _vector_weighted_sum(x, whole, maximum)
        rank = np.float64(_vector_count_above(x, whole, chosen))
    for i in range(whole, n):
        s = max(load_float(x, i) - maximum, _F(-1e4))
        weighted += exp(s) * s
        rank += load_float(x, i) > chosen
    store_double(request, RESULT, np.float64(chosen - maximum) - np.log(total))
    store_double(request, RESULT + 1, rank)
    store_double(request, RESULT + 2, max(0.0, np.log(total) - weighted / total))
