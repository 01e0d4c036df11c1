"""The demonstration: a small model, and a task it learns in minutes.

A mixture of experts, a tokenizer and a two-digit addition task, all made on the spot.
"""
