"""Accuracy of `tgen bench` itself."""
