"""The embedded engine: continuous batching over a KV cache.

``engine`` implements the engine contract, ``scheduler`` manages requests, ``runner`` runs the model, ``cache`` stores keys and
values, ``prefixes`` shares computed prompts between rows, ``sampling`` samples tokens and ``decoder`` advances all rows by one step.
"""
