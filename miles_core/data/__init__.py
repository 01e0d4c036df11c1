"""Samples, the fields they carry, prompts, and batches."""
