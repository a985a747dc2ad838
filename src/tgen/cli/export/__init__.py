"""`tgen export`."""
