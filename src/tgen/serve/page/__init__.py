"""The static files of the live page."""
