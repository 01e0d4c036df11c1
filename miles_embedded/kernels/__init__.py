"""Triton kernels for one GPU: steps of a model, and of an engine, that torch computes as many small kernels.

Each function computes what the torch code that it names computes, but for the last places of a number. ``operations.on_gpu`` is the table
of a model's steps (``model.operations``) that uses them.
"""
