"""Test doubles of production components: the same contracts across a process boundary, without additional software."""
