"""The embedded engine: continuous batching over a KV cache.

``engine`` implements the engine contract, ``scheduler`` manages requests, ``runner`` runs the model and shares computed prompts between
rows, ``cache`` stores keys and values, ``sampling`` samples tokens and ``decoder`` advances all rows by one step.
"""
