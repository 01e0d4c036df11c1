"""Triton kernels for one GPU: steps of a model, and of an engine, that torch computes as many small kernels.

Each function computes what the torch code that it names computes, but for the last places of a number. ``model.gpu_operations``
lists the steps of a model (``model.operations``) that use them.
"""
