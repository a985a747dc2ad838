"""`tgen serve`."""
