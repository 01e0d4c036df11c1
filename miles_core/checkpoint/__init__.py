"""Checkpoints of a run, and readers for Hugging Face checkpoints.

``directory`` manages the checkpoint directories, which are either complete or absent. ``store`` holds the entries that core and
plugins save in them, and ``rng`` the random-number states. ``hf_files`` reads Hugging Face checkpoints tensor by tensor;
``miles_formats.convert`` writes them.
"""
