"""The forward of a quantised layer, on both sides.

Weights that are held as a number format stores them, inputs rounded as its products read them, and linear layers that
multiply codes natively.
"""
