"""Memory layout of a kernel job: its fields, the table of layer addresses, tokens and weights.

Plain integers, so that filling in a job needs no compiler. `_PTR` fields are addresses, `_PADDED`
lengths are rounded up to whole groups, other lengths count elements.
"""

RUN, SERVE, SAMPLE, DESCRIBE = range(4)  # tasks of `entry.enter`
CACHE_LINE = 64  # bytes
LANES = 16  # float32 numbers per SIMD vector
PANEL = LANES  # rows of a matrix that are stored together
QUERIES = 4  # that attend to the same keys and values together
KEYS_PER_RANGE = 512  # attention to earlier tokens is computed by ranges of positions, then merged
QUAD = 4  # int8 numbers that one instruction multiplies and adds
GROUP = 32  # int8 numbers of a row that share a scale; every row is padded to whole groups
GROUP_BYTES = PANEL * (GROUP + 2)  # of an int8 panel: the weights, then a float16 scale per row
INPUT_BYTES = GROUP + 8  # of an input of int8 products: the numbers, a float32 scale, an offset
FLOAT32, BFLOAT16, INT8, FLOAT16 = range(4)  # dtypes of weights; of the KV cache: float32, float16
SWIGLU, RELU, GELU_TANH, GELU, GEGLU = range(5)  # feed-forward activations
PRE, POST, PARALLEL, OUTPUT, SANDWICH = range(5)  # placement of norms, see NormPlacement
EACH_HEAD, OVER_HEADS = 1, 2  # norm of queries and keys; 0: none
GLOBAL, LOCAL = 1, 2  # a layer's rope; 0: none

QUEUE_WORDS = 16  # int64 words of the work queue per phase: two cache lines
MAX_CHUNKS = (1 << 20) - 1  # per phase
PHASES_PER_LAYER = 9
OTHER_PHASES = 2  # the embedding and the logits
TABLE_COLUMNS = 20  # int64 numbers per layer

# The fields of a job, int64 each.
(
    N_LAYERS, D_MODEL, D_MODEL_PADDED, N_HEADS, N_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, D_FF,
    D_FF_PADDED, VOCAB_SIZE, WEIGHT_DTYPE, LAYER_NORM, NORM_PLACEMENT, ACTIVATION, QK_NORM,
    N_ROTATED, EPS_BITS, SCALE_BITS, RESIDUAL_SCALE_BITS, EMBEDDING_SCALE_BITS,
    LAYERS_PTR, COS_PTR, SIN_PTR, LOCAL_COS_PTR, LOCAL_SIN_PTR, X_PTR, Y_PTR, QKV_PTR,
    ATTENTION_PTR, ATTENTION_INPUT_PTR, HIDDEN_PTR, HIDDEN_INPUT_PTR, LOGITS_PTR, KEYS_PTR,
    VALUES_PTR, CACHE_DTYPE, CAPACITY, N_SEQUENCES,
    SCRATCH_PTR, SCRATCH_BYTES, INPUTS_OFFSET, GATE_OFFSET, SCORES_OFFSET, TOKENS_PTR, N_TOKENS,
    SPANS_PTR, N_SPANS, N_LOGITS, N_LOGITS_SPANS, PARTIALS_PTR, N_RANGES, N_PARTS,
    N_THREADS, QUEUE_PTR,
    JOB_SIZE,
) = range(55)  # fmt: skip

# The addresses of a layer's weights, 0 if absent, then its window (0: none) and its rope. The row
# after the last layer has the final norm, the LM head, the embedding and the float32 vectors of
# positions.
(
    ATTENTION_NORM, ATTENTION_NORM_BIAS, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS,
    FEED_FORWARD_NORM, FEED_FORWARD_NORM_BIAS, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS,
    ATTENTION_OUTPUT_NORM, FEED_FORWARD_OUTPUT_NORM, WINDOW, ROPE,
) = range(TABLE_COLUMNS)  # fmt: skip
LM_HEAD, EMBEDDING, POSITIONS = QKV, GATE, UP

# Tokens that attend together: the first one, and how many; consecutive ones of a sequence.
FIRST_TOKEN, TOKEN_COUNT = range(2)
SPAN_COLUMNS = 2

# A token: its id, its position, its sequence in the KV cache, and whether its logits are needed (1
# or 0). Those whose logits are needed come first, and so do their spans.
TOKEN_ID, POSITION, SEQUENCE, NEEDS_LOGITS = range(4)
TOKEN_COLUMNS = 4

# The fields of a request to `sampling_kernels`, float64 each; up to three results follow.
(
    ROW_PTR, N_CANDIDATES, TOKEN, TOP_K, TOP_P, LOG_MIN_P, TEMPERATURE, UNIFORM, CANDIDATES_PTR,
    CANDIDATE_LOGITS_PTR, RESULT,
) = range(11)  # fmt: skip
REQUEST_SIZE = RESULT + 3
