"""Triton kernels for one GPU: steps of a model, and of an engine, that torch computes as many small kernels.

Each function computes the same as the torch code that it names, up to rounding. ``model.gpu_operations``
lists the steps of a model (``model.operations``) that use them.
"""
