"""Cost of inspection, and induction heads."""
