"""Heat maps of matrices: in the terminal, and as SVG, PNG and Vega-Lite."""
