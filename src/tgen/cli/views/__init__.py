"""Reports -> what a person sees."""
