"""``miles COMMAND``: thin commands over everything else.

Each module reads its arguments, calls one function and prints what came back.
"""
