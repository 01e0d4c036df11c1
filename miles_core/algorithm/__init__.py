"""Pure functions: advantages, losses, KL, corrections.

All functions map tensors to tensors, over flat columns of tokens. They do not depend on samples, options or runs, so tests compare
them with numbers computed by hand.
"""
