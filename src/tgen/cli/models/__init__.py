"""`tgen models`."""
