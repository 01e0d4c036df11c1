"""One model definition for both sides: loading, attention, experts, export.

One forward call with the context of its pass, log-probabilities, and the names that a checkpoint knows a module's tensors
by. ``operations`` is the table of a layer's steps that a plugin may compute in another way.
"""
