"""Tables of `tgen bench`."""
