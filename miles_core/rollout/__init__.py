"""Turns prompts into groups of rewarded samples.

A queue supplies prompts, an engine generates responses, the reported values are aligned with the tokens of each sample, and
groups are scored, filtered and collected. This package uses the engine only through its contract.
"""
