"""Computes the rewards of finished samples.

Rewards are core's rules by name, a user's function, and functions that plugins provide.
"""
