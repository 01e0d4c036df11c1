"""Engine against trainer: the gap, and what causes it.

The same tokens scored on both sides (``gap``, ``probe``), the gap divided by cause (``budget``), quantisers and products held
against the format (``parity``, ``product_probe``), one model on both sides (``same_model``), the check after every sync
(``at_sync``) and what ``miles verify`` does and shows.
"""
