"""Tables of `tgen inspect`."""
