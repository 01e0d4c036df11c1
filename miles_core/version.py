"""The version of miles-core."""

__version__ = "0.1.0"
