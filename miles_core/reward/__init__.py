"""Computes the rewards of finished samples.

Rewards are rules by name, a user's function, or rewards that plugins provide.
"""
