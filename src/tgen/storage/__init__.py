"""Access to the disk: atomic file writes, lock files, arrays read from disk slice by slice."""
