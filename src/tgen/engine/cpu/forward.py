"""One pass: a batch of tokens through the whole model, computed by all threads together.

Every thread runs `forward` with the same job: in each phase it claims chunks of the work, then
waits until all chunks are done. Residual vectors alternate between two buffers, `x` (block output)
and `y` (after attention). With post-norm, each thread normalizes them again where it needs them.
If the outputs of the sublayers are normalized, `x` is the residual stream and `y` such an output.
"""

from tgen.engine.cpu.amx import AMX, begin_bfloat16_tiles, begin_integer_tiles, end_tiles
from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.intrinsics import (
    bits_to_float,
    i1,
    load_float,
    load_int,
    store_float,
    store_int,
)
from tgen.engine.cpu.kernels import (
    CACHE,
    INPUTS,
    activate,
    add_row,
    attend,
    embed,
    layer_norm,
    merge,
    products,
    products_of_tiles,
    rms_norm,
    rotate,
    round_input,
    scale_row,
    store_cached,
)
from tgen.engine.cpu.work_queue import claim_chunks

from tgen.engine.cpu.job_layout import (  # isort: skip
    ACTIVATION, AFTER_ROPE, ATTENTION_INPUTS_PTR, ATTENTION_NORM, ATTENTION_OUTPUT_NORM, BFLOAT16,
    CAPACITY, CHUNKS_PER_THREAD, COS_PTR, DOWN, DTYPES, D_FF, D_FF_PADDED, D_MODEL, D_MODEL_PADDED,
    EACH_HEAD, EMBEDDING, EMBEDDING_SCALE_BITS, EPS_BITS, FEED_FORWARD_NORM,
    FEED_FORWARD_OUTPUT_NORM, FIRST_PHASES, FIRST_TOKEN, FLOAT16, FLOAT32, GATE, GATE_BIAS, GEGLU,
    GROUP, HEAD_DIM, HEAD_DIM_PADDED, HIDDEN_INPUTS_PTR, HIDDEN_OFFSET, INPUTS_OFFSET, INPUTS_PTR,
    INPUT_DTYPE, INT8, KEYS_PER_RANGE, KEYS_PTR, KEY_SCALES_PTR, K_NORM, LANES, LAYERS_PTR,
    LAYER_NORM, LM_HEAD, LM_HEAD_BIAS, LOCAL, LOCAL_COS_PTR, LOCAL_SIN_PTR, LOGITS_PTR,
    NORM_PLACEMENT, N_HEADS, N_KV_HEADS, N_LAYERS, N_LOGITS, N_LOGITS_SPANS, N_PARTS, N_RANGES,
    N_ROTATED, N_SPANS, N_THREADS, N_TOKENS, OUT, OUTPUT, OVER_HEADS, PANEL, PARTIALS_PTR,
    PHASES_PER_LAYER, POSITION, POSITIONS, POST, PRE, QKV, QKV_BIAS, QKV_PTR, QK_NORM, QUERIES,
    QUEUE_PTR, Q_NORM, RESIDUAL_SCALE_BITS, ROPE, SANDWICH, SCALE_BITS, SCRATCH_BYTES, SCRATCH_PTR,
    SEQUENCE, SEQUENCES_PTR, SEQUENCE_COLUMNS, SIN_PTR, SPANS_PTR, SPAN_COLUMNS, SPARE_OFFSET,
    SWIGLU, TABLE_COLUMNS, TILE_ROWS, TOKENS_PTR, TOKEN_COLUMNS, TOKEN_COUNT, TOKEN_ID, UP, UP_BIAS,
    VALUES_PTR, VALUE_SCALES_PTR, VOCAB_SIZE, WINDOW, X_PTR, Y_PTR,
)  # fmt: skip


_SHARED_TOKENS = 16  # with fewer, each thread computes the inputs of products for itself


@compiled(inline=True)
def _rows_per_chunk(job, n_rows):
    """Few rows, so that threads finish together, but whole groups and tiles."""
    rows = GROUP if load_int(job, N_TOKENS) > 1 else 2 * GROUP
    most = CHUNKS_PER_THREAD * load_int(job, N_THREADS) * rows
    return (n_rows + most - 1) // most * rows


@compiled(inline=True)
def _weights(job, layer, name):
    return load_int(load_int(job, LAYERS_PTR), layer * TABLE_COLUMNS + name)


@compiled
def _multiply(job, layer, name, first, last, n, x, n_vectors, out, out_step, scratch):
    """`products` with some rows of a matrix; the scratch memory is the thread's."""
    dtype, w = _weights(job, layer, DTYPES + name), _weights(job, layer, name)
    if AMX and INPUTS != FLOAT32 and load_int(job, INPUT_DTYPE) != INPUTS:
        spare = scratch + load_int(job, SPARE_OFFSET)
        products_of_tiles(dtype, w, first, last, n, x, n_vectors, out, out_step, spare)
    else:
        products(dtype, w, first, last, n, x, n_vectors, out, out_step)


@compiled
def _normalize(job, layer, matrix, i, out):
    """Write the vector of token i that a matrix, QKV or UP, multiplies before it is rounded."""
    n, placement = load_int(job, D_MODEL), load_int(job, NORM_PLACEMENT)
    eps = bits_to_float(load_int(job, EPS_BITS))
    name = FEED_FORWARD_NORM if (matrix == QKV) == (placement == POST) else ATTENTION_NORM
    if matrix == QKV and placement == POST:
        layer -= 1
    residual = Y_PTR if matrix == UP and placement in (PRE, POST) else X_PTR
    x = load_int(job, residual) + i * load_int(job, D_MODEL_PADDED) * 4
    if layer < 0 or _weights(job, layer, name) == 0:
        for j in range(n):
            store_float(out, j, load_float(x, j))
    elif load_int(job, LAYER_NORM):
        weight, bias = _weights(job, layer, name), _weights(job, layer, name + 1)
        layer_norm(x, weight, bias, n, eps, out)
    else:
        rms_norm(x, _weights(job, layer, name), n, n, eps, out)


@compiled
def _write_inputs(job, layer, matrix, first, end, scratch, out):
    """Write the inputs of a matrix, QKV or UP, for some tokens."""
    width, dtype = load_int(job, D_MODEL_PADDED), load_int(job, INPUT_DTYPE)
    for i in range(first, end):
        row = out + i * width * 4 if INPUTS == FLOAT32 else scratch
        _normalize(job, layer, matrix, i, row)
        if INPUTS != FLOAT32:
            round_input(dtype, row, width, out, i, 0, width)


@compiled
def _share_inputs(job, layer, ticket, phase, matrix, n_tokens, scratch):
    """Phases 1 and 8, if there are several tokens: write the inputs of a matrix."""
    if n_tokens < _SHARED_TOKENS:
        return
    n_chunks = (n_tokens + TILE_ROWS - 1) // TILE_ROWS
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        first, end = chunk * TILE_ROWS, min(n_tokens, (chunk + 1) * TILE_ROWS)
        _write_inputs(job, layer, matrix, first, end, scratch, load_int(job, INPUTS_PTR))


@compiled
def _product_inputs(job, layer, matrix, n_tokens, scratch):
    """Return the address of inputs that threads share, or else write them for this thread."""
    if n_tokens >= _SHARED_TOKENS:
        return load_int(job, INPUTS_PTR)
    out = scratch + load_int(job, INPUTS_OFFSET)
    _write_inputs(job, layer, matrix, 0, n_tokens, scratch, out)
    return out


@compiled
def _embed(job, ticket, phase):
    """The first phase: the vectors of the tokens, with those of their positions."""
    n, padded = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    scale = bits_to_float(load_int(job, EMBEDDING_SCALE_BITS))
    last = load_int(job, N_LAYERS)
    for i in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, load_int(job, N_TOKENS)):
        token = load_int(job, TOKENS_PTR) + i * TOKEN_COLUMNS * 8
        out = load_int(job, X_PTR) + i * padded * 4
        embed(_weights(job, last, EMBEDDING), load_int(token, TOKEN_ID), n, padded, out)
        if scale != 1:
            scale_row(out, scale, 0, n)
        positions = _weights(job, last, POSITIONS)
        if positions != 0:
            add_row(out, positions + load_int(token, POSITION) * n * 4, 0, 0, n)


@compiled(result=i1, inline=True)
def _normalizes_outputs(job):
    placement = load_int(job, NORM_PLACEMENT)
    return placement in (OUTPUT, SANDWICH)


@compiled(inline=True)
def _n_outputs(job, layer):
    """Return how many tokens need the output of a layer; the last one's is for logits only."""
    is_last = layer == load_int(job, N_LAYERS) - 1
    return load_int(job, N_LOGITS if is_last else N_TOKENS)


@compiled
def _project_qkv(job, layer, ticket, phase, scratch):
    """Phase 2: queries, keys and values."""
    n_heads, step = load_int(job, N_HEADS), load_int(job, HEAD_DIM_PADDED)
    n_rows = (n_heads + 2 * load_int(job, N_KV_HEADS)) * step
    n_tokens, size = load_int(job, N_TOKENS), _rows_per_chunk(job, n_rows)
    n_chunks = (n_rows + size - 1) // size
    qkv, inputs, width = load_int(job, QKV_PTR), 0, load_int(job, D_MODEL_PADDED)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        if inputs == 0:
            inputs = _product_inputs(job, layer, QKV, n_tokens, scratch)
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        n = _n_outputs(job, layer) if b <= n_heads * step else n_tokens
        if n > 0:
            _multiply(job, layer, QKV, a, b, width, inputs, n, qkv, n_rows, scratch)
        for i in range(n):
            add_row(qkv + i * n_rows * 4, 0, _weights(job, layer, QKV_BIAS), a, b)


@compiled(inline=True)
def _cache_offset(job, layer, sequence, head):
    """Offset of a layer's and head's keys in the storage of a sequence, in positions."""
    block = layer * load_int(job, N_KV_HEADS) + head
    return block * _sequence(job, sequence, CAPACITY)


@compiled(inline=True)
def _scales(job, sequence, field, position):
    """The address of a position's scale in an int8 cache; `position` is counted as above."""
    return _sequence(job, sequence, field) + position * 4 if CACHE == INT8 else 0


@compiled
def _normalize_heads(job, layer, i):
    """The norm over all queries of a token, and over all keys."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, size = load_int(job, HEAD_DIM_PADDED), load_int(job, HEAD_DIM)
    eps = bits_to_float(load_int(job, EPS_BITS))
    q = load_int(job, QKV_PTR) + i * (n_heads + 2 * n_kv) * step * 4
    k, n_q, n_k = q + n_heads * step * 4, n_heads * step, n_kv * step
    rms_norm(q, _weights(job, layer, Q_NORM), n_q, n_heads * size, eps, q)
    rms_norm(k, _weights(job, layer, K_NORM), n_k, n_kv * size, eps, k)


@compiled
def _rotate_head(job, layer, i, head):
    """Norm and rotation of a token's query or key head; keys follow the queries."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, size = load_int(job, HEAD_DIM_PADDED), load_int(job, HEAD_DIM)
    vector = load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + head) * step * 4
    half, rope = load_int(job, N_ROTATED) // 2, _weights(job, layer, ROPE)
    qk_norm, eps = load_int(job, QK_NORM), bits_to_float(load_int(job, EPS_BITS))
    weight = _weights(job, layer, Q_NORM if head < n_heads else K_NORM)
    if qk_norm == EACH_HEAD:
        rms_norm(vector, weight, size, size, eps, vector)
    if rope:
        angles = _token(job, i, POSITION) * half * 4
        cos = load_int(job, LOCAL_COS_PTR if rope == LOCAL else COS_PTR) + angles
        sin = load_int(job, LOCAL_SIN_PTR if rope == LOCAL else SIN_PTR) + angles
        rotate(vector, cos, sin, half)
    if qk_norm == AFTER_ROPE:
        rms_norm(vector, weight, size, size, eps, vector)


@compiled
def _cache_head(job, layer, i, head):
    """Store a token's key and value of a head in the KV cache."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, position = load_int(job, HEAD_DIM_PADDED), _token(job, i, POSITION)
    sequence = _token(job, i, SEQUENCE)
    offset = _cache_offset(job, layer, sequence, head)
    key = load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + n_heads + head) * step * 4
    value, lane = key + n_kv * step * 4, position % LANES
    block = (offset + position - lane) * step + lane  # see `make_scores`
    row = offset + position
    keys, values = _sequence(job, sequence, KEYS_PTR), _sequence(job, sequence, VALUES_PTR)
    key_scale = _scales(job, sequence, KEY_SCALES_PTR, row)
    value_scale = _scales(job, sequence, VALUE_SCALES_PTR, row)
    store_cached(keys, block, key, step, LANES, key_scale)
    store_cached(values, row * step, value, step, 1, value_scale)


@compiled
def _cache_keys_and_values(job, layer, ticket, phase):
    """Phase 3: norm and rotation of queries and keys; keys and values go into the KV cache."""
    n_tokens, n_kv = load_int(job, N_TOKENS), load_int(job, N_KV_HEADS)
    group, over_heads = load_int(job, N_HEADS) // n_kv, load_int(job, QK_NORM) == OVER_HEADS
    # Keys of consecutive tokens share cache lines: one thread should write them.
    n_parts = min(n_tokens, 2 * load_int(job, N_THREADS))
    n_heads = n_kv if over_heads else 1  # of keys and values, per chunk
    n_chunks = n_parts * (n_kv // n_heads)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        part, first = chunk % n_parts, chunk // n_parts * n_heads
        for i in range(part * n_tokens // n_parts, (part + 1) * n_tokens // n_parts):
            if over_heads:
                _normalize_heads(job, layer, i)
            for head in range(first, first + n_heads):
                for query in range(head * group, (head + 1) * group):
                    _rotate_head(job, layer, i, query)
                _rotate_head(job, layer, i, n_kv * group + head)
                _cache_head(job, layer, i, head)


@compiled
def _attention(job, layer, ticket, phase, scratch):
    """Phase 4: attention of each span of tokens, by head of keys and values and, if there are few
    of them, by range of keys."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    is_last = layer == load_int(job, N_LAYERS) - 1
    n_spans = load_int(job, N_LOGITS_SPANS if is_last else N_SPANS)
    n_parts = load_int(job, N_PARTS)
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_spans * n_kv * n_parts):
        part, head = chunk % n_parts, chunk // n_parts % n_kv
        span = load_int(job, SPANS_PTR) + chunk // (n_parts * n_kv) * SPAN_COLUMNS * 8
        token = load_int(span, FIRST_TOKEN)
        n_queries = load_int(span, TOKEN_COUNT) * n_heads // n_kv
        for start in range(0, n_queries, QUERIES):
            count = min(QUERIES, n_queries - start)
            _attend_together(job, layer, token, head, start, count, part, scratch)


@compiled
def _attend_together(job, layer, token, kv_head, start, count, part, scratch):
    """Attention of `count` queries, from number `start` of those of the tokens from `token` on and
    the heads that share the keys and values of `kv_head`: to all keys, or to a range of them."""
    n_heads, n_kv = load_int(job, N_HEADS), load_int(job, N_KV_HEADS)
    step, group = load_int(job, HEAD_DIM_PADDED), n_heads // n_kv
    row_bytes, n_ranges = (step + LANES) * 4, load_int(job, N_RANGES)
    scale = bits_to_float(load_int(job, SCALE_BITS))
    queries, limits, scales = scratch, scratch + QUERIES * 8, scratch + QUERIES * 24
    results = scratch + QUERIES * 32
    scores = results + QUERIES * row_bytes
    rows = scores + QUERIES * KEYS_PER_RANGE * 4
    window, n_keys, first_key, sequence = _weights(job, layer, WINDOW), 0, 1 << 40, 0
    for m in range(count):
        i, head = token + (start + m) // group, kv_head * group + (start + m) % group
        n, sequence = _token(job, i, POSITION) + 1, _token(job, i, SEQUENCE)
        n_keys = max(n_keys, n)
        first_key = min(first_key, max(0, n - window) if window else 0)
        store_int(queries, m, load_int(job, QKV_PTR) + (i * (n_heads + 2 * n_kv) + head) * step * 4)
    split = load_int(job, N_PARTS) > 1
    cached = _cache_offset(job, layer, sequence, kv_head)
    for r in range(part if split else 0, part + 1 if split else n_ranges):
        begin = max(r * KEYS_PER_RANGE, first_key // LANES * LANES)  # keys are stored in blocks
        end = min((r + 1) * KEYS_PER_RANGE, n_keys)
        for m in range(count):
            n = _token(job, token + (start + m) // group, POSITION) + 1
            store_int(limits, 2 * m, max(0, n - window - begin) if window else 0)
            store_int(limits, 2 * m + 1, min(n, end) - begin)
        n_bytes = 4 if CACHE == FLOAT32 else 2 if CACHE == FLOAT16 else 1
        offset = (cached + begin) * step * n_bytes
        keys = _sequence(job, sequence, KEYS_PTR) + offset
        values = _sequence(job, sequence, VALUES_PTR) + offset
        n = max(0, end - begin)
        if CACHE == INT8:
            store_int(scales, 0, _scales(job, sequence, KEY_SCALES_PTR, cached + begin))
            store_int(scales, 1, _scales(job, sequence, VALUE_SCALES_PTR, cached + begin))
        attend(count, queries, limits, keys, values, scales, n, step, scale, scores, results)
        for m in range(count):
            i, head = token + (start + m) // group, kv_head * group + (start + m) % group
            row = rows + (m * n_ranges + r) * row_bytes
            if split:
                row = _partial_rows(job, i * n_heads + head) + r * row_bytes
            for d in range(step + 2):
                store_float(row, d, load_float(results + m * row_bytes, d))
    if not split:
        for m in range(count):
            i, head = token + (start + m) // group, kv_head * group + (start + m) % group
            _merge(job, i * n_heads + head, rows + m * n_ranges * row_bytes, results)


@compiled(inline=True)
def _sequence(job, i, field):
    return load_int(load_int(job, SEQUENCES_PTR), i * SEQUENCE_COLUMNS + field)


@compiled(inline=True)
def _token(job, i, field):
    return load_int(load_int(job, TOKENS_PTR), i * TOKEN_COLUMNS + field)


@compiled
def _partial_rows(job, head):
    """The results of a token's head by range of keys; heads of all tokens are counted."""
    size = load_int(job, HEAD_DIM_PADDED) + LANES
    return load_int(job, PARTIALS_PTR) + head * load_int(job, N_RANGES) * size * 4


@compiled
def _merge(job, head, rows, scratch):
    """Write the attention of a token's head as an input of the output projection."""
    step, n_heads = load_int(job, HEAD_DIM_PADDED), load_int(job, N_HEADS)
    scale = bits_to_float(load_int(job, SCALE_BITS))
    inputs, dtype = load_int(job, ATTENTION_INPUTS_PTR), load_int(job, INPUT_DTYPE)
    out = inputs + head * step * 4 if INPUTS == FLOAT32 else scratch
    merge(rows, load_int(job, N_RANGES), step, scale, out)
    if INPUTS != FLOAT32:
        i, first = head // n_heads, head % n_heads * step
        round_input(dtype, out, step, inputs, i, first, n_heads * step)


@compiled
def _merge_ranges(job, layer, ticket, phase, scratch):
    """Phase 5, if several threads attend to ranges of the same keys."""
    if load_int(job, N_PARTS) == 1:
        return
    n = _n_outputs(job, layer) * load_int(job, N_HEADS)
    for head in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n):
        _merge(job, head, _partial_rows(job, head), scratch)


@compiled
def _project_residual(job, layer, ticket, phase, x, n, matrix, residual, out, scratch):
    """Phases 6 and 10: out = (matrix x + bias) * scale + residual. With post-norm the normalized
    residual, computed in `scratch`, is added instead; address 0 is no residual."""
    n_tokens, ready = _n_outputs(job, layer), False
    if n_tokens == 0:
        return
    width, step = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    size = _rows_per_chunk(job, width)
    n_chunks = (width + size - 1) // size
    scale = bits_to_float(load_int(job, RESIDUAL_SCALE_BITS))
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        if load_int(job, NORM_PLACEMENT) == POST and not ready:
            residual, ready = scratch + load_int(job, INPUTS_OFFSET), True
            for i in range(n_tokens):
                before = QKV if matrix == OUT else UP
                _normalize(job, layer, before, i, residual + i * step * 4)
        a, b = chunk * size, min(width, (chunk + 1) * size)
        bias = _weights(job, layer, matrix + 1)
        _multiply(job, layer, matrix, a, b, n, x, n_tokens, out, step, scratch)
        for i in range(n_tokens):
            target = out + i * step * 4
            other = residual + i * step * 4 if residual != 0 else 0
            if scale != 1:
                add_row(target, 0, bias, a, b)
                scale_row(target, scale, a, b)
                add_row(target, other, 0, a, b)
            else:
                add_row(target, other, bias, a, b)


@compiled
def _add_normalized(job, layer, ticket, phase, name, scratch):
    """Phases 7 and 11, if the outputs of sublayers are normalized: x += norm(y)."""
    n, step = load_int(job, D_MODEL), load_int(job, D_MODEL_PADDED)
    eps = bits_to_float(load_int(job, EPS_BITS))
    for i in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, _n_outputs(job, layer)):
        offset, weight = i * step * 4, _weights(job, layer, name)
        rms_norm(load_int(job, Y_PTR) + offset, weight, n, n, eps, scratch)
        add_row(load_int(job, X_PTR) + offset, scratch, 0, 0, n)


@compiled
def _feed_forward(job, layer, ticket, phase, scratch):
    """Phase 9: the feed-forward's hidden vectors, as inputs of the down projection."""
    n_tokens, n_rows = _n_outputs(job, layer), load_int(job, D_FF)
    if n_tokens == 0:
        return
    size, step = _rows_per_chunk(job, n_rows), load_int(job, D_FF_PADDED)
    n_chunks = (n_rows + size - 1) // size
    width, hidden, inputs = load_int(job, D_MODEL_PADDED), load_int(job, HIDDEN_INPUTS_PTR), 0
    kind, dtype = load_int(job, ACTIVATION), load_int(job, INPUT_DTYPE)
    up = scratch + load_int(job, HIDDEN_OFFSET)  # the chunk's rows of each token
    gate = up + n_tokens * size * 4
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        if inputs == 0:
            inputs = _product_inputs(job, layer, UP, n_tokens, scratch)
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        out = up - a * 4
        _multiply(job, layer, UP, a, b, width, inputs, n_tokens, out, size, scratch)
        if kind in (SWIGLU, GEGLU):
            out = gate - a * 4
            _multiply(job, layer, GATE, a, b, width, inputs, n_tokens, out, size, scratch)
        up_bias, gate_bias = _weights(job, layer, UP_BIAS), _weights(job, layer, GATE_BIAS)
        for i in range(n_tokens if up_bias != 0 or gate_bias != 0 else 0):
            add_row(up + (i * size - a) * 4, 0, up_bias, a, b)
            add_row(gate + (i * size - a) * 4, 0, gate_bias, a, b)
        activate(kind, up, gate, n_tokens * size)
        for i in range(n_tokens):
            row = up + i * size * 4
            if INPUTS == FLOAT32:
                for r in range(b - a):
                    store_float(hidden, i * step + a + r, load_float(row, r))
                continue
            for r in range(b - a, (b - a + GROUP - 1) // GROUP * GROUP):
                store_float(row, r, 0)
            round_input(dtype, row, b - a, hidden, i, a, step)


@compiled
def _logits(job, ticket, phase, scratch):
    """The last phase: logits of the first tokens, which need them."""
    n_logits, n_rows = load_int(job, N_LOGITS), load_int(job, VOCAB_SIZE)
    last, step = load_int(job, N_LAYERS), load_int(job, D_MODEL_PADDED)
    size, inputs = _rows_per_chunk(job, n_rows), 0
    n_chunks = (n_rows + size - 1) // size
    if n_logits == 0:
        return
    for chunk in claim_chunks(load_int(job, QUEUE_PTR), phase, ticket, n_chunks):
        if inputs == 0:
            inputs = _product_inputs(job, last, QKV, n_logits, scratch)
        a, b = chunk * size, min(n_rows, (chunk + 1) * size)
        padded = (n_rows + PANEL - 1) // PANEL * PANEL
        logits, bias = load_int(job, LOGITS_PTR), _weights(job, last, LM_HEAD_BIAS)
        _multiply(job, last, LM_HEAD, a, b, step, inputs, n_logits, logits, padded, scratch)
        for i in range(n_logits if bias != 0 else 0):
            add_row(logits + i * padded * 4, 0, bias, a, b)


@compiled
def forward(job, ticket, thread):
    """Compute the ticket's pass as thread `thread`.

    No pointer of the job is followed without a claim: once a later job is there, no claim succeeds.
    """
    if thread >= load_int(job, N_THREADS):
        return
    scratch = load_int(job, SCRATCH_PTR) + thread * load_int(job, SCRATCH_BYTES)
    x, y, spare = load_int(job, X_PTR), load_int(job, Y_PTR), scratch + load_int(job, SPARE_OFFSET)
    attended, hidden = load_int(job, ATTENTION_INPUTS_PTR), load_int(job, HIDDEN_INPUTS_PTR)
    n_attended = load_int(job, N_HEADS) * load_int(job, HEAD_DIM_PADDED)
    n_hidden, n_layers = load_int(job, D_FF_PADDED), load_int(job, N_LAYERS)
    outputs, uses_tiles = _normalizes_outputs(job), False
    if AMX and INPUTS != FLOAT32:
        uses_tiles = load_int(job, INPUT_DTYPE) != INPUTS
        if uses_tiles and INPUTS == BFLOAT16:
            begin_bfloat16_tiles()
        elif uses_tiles:
            begin_integer_tiles()
    _embed(job, ticket, 0)
    for layer in range(n_layers):
        phase, n = FIRST_PHASES + layer * PHASES_PER_LAYER, _n_outputs(job, layer)
        _share_inputs(job, layer, ticket, phase, QKV, load_int(job, N_TOKENS), scratch)
        _project_qkv(job, layer, ticket, phase + 1, scratch)
        _cache_keys_and_values(job, layer, ticket, phase + 2)
        _attention(job, layer, ticket, phase + 3, spare)
        _merge_ranges(job, layer, ticket, phase + 4, spare)
        before = 0 if outputs else x
        _project_residual(
            job, layer, ticket, phase + 5, attended, n_attended, OUT, before, y, scratch
        )
        if outputs:
            _add_normalized(job, layer, ticket, phase + 6, ATTENTION_OUTPUT_NORM, scratch)
        _share_inputs(job, layer, ticket, phase + 7, UP, n, scratch)
        _feed_forward(job, layer, ticket, phase + 8, scratch)
        before, after = (0, y) if outputs else (y, x)
        _project_residual(
            job, layer, ticket, phase + 9, hidden, n_hidden, DOWN, before, after, scratch
        )
        if outputs:
            _add_normalized(job, layer, ticket, phase + 10, FEED_FORWARD_OUTPUT_NORM, scratch)
    phase = FIRST_PHASES + n_layers * PHASES_PER_LAYER
    _share_inputs(job, n_layers, ticket, phase, QKV, load_int(job, N_LOGITS), scratch)
    _logits(job, ticket, phase + 1, scratch)
    if uses_tiles:
        end_tiles()
