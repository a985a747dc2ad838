"""How the kernels' data lies: the job, a layer's addresses, tokens, vectors and stored weights.

Numbers alone: who only fills in a job needs no compiler.
"""

LANES = 16  # numbers in a vector
GROUP = 32  # int8 weights that share a scale; rows are whole groups
GROUP_BYTES = 2 + GROUP  # the scale in bfloat16, then the weights
FLOAT32, BFLOAT16, INT8 = range(3)  # how weights are stored
SWIGLU, RELU, GELU_TANH, GELU = range(4)  # what stands in the feed-forward's middle

WORDS = 16  # int64 words a phase takes, see `sharing`: two cache lines
MAX_CHUNKS = (1 << 20) - 1  # of a phase
PHASES_A_LAYER = 6
COLUMNS = 16  # int64 numbers in a row of the tables below

# The job: int64 numbers, lengths in elements, what ends in _AT are addresses.
(
    N_LAYERS, WIDTH, WIDTH_STEP, N_HEADS, N_KV_HEADS, HEAD_DIM, HEAD_STEP, FEED, FEED_STEP,
    VOCABULARY, STORED, LAYER_NORM, POST_NORM, ACTIVATION, QK_NORM, ROTARY, WINDOW, EPS_BITS,
    SCALE_BITS,
    LAYERS_AT, COS_AT, SIN_AT, X_AT, Y_AT, QKV_AT, MIXED_AT, HIDDEN_AT, LOGITS_AT, KEYS_AT,
    VALUES_AT, CAPACITY, N_ROWS, LOCAL_AT, LOCAL_STEP, GATE_OFFSET, SCORES_OFFSET, TOKENS_AT,
    N_TOKENS, N_SCORED, N_CHUNKS, N_HEAD_CHUNKS, N_THREADS, WORDS_AT,
    JOB_SIZE,
) = range(44)  # fmt: skip

# A layer's addresses; the row after the last layer has the final norm and the head. 0: not there.
(
    ATTENTION_NORM, ATTENTION_NORM_BIAS, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS,
    FEED_NORM, FEED_NORM_BIAS, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS,
) = range(COLUMNS)  # fmt: skip
HEAD = QKV

# A token: where it stands, in which row of the cache, and whether its logits are wanted, 1 or 0.
POSITION, ROW, SCORED = range(3)
TOKEN_COLUMNS = 3
