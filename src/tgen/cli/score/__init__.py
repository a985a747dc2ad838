"""`tgen score`."""
