"""Measures the mismatch between engine and trainer, and attributes it to causes.

The modules compare scores of the same tokens on both sides (``gap``, ``probe``), divide the gap by cause (``budget``), compare
quantisers and products with the format (``parity``, ``product_probe``), check that both sides run the same model (``same_model``,
``first_sync``), and check every weight sync (``weights_arrived``, ``movement``, ``at_sync``).
"""
