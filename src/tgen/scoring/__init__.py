"""Scores of texts under a model: bits per byte, perplexity, their errors and differences."""

from tgen.scoring.score import score_documents, score_text, start_ids

__all__ = ["score_documents", "score_text", "start_ids"]
