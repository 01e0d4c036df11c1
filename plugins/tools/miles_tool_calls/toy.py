"""The tool of a toy run."""


async def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing {where}"
