"""`tgen sweep`."""
