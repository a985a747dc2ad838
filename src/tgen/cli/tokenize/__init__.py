"""`tgen tokenize`."""
