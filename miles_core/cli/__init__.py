"""The ``miles`` command line.

Each command module parses its arguments, calls one function and prints the result.
"""
