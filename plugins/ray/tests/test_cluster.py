"""Clusters that cannot run a job, without Ray's processes."""

from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

from miles_core.plugin import ConfigError  # noqa: E402
from miles_ray.cluster import Cluster, count_gpus  # noqa: E402


def machine(gpus, kind=None, alive=True):
    named = {f"accelerator_type:{kind}": 1.0} if kind else {}
    return {"Alive": alive, "Resources": {"CPU": 96.0, "GPU": float(gpus), **named}}


def checked(monkeypatch, *machines):
    monkeypatch.setattr(ray, "nodes", lambda: list(machines))
    cluster = Cluster.__new__(Cluster)
    cluster.address, cluster.unit, cluster.devices, cluster.policies, cluster.shared = "head:6379", "GPU", 16, 1, False
    cluster.sizes = SimpleNamespace(devices=16, ranks=8, nodes=1, per_node=8, engines=8, per_engine=1, colocate=False)
    cluster.resources = {"GPU": sum(one["Resources"]["GPU"] for one in machines if one["Alive"])}
    cluster._check()


def test_a_cluster_with_gpus_of_several_kinds_is_refused_with_their_numbers(monkeypatch):
    with pytest.raises(ConfigError, match=r"head:6379 has GPUs of 2 kinds, 8 H100 and 16 H200: a run needs one kind"):
        checked(monkeypatch, machine(8, "H100"), machine(8, "H200"), machine(8, "H200"))


def test_machines_without_gpus_and_those_that_left_do_not_count(monkeypatch):
    checked(monkeypatch, machine(0), machine(8, "H100"), machine(8, "H100"), machine(8, "H200", alive=False))


def test_machines_whose_kind_ray_does_not_know_do_not_count(monkeypatch):
    checked(monkeypatch, machine(8), machine(8))
    assert count_gpus([{"GPU": 8.0}, {"CPU": 4.0, "accelerator_type:H100": 1.0}]) == {}


def test_too_few_gpus_are_refused_with_the_numbers(monkeypatch):
    with pytest.raises(ConfigError, match=r"this run takes 16 GPUs, 8 to train .* has 8"):
        checked(monkeypatch, machine(8, "H100"))
