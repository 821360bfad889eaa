"""The version of wands."""

__version__ = "0.1.0"
