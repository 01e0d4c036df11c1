"""Continuous batching over cached keys and values.

``engine`` implements the engine contract; ``scheduler`` decides who runs, ``runner`` feeds the model, ``cache`` holds keys
and values, ``prefixes`` computes a prompt once for its group, ``sampling`` draws tokens, ``decoder`` is one step of all rows.
"""
