"""One Ray cluster of two nodes on this machine, for all tests; without Ray they are skipped."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of two CPUs; the driver is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    ray.init(made.address, log_to_driver=False, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()
