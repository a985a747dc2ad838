"""`tgen generate`."""
