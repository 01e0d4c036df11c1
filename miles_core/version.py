"""The version of miles-core, which its manifests and checkpoints name."""

__version__ = "0.1.0"
