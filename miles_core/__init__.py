"""A plugin-based reinforcement-learning loop for language models."""

__version__ = "0.1.0"
