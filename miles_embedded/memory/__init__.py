"""The memory of a model, from its ``config.json`` alone: how many parameters it has (``model_size``), and what one GPU holds of the
embedded engine and trainer (``usage``). Imports no torch.
"""
