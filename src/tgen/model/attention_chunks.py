"""Sizes of attention on a CPU in training, without torch, for the estimate of memory."""

QUERY_CHUNK = 128  # queries of all heads, computed at once; for fewer, torch's kernel suffices
MAX_STORED_LENGTH = 1024  # tokens: the memory of attention weights grows with the square
