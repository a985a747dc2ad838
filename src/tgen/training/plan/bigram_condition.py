"""Which models can start from the text's bigrams: see `bigram_start`."""

from tgen.config import ModelConfig

_MAX_VOCAB_SIZE = 8192  # larger vocabularies need gigabytes


def can_start_from_bigrams(config: ModelConfig) -> bool:
    """Whether the logits of a model with blocks of zeros are a product of its two tables."""
    return (
        not config.tied_embeddings
        and config.position == "rotary"
        and config.norm == "rms_norm"
        and config.norm_placement == "pre"
        and config.embedding_scale == config.logits_divisor == 1
        and config.vocab_size <= _MAX_VOCAB_SIZE
    )
