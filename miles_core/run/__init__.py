"""Sets up and tears down a run: inputs, run directory, log, policy parts, checkpoints and recovery.

This package contains everything between an accepted plan and the training loop: it creates the run and its log, lets the
runtime build and release the parts of each policy, and saves and resumes completed steps.
"""
