"""Sizes of attention on a CPU in training, without torch, for the estimate of memory."""

QUERY_CHUNK = 128  # queries of all heads, computed at once
_MAX_LENGTH = 1024  # tokens


def stores_attention_weights(length: int) -> bool:
    """Whether training on sequences of `length` tokens on a CPU stores the attention weights.

    Their memory grows with the square of the length. Of a single chunk, torch's fused kernel is as
    fast.
    """
    return QUERY_CHUNK < length <= _MAX_LENGTH
