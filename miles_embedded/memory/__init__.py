"""Memory estimates from ``config.json``: the number of parameters (``model_size``) and the memory of the embedded engine and trainer
on one GPU (``usage``). Does not import torch.
"""
