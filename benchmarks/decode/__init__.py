"""Generation speed."""
