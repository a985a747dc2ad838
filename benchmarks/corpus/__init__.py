"""Large corpora."""
