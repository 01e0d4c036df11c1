"""Sizes of blocks and grids. Triton's functions of these names also work at compile time, and take microseconds on the host for each call."""

from __future__ import annotations


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not smaller than a positive integer."""
    return 1 << (number - 1).bit_length()
