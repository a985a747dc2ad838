"""`tgen train`."""
