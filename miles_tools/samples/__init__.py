"""Saved samples: every sample of training and evaluation, in files of the run directory, written by other processes."""
