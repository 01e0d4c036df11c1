"""The forward of quantised layers for engine and trainer.

Fake-quantised weights, inputs rounded as a format's products require, and linear layers that multiply codes natively.
"""
