"""The version of tgen."""

__version__ = "0.2.0"
