"""The page of all heads."""
