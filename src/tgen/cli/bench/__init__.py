"""`tgen bench`."""
