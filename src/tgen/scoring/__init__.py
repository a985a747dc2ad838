"""Scores of texts under a model: bits per byte, perplexity, their errors and differences."""

from tgen.scoring.corpus import score_documents
from tgen.scoring.document import score_text, start_ids

__all__ = ["score_documents", "score_text", "start_ids"]
