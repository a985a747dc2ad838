"""Comparisons with other tools and measurements of tgen. Run as `python -m versus.X.Y`."""
