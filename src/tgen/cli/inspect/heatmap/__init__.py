"""Attention heat maps: terminal, SVG, PNG, Vega-Lite."""
