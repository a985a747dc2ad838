"""`tgen inspect`."""
