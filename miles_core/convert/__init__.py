"""Checkpoints into a number format, and back to BF16.

A conversion is planned from headers alone and never holds the model; the codec is the one of a weight sync, so the bytes
are the same.
"""
