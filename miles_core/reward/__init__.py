"""From a finished sample to a number.

Rules by name, a user's function, and those that plugins provide.
"""
