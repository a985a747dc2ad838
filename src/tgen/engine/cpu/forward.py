"""One pass: a batch of tokens through the whole model, computed by all threads together.

Every thread runs `forward` with the same job: in each phase it claims chunks of the work, then
waits until all chunks are done. Residual vectors alternate between two buffers, `x` (block output)
and `y` (after attention). With post-norm, each thread normalizes them again where it needs them.
If the outputs of the sublayers are normalized, `x` is the residual stream and `y` such an output.
"""

from numba import njit, types

from tgen.engine.cpu.intrinsics import (
    bits_to_float,
    load_float,
    load_int,
    store_float,
    store_int,
)
from tgen.engine.cpu.kernels import (
    activate,
    add_row,
    attend,
    embed,
    layer_norm,
    merge,
    products,
    quantize,
    rms_norm,
    rotate,
    scale_row,
    store_cached,
)
from tgen.engine.cpu.work_queue import claim_chunks

from tgen.engine.cpu.job_layout import (  # isort: skip
    ACTIVATION, ATTENTION_INPUT_PTR, ATTENTION_NORM, ATTENTION_OUTPUT_NORM, ATTENTION_PTR,
    CACHE_DTYPE, CAPACITY, COS_PTR, DOWN, D_FF, D_FF_PADDED, D_MODEL, D_MODEL_PADDED, EACH_HEAD,
    EMBEDDING, EMBEDDING_SCALE_BITS, EPS_BITS, FEED_FORWARD_NORM, FEED_FORWARD_OUTPUT_NORM,
    FIRST_TOKEN, FLOAT32, GATE, GATE_BIAS, GATE_OFFSET, GEGLU, GROUP, HEAD_DIM, HEAD_DIM_PADDED,
    HIDDEN_INPUT_PTR, HIDDEN_PTR, INPUTS_OFFSET, INPUT_BYTES, INT8, KEYS_PER_RANGE, KEYS_PTR,
    K_NORM, LANES, LAYERS_PTR, LAYER_NORM, LM_HEAD, LOCAL, LOCAL_COS_PTR, LOCAL_SIN_PTR, LOGITS_PTR,
    NORM_PLACEMENT, N_HEADS, N_KV_HEADS, N_LAYERS, N_LOGITS, N_LOGITS_SPANS, N_PARTS, N_RANGES,
    N_ROTATED, N_SEQUENCES, N_SPANS, N_THREADS, N_TOKENS, OUT, OUTPUT, OVER_HEADS, PANEL,
    PARTIALS_PTR, PHASES_PER_LAYER, POSITION, POSITIONS, POST, PRE, QKV, QKV_BIAS, QKV_PTR, QK_NORM,
    QUERIES, QUEUE_PTR, Q_NORM, RESIDUAL_SCALE_BITS, ROPE, SANDWICH, SCALE_BITS, SCORES_OFFSET,
    SCRATCH_BYTES, SCRATCH_PTR, SEQUENCE, SIN_PTR, SPANS_PTR, SPAN_COLUMNS, SWIGLU, TABLE_COLUMNS,
    TOKENS_PTR, TOKEN_COLUMNS, TOKEN_COUNT, TOKEN_ID, UP, UP_BIAS, VALUES_PTR, VOCAB_SIZE,
    WEIGHT_DTYPE, WINDOW, X_PTR, Y_PTR,
)  # fmt: skip


_CHUNKS_PER_THREAD = 32  # at most


@njit(inline="always")
def _rows_per_chunk(job, n_rows):
    """Few rows, so that threads finish together, but whole groups and tiles."""
    rows = GROUP if load_int(job, N_TOKENS) > 1 else 2 * GROUP
    most = _CHUNKS_PER_THREAD * load_int(job, N_THREADS) * rows
    return (n_rows + most - 1) // most * rows


@njit(inline="always")
def _input_step(job, n):
    """Bytes from one input of products with n numbers to the next."""
    return n // GROUP * (INPUT_BYTES if load_int(job, WEIGHT_DTYPE) == INT8 else 4 * GROUP)


@njit
def _make_inputs(job, x, n, count, out):
    """Make the inputs of products from `count` vectors of n numbers; return their address."""
    if load_int(job, WEIGHT_DTYPE) != INT8:
        return x
    for i in range(count):
        quantize(x + i * n * 4, n, out + i * _input_step(job, n))
    return out


@njit(inline="always")
def _weights(job, layer, name):
    return load_int(load_int(job, LAYERS_PTR), layer * TABLE_COLUMNS + name)


@njit
def _normalize(job, x, layer, name, n_tokens, out):
    """Apply a norm of `layer` to the vectors of the first tokens; layer -1, or no norm, copies
    them."""
    n, step = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    eps = bits_to_float(types.int32(load_int(job, EPS_BITS)))
    for i in range(n_tokens):
        source, target = x + i * step * 4, out + i * step * 4
        if layer < 0 or _weights(job, layer, name) == 0:
            for j in range(n):
                store_float(target, j, load_float(source, j))
        elif load_int(job, LAYER_NORM):
            weight, bias = _weights(job, layer, name), _weights(job, layer, name + 1)
            layer_norm(source, weight, bias, n, eps, target)
        else:
            rms_norm(source, _weights(job, layer, name), n, n, eps, target)


@njit
def _attention_input(job, layer, n_tokens, out):
    if load_int(job, NORM_PLACEMENT) == POST:
        _normalize(job, load_int(job, X_PTR), layer - 1, FEED_FORWARD_NORM, n_tokens, out)
    else:
        _normalize(job, load_int(job, X_PTR), layer, ATTENTION_NORM, n_tokens, out)


@njit
def _feed_forward_input(job, layer, n_tokens, out):
    placement = load_int(job, NORM_PLACEMENT)
    name = ATTENTION_NORM if placement == POST else FEED_FORWARD_NORM
    source = Y_PTR if placement in (PRE, POST) else X_PTR
    _normalize(job, load_int(job, source), layer, name, n_tokens, out)


@njit
def _embed(job, number, phase):
    """The first phase: the vectors of the tokens, with those of their positions."""
    n, padded = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    scale = bits_to_float(types.int32(load_int(job, EMBEDDING_SCALE_BITS)))
    dtype, last = load_int(job, WEIGHT_DTYPE), load_int(job, N_LAYERS)
    for i in claim_chunks(load_int(job, QUEUE_PTR), phase, number, load_int(job, N_TOKENS)):
        token = load_int(job, TOKENS_PTR) + i * TOKEN_COLUMNS * 8
        out = load_int(job, X_PTR) + i * padded * 4
        embed(dtype, _weights(job, last, EMBEDDING), load_int(token, TOKEN_ID), n, padded, out)
        if scale != 1:
            scale_row(out, scale, 0, n)
        positions = _weights(job, last, POSITIONS)
        if positions != 0:
            add_row(out, positions + load_int(token, POSITION) * n * 4, 0, 0, n)


@njit(inline="always")
def _normalizes_outputs(job):
    placement = load_int(job, NORM_PLACEMENT)
    return placement in (OUTPUT, SANDWICH)


@njit(inline="always")
def _n_outputs(job, layer):
    """How many tokens need the output of a layer; the last one's is needed for logits only."""
    is_last = layer == load_int(job, N_LAYERS) - 1
    return load_int(job, N_LOGITS if is_last else N_TOKENS)


@njit
def _project_qkv(job, layer, number, phase, scratch):
    """Phase 1: queries, keys and values."""
    n_heads, step = load_int(job, N_HEADS), load_int(job, HEAD_DIM_PADDED)
    n_rows = (n_heads + 2 * load_int(job, N_KV_HEADS)) * step
    n_tokens, size = load_int(job, N_TOKENS), _rows_per_chunk(job, n_rows)
    n_chunks = (n_rows + size - 1) // size
    qkv, ready, width = load_int(job, QKV_PTR), False, load_int(job, D_MODEL_PADDED)
    inputs = scratch + load_int(job, INPUTS_OFFSET)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_chunks):
        if not ready:
            _attention_input(job, layer, n_tokens, scratch)
            inputs = _make_inputs(job, scratch, width, n_tokens, inputs)
            ready = True
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        w = _weights(job, layer, QKV)
        n = _n_outputs(job, layer) if b <= n_heads * step else n_tokens
        products(load_int(job, WEIGHT_DTYPE), w, a, b, width, inputs, n, qkv, n_rows)
        for i in range(n):
            add_row(qkv + i * n_rows * 4, 0, _weights(job, layer, QKV_BIAS), a, b)


@njit(inline="always")
def _cache_offset(job, layer, sequence, head):
    """Offset of a layer's and head's keys in the KV cache, in numbers."""
    block = (layer * load_int(job, N_SEQUENCES) + sequence) * load_int(job, N_KV_HEADS) + head
    return block * load_int(job, CAPACITY) * load_int(job, HEAD_DIM_PADDED)


@njit
def _normalize_heads(job, layer, i):
    """The norm over all queries of a token, and over all keys."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, size = load_int(job, HEAD_DIM_PADDED), load_int(job, HEAD_DIM)
    eps = bits_to_float(types.int32(load_int(job, EPS_BITS)))
    q = load_int(job, QKV_PTR) + i * (n_heads + 2 * n_kv) * step * 4
    k, n_q, n_k = q + n_heads * step * 4, n_heads * step, n_kv * step
    rms_norm(q, _weights(job, layer, Q_NORM), n_q, n_heads * size, eps, q)
    rms_norm(k, _weights(job, layer, K_NORM), n_k, n_kv * size, eps, k)


@njit
def _rotate_head(job, layer, i, head):
    """Norm and rotation of a token's query or key head; keys follow the queries."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, size = load_int(job, HEAD_DIM_PADDED), load_int(job, HEAD_DIM)
    vector = load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + head) * step * 4
    half, rope = load_int(job, N_ROTATED) // 2, _weights(job, layer, ROPE)
    if load_int(job, QK_NORM) == EACH_HEAD:
        eps = bits_to_float(types.int32(load_int(job, EPS_BITS)))
        weight = _weights(job, layer, Q_NORM if head < n_heads else K_NORM)
        rms_norm(vector, weight, size, size, eps, vector)
    if rope:
        angles = _token(job, i, POSITION) * half * 4
        cos = load_int(job, LOCAL_COS_PTR if rope == LOCAL else COS_PTR) + angles
        sin = load_int(job, LOCAL_SIN_PTR if rope == LOCAL else SIN_PTR) + angles
        rotate(vector, cos, sin, half)


@njit
def _cache_head(job, layer, i, head):
    """Store a token's key and value of a head in the KV cache."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, dtype = load_int(job, HEAD_DIM_PADDED), load_int(job, CACHE_DTYPE)
    position = _token(job, i, POSITION)
    offset = _cache_offset(job, layer, _token(job, i, SEQUENCE), head)
    key = load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + n_heads + head) * step * 4
    value, lane = key + n_kv * step * 4, position % LANES
    block = offset + (position - lane) * step + lane  # see `make_scores`
    store_cached(dtype, load_int(job, KEYS_PTR), block, key, step, LANES)
    store_cached(dtype, load_int(job, VALUES_PTR), offset + position * step, value, step, 1)


@njit
def _cache_keys_and_values(job, layer, number, phase):
    """Phase 2: norm and rotation of queries and keys; keys and values go into the KV cache."""
    n_tokens, n_kv = load_int(job, N_TOKENS), load_int(job, N_KV_HEADS)
    group, over_heads = load_int(job, N_HEADS) // n_kv, load_int(job, QK_NORM) == OVER_HEADS
    # Keys of consecutive tokens share cache lines: one thread should write them.
    n_parts = min(n_tokens, 2 * load_int(job, N_THREADS))
    n_heads = n_kv if over_heads else 1  # of keys and values, per chunk
    n_chunks = n_parts * (n_kv // n_heads)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_chunks):
        part, first = chunk % n_parts, chunk // n_parts * n_heads
        for i in range(part * n_tokens // n_parts, (part + 1) * n_tokens // n_parts):
            if over_heads:
                _normalize_heads(job, layer, i)
            for head in range(first, first + n_heads):
                for query in range(head * group, (head + 1) * group):
                    _rotate_head(job, layer, i, query)
                _rotate_head(job, layer, i, n_kv * group + head)
                _cache_head(job, layer, i, head)


@njit
def _attention(job, layer, number, phase, scratch):
    """Phase 3: attention of each span of tokens, by head of keys and values and, if there are few
    of them, by range of keys."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    is_last = layer == load_int(job, N_LAYERS) - 1
    n_spans = load_int(job, N_LOGITS_SPANS if is_last else N_SPANS)
    n_parts = load_int(job, N_PARTS)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_spans * n_kv * n_parts):
        part, head = chunk % n_parts, chunk // n_parts % n_kv
        span = load_int(job, SPANS_PTR) + chunk // (n_parts * n_kv) * SPAN_COLUMNS * 8
        token = load_int(span, FIRST_TOKEN)
        n_queries = load_int(span, TOKEN_COUNT) * n_heads // n_kv
        for start in range(0, n_queries, QUERIES):
            count = min(QUERIES, n_queries - start)
            _attend_together(job, layer, token, head, start, count, part, scratch)


@njit
def _attend_together(job, layer, token, kv_head, start, count, part, scratch):
    """Attention of `count` queries, from number `start` of those of the tokens from `token` on and
    the heads that share the keys and values of `kv_head`: to all keys, or to a range of them."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, group = load_int(job, HEAD_DIM_PADDED), n_heads // n_kv
    row_bytes, n_ranges = (step + LANES) * 4, load_int(job, N_RANGES)
    scale = bits_to_float(types.int32(load_int(job, SCALE_BITS)))
    queries, limits = scratch, scratch + QUERIES * 8
    results = scratch + QUERIES * 32
    scores = results + QUERIES * row_bytes
    rows = scores + QUERIES * KEYS_PER_RANGE * 4
    window, n_keys, first_key, sequence = _weights(job, layer, WINDOW), 0, 1 << 40, 0
    for m in range(count):
        i, head = _query(token, kv_head, group, start + m)
        n, sequence = _token(job, i, POSITION) + 1, _token(job, i, SEQUENCE)
        n_keys = max(n_keys, n)
        first_key = min(first_key, max(0, n - window) if window else 0)
        store_int(queries, m, load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + head) * step * 4)
    split, dtype = load_int(job, N_PARTS) > 1, load_int(job, CACHE_DTYPE)
    cached = _cache_offset(job, layer, sequence, kv_head)
    for r in range(part if split else 0, part + 1 if split else n_ranges):
        begin = max(r * KEYS_PER_RANGE, first_key // LANES * LANES)  # keys are stored in blocks
        end = min((r + 1) * KEYS_PER_RANGE, n_keys)
        for m in range(count):
            n = _token(job, _query(token, kv_head, group, start + m)[0], POSITION) + 1
            store_int(limits, 2 * m, max(0, n - window - begin) if window else 0)
            store_int(limits, 2 * m + 1, min(n, end) - begin)
        offset = (cached + begin * step) * (4 if dtype == FLOAT32 else 2)
        keys, values = load_int(job, KEYS_PTR) + offset, load_int(job, VALUES_PTR) + offset
        n = max(0, end - begin)
        attend(dtype, count, queries, limits, keys, values, n, step, scale, scores, results)
        for m in range(count):
            i, head = _query(token, kv_head, group, start + m)
            row = rows + (m * n_ranges + r) * row_bytes
            if split:
                row = _partial_rows(job, i * n_heads + head) + r * row_bytes
            for d in range(step + 2):
                store_float(row, d, load_float(results + m * row_bytes, d))
    if not split:
        for m in range(count):
            i, head = _query(token, kv_head, group, start + m)
            _merge(job, i * n_heads + head, rows + m * n_ranges * row_bytes)


@njit(inline="always")
def _query(token, kv_head, group, n):
    """The token and the head of query n, see `_attend_together`."""
    return token + n // group, kv_head * group + n % group


@njit(inline="always")
def _token(job, i, field):
    return load_int(load_int(job, TOKENS_PTR), i * TOKEN_COLUMNS + field)


@njit
def _partial_rows(job, head):
    """The results of a token's head by range of keys; heads of all tokens are counted."""
    size = load_int(job, HEAD_DIM_PADDED) + LANES
    return load_int(job, PARTIALS_PTR) + head * load_int(job, N_RANGES) * size * 4


@njit
def _merge(job, head, rows):
    """Write the attention of a token's head, and as an input of int8 products if it is one."""
    step = load_int(job, HEAD_DIM_PADDED)
    scale = bits_to_float(types.int32(load_int(job, SCALE_BITS)))
    out = load_int(job, ATTENTION_PTR) + head * step * 4
    merge(rows, load_int(job, N_RANGES), step, scale, out)
    if load_int(job, WEIGHT_DTYPE) == INT8:
        quantize(out, step, load_int(job, ATTENTION_INPUT_PTR) + head * _input_step(job, step))


@njit
def _merge_ranges(job, layer, number, phase):
    """Phase 4, if several threads attend to ranges of the same keys."""
    if load_int(job, N_PARTS) == 1:
        return
    n = _n_outputs(job, layer) * load_int(job, N_HEADS)
    for head in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n):
        _merge(job, head, _partial_rows(job, head))


@njit
def _project_residual(job, layer, number, phase, x, n, matrix, residual, out, scratch):
    """Phases 5 and 8: out = (matrix x + bias) * scale + residual. With post-norm the normalized
    residual, computed in `scratch`, is added instead; address 0 is no residual."""
    n_tokens, ready = _n_outputs(job, layer), False
    width, step = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    size = _rows_per_chunk(job, width)
    n_chunks = (width + size - 1) // size
    scale = bits_to_float(types.int32(load_int(job, RESIDUAL_SCALE_BITS)))
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_chunks):
        if load_int(job, NORM_PLACEMENT) == POST:
            if not ready:
                if matrix == OUT:
                    _attention_input(job, layer, n_tokens, scratch)
                else:
                    _feed_forward_input(job, layer, n_tokens, scratch)
            residual, ready = scratch, True
        a, b = chunk * size, min(width, (chunk + 1) * size)
        w, bias = _weights(job, layer, matrix), _weights(job, layer, matrix + 1)
        products(load_int(job, WEIGHT_DTYPE), w, a, b, n, x, n_tokens, out, step)
        for i in range(n_tokens):
            target = out + i * step * 4
            other = residual + i * step * 4 if residual != 0 else 0
            if scale != 1:
                add_row(target, 0, bias, a, b)
                scale_row(target, scale, a, b)
                add_row(target, other, 0, a, b)
            else:
                add_row(target, other, bias, a, b)


@njit
def _add_normalized(job, layer, number, phase, name, scratch):
    """Phases 6 and 9, if the outputs of sublayers are normalized: x += norm(y)."""
    n, step = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    eps = bits_to_float(types.int32(load_int(job, EPS_BITS)))
    for i in claim_chunks(load_int(job, QUEUE_PTR), phase, number, _n_outputs(job, layer)):
        offset, weight = i * step * 4, _weights(job, layer, name)
        rms_norm(load_int(job, Y_PTR) + offset, weight, n, n, eps, scratch)
        add_row(load_int(job, X_PTR) + offset, scratch, 0, 0, n)


@njit
def _feed_forward(job, layer, number, phase, scratch, gate):
    """Phase 7: the feed-forward's hidden vectors."""
    n_tokens, n_rows = _n_outputs(job, layer), load_int(job, D_FF)
    size, step = _rows_per_chunk(job, n_rows), load_int(job, D_FF_PADDED)
    n_chunks = (n_rows + size - 1) // size
    width, hidden = load_int(job, D_MODEL_PADDED), load_int(job, HIDDEN_PTR)
    kind, dtype, ready = load_int(job, ACTIVATION), load_int(job, WEIGHT_DTYPE), False
    inputs = scratch + load_int(job, INPUTS_OFFSET)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_chunks):
        if not ready:
            _feed_forward_input(job, layer, n_tokens, scratch)
            inputs = _make_inputs(job, scratch, width, n_tokens, inputs)
            ready = True
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        products(dtype, _weights(job, layer, UP), a, b, width, inputs, n_tokens, hidden, step)
        if kind in (SWIGLU, GEGLU):
            products(dtype, _weights(job, layer, GATE), a, b, width, inputs, n_tokens, gate, step)
        for i in range(n_tokens):
            row = i * step * 4
            add_row(hidden + row, 0, _weights(job, layer, UP_BIAS), a, b)
            if kind in (SWIGLU, GEGLU):
                add_row(gate + row, 0, _weights(job, layer, GATE_BIAS), a, b)
            activate(kind, hidden + row + a * 4, gate + row + a * 4, b - a)
            if dtype == INT8:
                target = load_int(job, HIDDEN_INPUT_PTR) + i * _input_step(job, step)
                quantize(hidden + row + a * 4, b - a, target + _input_step(job, a))


@njit
def _logits(job, number, phase, scratch):
    """The last phase: logits of the first tokens, which need them."""
    n_logits, n_rows = load_int(job, N_LOGITS), load_int(job, VOCAB_SIZE)
    last, step = load_int(job, N_LAYERS), load_int(job, D_MODEL_PADDED)
    size = _rows_per_chunk(job, n_rows)
    n_chunks = (n_rows + size - 1) // size
    if n_logits == 0:
        return
    ready, inputs = False, scratch + load_int(job, INPUTS_OFFSET)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, number, n_chunks):
        if not ready:
            _normalize(job, load_int(job, X_PTR), last, ATTENTION_NORM, n_logits, scratch)
            inputs = _make_inputs(job, scratch, step, n_logits, inputs)
            ready = True
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        w, logits = _weights(job, last, LM_HEAD), load_int(job, LOGITS_PTR)
        padded = (n_rows + PANEL - 1) // PANEL * PANEL
        products(load_int(job, WEIGHT_DTYPE), w, a, b, step, inputs, n_logits, logits, padded)


@njit
def forward(job, number, thread):
    """Compute pass `number` as thread `thread`.

    No pointer of the job is followed without a claim: once a later job is there, no claim succeeds.
    """
    if thread >= load_int(job, N_THREADS):
        return
    scratch = load_int(job, SCRATCH_PTR) + thread * load_int(job, SCRATCH_BYTES)
    gate, scores = scratch + load_int(job, GATE_OFFSET), scratch + load_int(job, SCORES_OFFSET)
    x, y = load_int(job, X_PTR), load_int(job, Y_PTR)
    attended, hidden = load_int(job, ATTENTION_INPUT_PTR), load_int(job, HIDDEN_INPUT_PTR)
    n_attended = load_int(job, N_HEADS) * load_int(job, HEAD_DIM_PADDED)
    n_hidden, last = load_int(job, D_FF_PADDED), load_int(job, N_LAYERS) * PHASES_PER_LAYER
    _embed(job, number, last)
    for layer in range(load_int(job, N_LAYERS)):
        phase = layer * PHASES_PER_LAYER
        _project_qkv(job, layer, number, phase, scratch)
        _cache_keys_and_values(job, layer, number, phase + 1)
        _attention(job, layer, number, phase + 2, scores)
        _merge_ranges(job, layer, number, phase + 3)
        outputs = _normalizes_outputs(job)
        before = 0 if outputs else x
        _project_residual(
            job, layer, number, phase + 4, attended, n_attended, OUT, before, y, scratch
        )
        if outputs:
            _add_normalized(job, layer, number, phase + 5, ATTENTION_OUTPUT_NORM, scratch)
        _feed_forward(job, layer, number, phase + 6, scratch, gate)
        before, after = (0, y) if outputs else (y, x)
        _project_residual(
            job, layer, number, phase + 7, hidden, n_hidden, DOWN, before, after, scratch
        )
        if outputs:
            _add_normalized(job, layer, number, phase + 8, FEED_FORWARD_OUTPUT_NORM, scratch)
    _logits(job, number, last + 1, scratch)
