"""Rewards that ship with core and are no part of it.

Rules on texts (``text_rules``), mathematics, judged by math-verify in processes of their own (``math_verifier``), and a user's HTTP
service (``remote``).
"""
