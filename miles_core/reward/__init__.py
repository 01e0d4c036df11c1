"""From a finished sample to a number.

Core's rewards by name, a user's function, a remote server, and the mathematics verifier in processes of its own.
"""
