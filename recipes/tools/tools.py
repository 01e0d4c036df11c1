"""The tool of the recipe."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b
