"""One Ray cluster of several nodes on this machine, for all tests; without Ray they are skipped."""

from __future__ import annotations

import pytest

#: A dead machine is noticed in a second; by default it takes half a minute.
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


@pytest.fixture(scope="session")
def cluster():
    """Three machines of two CPUs, one of them to spare, and a head that computes nothing; the driver is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    alone = {"num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    made = Cluster(initialize_head=True, head_node_args={**alone, "_system_config": QUICK})
    for _ in range(3):
        made.add_node(num_cpus=2, wait=False)
    made.wait_for_nodes()
    ray.init(made.address, log_to_driver=False, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()
