"""Rewards that are installed with core but are not part of it.

Rules on texts (``text_rules``), mathematics, checked by math-verify in separate processes (``math_verifier``), and a user's HTTP
service (``remote``).
"""
