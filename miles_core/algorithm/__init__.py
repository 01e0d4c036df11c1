"""Pure functions: advantages, losses, KL, corrections.

Tensors in, tensors out, over flat columns of tokens. Nothing here knows a sample, an option or a run, so every function is
compared with numbers computed by hand.
"""
