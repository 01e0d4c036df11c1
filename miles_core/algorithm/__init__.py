"""Algorithms, one page each: advantages, losses and weights of tokens; KL and corrections.

All functions map tensors to tensors, over flat columns of tokens. They do not depend on samples, options or runs, so tests compare
them with numbers computed by hand. ``objective`` is the interface of a page, ``choices`` the table of the pages.
"""
