"""The pytest plugin of miles-core: fixtures for plugin authors. Does not import torch when pytest loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from miles_testing.ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks that the contracts use."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a torch.distributed group, started on first use; see ``miles_testing.ranks``."""
    from miles_testing.ranks import Ranks

    shared = Ranks()
    yield shared
    shared.close()


@pytest.fixture
def toy_run(tmp_path: Any) -> Callable[..., Any]:
    """``toy_run(plugins=["./mine.py"], steps=2, **flags) -> ToyRun``; see ``miles_testing.toy.toy_run``."""
    from miles_testing.toy import toy_run as run

    number = iter(range(1_000_000))

    def in_tmp(plugins: Any = (), **options: Any) -> Any:
        options.setdefault("directory", tmp_path / f"toy{next(number)}")
        return run(plugins, **options)

    return in_tmp


@pytest.fixture
def plan() -> Callable[..., Any]:
    """``plan(plugins=["mine"], facts=["gpu=B200"], **flags) -> Plan``; raises PlanError if the run is refused."""
    from miles_testing.toy import plan as resolve

    return resolve
