"""Skip contract tests for optional capabilities."""

from __future__ import annotations

import pytest

from miles_core.contracts.engine import Engine


def skip_without(engine: Engine, *capabilities: str) -> None:
    """Skip the current test unless ``engine`` has all of these capabilities."""
    lacking = set(capabilities) - engine.capabilities
    if lacking:
        pytest.skip(f"the engine lacks {', '.join(sorted(lacking))}")
