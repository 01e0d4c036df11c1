"""Rewards that ship with core and are no part of it.

Mathematics, judged by math-verify in processes of their own (``math_verifier``), and a user's HTTP service (``remote``).
"""
