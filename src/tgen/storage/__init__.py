"""The only doors to the disk: files, locks, arrays read by position."""
