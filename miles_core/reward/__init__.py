"""Computes the rewards of finished samples.

Rewards are core's rules by name, a user's function, a remote server, or the mathematics verifier in separate processes.
"""
