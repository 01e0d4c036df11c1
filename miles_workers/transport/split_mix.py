"""SplitMix64 (Steele, Lea and Flood 2014), pseudo-random numbers for the checksum."""

from torch import Tensor

#: Increment and factors, as signed numbers.
GOLDEN, MIX_A, MIX_B = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def pseudo_random(numbers: Tensor) -> Tensor:
    """Return SplitMix64's output for each of these numbers, int64."""
    x = (numbers + 1) * GOLDEN
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX_A  # >> is arithmetic; the masks make it logical
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX_B
    return x ^ (x >> 31 & (1 << 33) - 1)
