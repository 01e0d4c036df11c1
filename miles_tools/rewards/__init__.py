"""Rewards that ship with core and are no part of it: mathematics, judged by math-verify in processes of their own."""
