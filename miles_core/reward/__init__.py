"""From a finished sample to a number.

Core's rewards by name, a user's function, and a remote server.
"""
