"""A pass: some tokens through the whole model, by as many threads as there are.

All threads run `forward` with the same job. In each phase they claim chunks of the work; between
phases they wait for the chunks, see `sharing`. Everything lies in memory that the job points to.

Residual vectors go from `x` (after a block) to `y` (after its attention) and back. Where the norm
stands after the addition, it is computed by whoever needs its result.
"""

from numba import njit, types

from tgen.engine.cpu.kernels import (
    activate,
    add_row,
    attend,
    layer_norm,
    products,
    rms_norm,
    rotate,
)
from tgen.engine.cpu.simd import float_at, float_of_bits, int_at, put_float
from tgen.engine.cpu.work_queue import chunk_done, claim, wait

from tgen.engine.cpu.job_layout import (  # isort: skip
    ACTIVATION, ATTENTION_NORM, CAPACITY, COLUMNS, COS_AT, DOWN, EPS_BITS, FEED, FEED_NORM,
    FEED_STEP, GATE, GATE_BIAS, GATE_OFFSET, HEAD, HEAD_DIM, HEAD_STEP, HIDDEN_AT, KEYS_AT,
    K_NORM, LANES, LAYERS_AT, LAYER_NORM, LOCAL_AT, LOCAL_STEP, LOGITS_AT, MIXED_AT, N_CHUNKS,
    N_HEADS, N_HEAD_CHUNKS, N_KV_HEADS, N_LAYERS, N_ROWS, N_SCORED, N_THREADS, N_TOKENS, OUT,
    PHASES_A_LAYER, POSITION, POST_NORM, QKV, QKV_AT, QKV_BIAS, QK_NORM, Q_NORM, ROTARY, ROW,
    SCALE_BITS, SCORED, SCORES_OFFSET, SIN_AT, STORED, SWIGLU, TOKENS_AT, TOKEN_COLUMNS, UP,
    UP_BIAS, VALUES_AT, VOCABULARY, WIDTH, WIDTH_STEP, WINDOW, WORDS_AT, X_AT, Y_AT,
)  # fmt: skip


@njit(inline="always")
def _bounds(chunk, n_chunks, n_rows):
    """The rows of a chunk: whole tiles of eight."""
    tiles = (n_rows + 7) // 8
    return (
        min(n_rows, tiles * chunk // n_chunks * 8),
        min(n_rows, tiles * (chunk + 1) // n_chunks * 8),
    )


@njit(inline="always")
def _layer(job, layer, name):
    return int_at(int_at(job, LAYERS_AT), layer * COLUMNS + name)


@njit
def _normed(job, x, layer, name, out):
    """All tokens' vectors through a norm of `layer`; before the first layer, as they are."""
    n, step = int_at(job, WIDTH), int_at(job, WIDTH_STEP)
    eps = float_of_bits(types.int32(int_at(job, EPS_BITS)))
    for i in range(int_at(job, N_TOKENS)):
        row, place = x + i * step * 4, out + i * step * 4
        if layer < 0:
            for j in range(n):
                put_float(place, j, float_at(row, j))
        elif int_at(job, LAYER_NORM):
            weight, bias = _layer(job, layer, name), _layer(job, layer, name + 1)
            layer_norm(row, weight, bias, n, eps, place)
        else:
            rms_norm(row, _layer(job, layer, name), n, eps, place)


@njit
def _block_input(job, layer, out):
    """What a layer's attention looks at."""
    if int_at(job, POST_NORM):
        _normed(job, int_at(job, X_AT), layer - 1, FEED_NORM, out)
    else:
        _normed(job, int_at(job, X_AT), layer, ATTENTION_NORM, out)


@njit
def _feed_input(job, layer, out):
    """What a layer's feed-forward looks at."""
    name = ATTENTION_NORM if int_at(job, POST_NORM) else FEED_NORM
    _normed(job, int_at(job, Y_AT), layer, name, out)


@njit
def _project(job, layer, number, phase, local):
    """Phase 1: queries, keys and values."""
    n_rows = (int_at(job, N_HEADS) + 2 * int_at(job, N_KV_HEADS)) * int_at(job, HEAD_STEP)
    n_tokens, n_chunks = int_at(job, N_TOKENS), int_at(job, N_CHUNKS)
    qkv, ready = int_at(job, QKV_AT), False
    while True:
        chunk = claim(int_at(job, WORDS_AT), phase, number, n_chunks)
        if chunk < 0:
            break
        if not ready:
            _block_input(job, layer, local)
            ready = True
        a, b = _bounds(chunk, n_chunks, n_rows)
        w, width = _layer(job, layer, QKV), int_at(job, WIDTH_STEP)
        products(int_at(job, STORED), w, a, b, width, local, n_tokens, qkv, n_rows)
        for i in range(n_tokens):
            add_row(qkv + i * n_rows * 4, 0, _layer(job, layer, QKV_BIAS), a, b)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_chunks)


@njit(inline="always")
def _cached(job, layer, row, head):
    """Where a row's keys of a layer and head begin in the cache, in numbers."""
    rows = layer * int_at(job, N_ROWS) + row
    place = (rows * int_at(job, N_KV_HEADS) + head) * int_at(job, CAPACITY)
    return place * int_at(job, HEAD_STEP)


@njit
def _remember_token(job, layer, i):
    n_heads, n_kv, step = int_at(job, N_HEADS), int_at(job, N_KV_HEADS), int_at(job, HEAD_STEP)
    size, half = int_at(job, HEAD_DIM), int_at(job, HEAD_DIM) // 2
    vectors = int_at(job, QKV_AT) + i * (n_heads + 2 * n_kv) * step * 4
    token = int_at(job, TOKENS_AT) + i * TOKEN_COLUMNS * 8
    position, row = int_at(token, POSITION), int_at(token, ROW)
    eps = float_of_bits(types.int32(int_at(job, EPS_BITS)))
    for head in range(n_heads + n_kv):
        vector = vectors + head * step * 4
        if int_at(job, QK_NORM):
            weight = _layer(job, layer, Q_NORM if head < n_heads else K_NORM)
            rms_norm(vector, weight, size, eps, vector)
        if int_at(job, ROTARY):
            turn = position * half * 4
            rotate(vector, int_at(job, COS_AT) + turn, int_at(job, SIN_AT) + turn, half)
    for head in range(n_kv):
        place, inside = _cached(job, layer, row, head), position % LANES
        key = vectors + (n_heads + head) * step * 4
        value = key + n_kv * step * 4
        block = place + (position - inside) * step + inside  # see `make_scores`
        for d in range(step):
            put_float(int_at(job, KEYS_AT), block + d * LANES, float_at(key, d))
            put_float(int_at(job, VALUES_AT), place + position * step + d, float_at(value, d))


@njit
def _remember(job, layer, number, phase):
    """Phase 2: norms and rotation of queries and keys; keys and values into the cache."""
    n_tokens = int_at(job, N_TOKENS)
    while True:
        i = claim(int_at(job, WORDS_AT), phase, number, n_tokens)
        if i < 0:
            break
        _remember_token(job, layer, i)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_tokens)


@njit
def _attention(job, layer, number, phase, scores):
    """Phase 3: each query's mix of the values it sees."""
    n_heads, n_kv, step = int_at(job, N_HEADS), int_at(job, N_KV_HEADS), int_at(job, HEAD_STEP)
    n_chunks = int_at(job, N_TOKENS) * n_heads
    scale = float_of_bits(types.int32(int_at(job, SCALE_BITS)))
    while True:
        chunk = claim(int_at(job, WORDS_AT), phase, number, n_chunks)
        if chunk < 0:
            break
        i, head = chunk // n_heads, chunk % n_heads
        token = int_at(job, TOKENS_AT) + i * TOKEN_COLUMNS * 8
        place = _cached(job, layer, int_at(token, ROW), head // (n_heads // n_kv)) * 4
        query = int_at(job, QKV_AT) + (i * (n_heads + 2 * n_kv) + head) * step * 4
        n, window = int_at(token, POSITION) + 1, int_at(job, WINDOW)
        first = max(0, n - window) if window else 0
        before = first // LANES * LANES  # keys lie sixteen together
        place += before * step * 4
        keys, values = int_at(job, KEYS_AT) + place, int_at(job, VALUES_AT) + place
        out = int_at(job, MIXED_AT) + chunk * step * 4
        first, n = first - before, n - before
        attend(query, keys, values, first, n, step, scale, scores, out)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_chunks)


@njit
def _add_up(job, layer, number, phase, x, n, matrix, before, out, local):
    """Phases 4 and 6: out = matrix x + bias + before; where norms stand after the addition, `local`
    is to have that of `before`, and is added in its place."""
    n_tokens, n_chunks = int_at(job, N_TOKENS), int_at(job, N_CHUNKS)
    width, step, ready = int_at(job, WIDTH), int_at(job, WIDTH_STEP), False
    while True:
        chunk = claim(int_at(job, WORDS_AT), phase, number, n_chunks)
        if chunk < 0:
            break
        if int_at(job, POST_NORM):
            if not ready:
                if matrix == OUT:
                    _block_input(job, layer, local)
                else:
                    _feed_input(job, layer, local)
            before, ready = local, True
        a, b = _bounds(chunk, n_chunks, width)
        products(int_at(job, STORED), _layer(job, layer, matrix), a, b, n, x, n_tokens, out, step)
        for i in range(n_tokens):
            row = i * step * 4
            add_row(out + row, before + row, _layer(job, layer, matrix + 1), a, b)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_chunks)


@njit
def _feed(job, layer, number, phase, local, gate):
    """Phase 5: the feed-forward's wide vectors."""
    n_tokens, n_chunks = int_at(job, N_TOKENS), int_at(job, N_CHUNKS)
    feed, step, width = int_at(job, FEED), int_at(job, FEED_STEP), int_at(job, WIDTH_STEP)
    hidden, ready = int_at(job, HIDDEN_AT), False
    kind, stored = int_at(job, ACTIVATION), int_at(job, STORED)
    while True:
        chunk = claim(int_at(job, WORDS_AT), phase, number, n_chunks)
        if chunk < 0:
            break
        if not ready:
            _feed_input(job, layer, local)
            ready = True
        a, b = _bounds(chunk, n_chunks, feed)
        products(stored, _layer(job, layer, UP), a, b, width, local, n_tokens, hidden, step)
        if kind == SWIGLU:
            products(stored, _layer(job, layer, GATE), a, b, width, local, n_tokens, gate, step)
        for i in range(n_tokens):
            row = i * step * 4
            add_row(hidden + row, 0, _layer(job, layer, UP_BIAS), a, b)
            if kind == SWIGLU:
                add_row(gate + row, 0, _layer(job, layer, GATE_BIAS), a, b)
            activate(kind, hidden + row, gate + row, a, b)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_chunks)


@njit
def _logits(job, number, phase, local):
    """The last phase: logits of the tokens that ask for them."""
    n_scored, n_chunks = int_at(job, N_SCORED), int_at(job, N_HEAD_CHUNKS)
    last, step, size = int_at(job, N_LAYERS), int_at(job, WIDTH_STEP), int_at(job, VOCABULARY)
    if n_scored == 0:
        return
    ready = False
    while True:
        chunk = claim(int_at(job, WORDS_AT), phase, number, n_chunks)
        if chunk < 0:
            break
        if not ready:
            _normed(job, int_at(job, X_AT), last, ATTENTION_NORM, local)
            k = 0  # those that ask move to the front
            for i in range(int_at(job, N_TOKENS)):
                if int_at(int_at(job, TOKENS_AT), i * TOKEN_COLUMNS + SCORED):
                    for j in range(step):
                        put_float(local, k * step + j, float_at(local, i * step + j))
                    k += 1
            ready = True
        a, b = _bounds(chunk, n_chunks, size)
        w, logits = _layer(job, last, HEAD), int_at(job, LOGITS_AT)
        products(int_at(job, STORED), w, a, b, step, local, n_scored, logits, size)
        chunk_done(int_at(job, WORDS_AT), phase)
    wait(int_at(job, WORDS_AT), phase, number, n_chunks)


@njit
def forward(job, number, thread):
    """Pass `number`, as thread `thread` of the job's.

    No pointer of the job is followed without a claim: when a later job stands there, there is none.
    """
    if thread >= int_at(job, N_THREADS):
        return
    local = int_at(job, LOCAL_AT) + thread * int_at(job, LOCAL_STEP)
    gate, scores = local + int_at(job, GATE_OFFSET), local + int_at(job, SCORES_OFFSET)
    x, y = int_at(job, X_AT), int_at(job, Y_AT)
    mixed, hidden = int_at(job, MIXED_AT), int_at(job, HIDDEN_AT)
    n_mixed, n_hidden = int_at(job, N_HEADS) * int_at(job, HEAD_STEP), int_at(job, FEED_STEP)
    for layer in range(int_at(job, N_LAYERS)):
        phase = layer * PHASES_A_LAYER
        _project(job, layer, number, phase, local)
        _remember(job, layer, number, phase + 1)
        _attention(job, layer, number, phase + 2, scores)
        _add_up(job, layer, number, phase + 3, mixed, n_mixed, OUT, x, y, local)
        _feed(job, layer, number, phase + 4, local, gate)
        _add_up(job, layer, number, phase + 5, hidden, n_hidden, DOWN, y, x, local)
    _logits(job, number, int_at(job, N_LAYERS) * PHASES_A_LAYER, local)
