"""Disk access: atomic file writes, lock files, and arrays that are read slice by slice."""
