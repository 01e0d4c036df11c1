"""Algorithms, one module each: advantages, losses and weights of tokens; KL and corrections.

All functions map tensors to tensors, over flat columns of tokens. They do not depend on samples, options or runs, so tests compare
them with numbers computed by hand. ``objective`` defines the interface of an algorithm, ``choices`` maps names to algorithms.
"""
