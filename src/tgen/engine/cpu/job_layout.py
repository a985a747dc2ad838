"""Memory layout of a kernel job: its fields, the table of layer addresses, tokens and weights.

Plain integers, so that filling in a job needs no compiler. `_PTR` fields are addresses, `_PADDED`
lengths are rounded up to whole groups, other lengths count elements. Arrays begin at a cache line,
so that vectors and rows of whole lines do too.
"""

import math

import numpy as np
from numpy.typing import DTypeLike

from tgen.checkpoint.dtypes import Array

RUN, CONTINUE, SERVE, SAMPLE, DESCRIBE, HAS_AMX = range(6)  # tasks of `entry.enter`
CACHE_LINE = 64  # bytes
LANES = 16  # float32 numbers per SIMD vector
PANEL = LANES  # rows of a matrix that are stored together
QUERIES = 4  # that attend to the same keys and values together
KEYS_PER_RANGE = 512  # attention to earlier tokens is computed by ranges of positions, then merged
QUAD = 4  # int8 numbers that one instruction multiplies and adds
GROUP = 32  # integers of a row that share a scale; every row is padded to whole groups
# Bytes of a group in a panel: integers, then a float16 scale per row, and a minimum for int4.
INT8_GROUP_BYTES, INT4_GROUP_BYTES = PANEL * (GROUP + 2), PANEL * (GROUP // 2 + 4)
# A group of an input of integer products has GROUP bytes, then these numbers at these bytes.
SCALE, START, SUM = GROUP, GROUP + 4, GROUP + 8  # see `kernels.quantize_group`
INPUT_BYTES = GROUP + 12
# Dtypes of weights; the KV cache has float32, float16 or int8.
FLOAT32, BFLOAT16, INT8, INT4, FLOAT16 = range(5)
# Inputs of products are FLOAT32; BFLOAT16, rounded, as such or as float32; INT8 for all integers;
# or tiles for AMX: 16 inputs times GROUP numbers, for integers followed by each input's factors.
BFLOAT16_TILES, INT8_TILES = 5, 6
TILE_ROWS, TILE_BYTES = 16, 16 * CACHE_LINE
INT8_TILE_BYTES = TILE_ROWS * GROUP + 3 * CACHE_LINE
SWIGLU, RELU, GELU_TANH, GELU, GEGLU, RELU2 = range(6)  # feed-forward activations
PRE, POST, PARALLEL, OUTPUT, SANDWICH = range(5)  # placement of norms, see NormPlacement
EACH_HEAD, OVER_HEADS, AFTER_ROPE = 1, 2, 3  # norm of queries and keys; 0: none
GLOBAL, LOCAL = 1, 2  # a layer's rope; 0: none

QUEUE_WORDS = 16  # int64 words of the work queue per phase: two cache lines
COUNT_BITS = 18  # of a count of chunks
MAX_CHUNKS = (1 << COUNT_BITS) - 1  # per phase
CHUNKS_PER_THREAD = 32  # of a matrix, at most
FIRST_PHASES, PHASES_PER_LAYER, LAST_PHASES = 1, 11, 2  # the embedding; the logits
TABLE_COLUMNS = 40  # int64 numbers per layer

# The fields of a job, int64 each.
(
    N_LAYERS, D_MODEL, D_MODEL_PADDED, N_HEADS, N_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, D_FF,
    D_FF_PADDED, VOCAB_SIZE, INPUT_DTYPE, LAYER_NORM, NORM_PLACEMENT, ACTIVATION, QK_NORM,
    N_ROTATED, EPS_BITS, SCALE_BITS, RESIDUAL_SCALE_BITS, EMBEDDING_SCALE_BITS,
    LAYERS_PTR, COS_PTR, SIN_PTR, LOCAL_COS_PTR, LOCAL_SIN_PTR, X_PTR, Y_PTR, QKV_PTR,
    INPUTS_PTR, ATTENTION_INPUTS_PTR, HIDDEN_INPUTS_PTR, LOGITS_PTR, SEQUENCES_PTR,
    SCRATCH_PTR, SCRATCH_BYTES, INPUTS_OFFSET, HIDDEN_OFFSET, SPARE_OFFSET, TOKENS_PTR, N_TOKENS,
    SPANS_PTR, N_SPANS, N_LOGITS, N_LOGITS_SPANS, PARTIALS_PTR, N_RANGES, N_PARTS,
    N_THREADS, QUEUE_PTR, FORWARD_PTR,
    JOB_SIZE,
) = range(51)  # fmt: skip

# The addresses of a layer's weights, 0 if absent, its window (0: none), its rope, and in column
# DTYPES + i the dtype of matrix i. The row after the last layer has the final norm, the LM head,
# the embedding and the float32 vectors of positions.
(
    ATTENTION_NORM, ATTENTION_NORM_BIAS, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS,
    FEED_FORWARD_NORM, FEED_FORWARD_NORM_BIAS, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS,
    ATTENTION_OUTPUT_NORM, FEED_FORWARD_OUTPUT_NORM, WINDOW, ROPE, DTYPES,
) = range(21)  # fmt: skip
LM_HEAD, LM_HEAD_BIAS, EMBEDDING, POSITIONS = QKV, QKV_BIAS, GATE, UP

# Tokens that attend together: the first one, and how many; consecutive ones of a sequence.
FIRST_TOKEN, TOKEN_COUNT = range(2)
SPAN_COLUMNS = 2

# A sequence of the KV cache: the addresses of its keys and values, and the tokens that they have
# room for. Keys are (L, n_kv_heads, S / 16, D, 16), values (L, n_kv_heads, S, D).
# In int8, each position of a head has a float32 scale: both (L, n_kv_heads, S).
KEYS_PTR, VALUES_PTR, CAPACITY, KEY_SCALES_PTR, VALUE_SCALES_PTR = range(5)
SEQUENCE_COLUMNS = 5
TINY = 1e-30  # smaller numbers are 0 in an int8 cache: a scale has an inverse

# A token: its id, its position, its sequence in the KV cache, and whether its logits are needed (1
# or 0). Those whose logits are needed come first, and so do their spans.
TOKEN_ID, POSITION, SEQUENCE, NEEDS_LOGITS = range(4)
TOKEN_COLUMNS = 4

# The fields of a request to `sampling_kernels`, float64 each, which is exact for addresses below
# 2^53; the seed and the position of a sample are int64. Up to three results follow.
(
    ROW_PTR, N_CANDIDATES, TOKEN, TOP_K, TOP_P, LOG_MIN_P, TEMPERATURE, SAMPLE_SEED,
    SAMPLE_POSITION, CANDIDATES_PTR, CANDIDATE_LOGITS_PTR, RESULT,
) = range(12)  # fmt: skip
REQUEST_SIZE = RESULT + 3


def allocate_aligned(
    shape: tuple[int, ...], dtype: DTypeLike = np.float32, *, alignment: int = CACHE_LINE
) -> Array:
    """Zeros from a multiple of `alignment` bytes on; their pages cost no RAM until they are
    written."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + n_bytes].view(dtype).reshape(shape)
