"""Runs on two nodes. Starting a worker costs the seconds that importing torch takes, so few runs show much each."""

from __future__ import annotations

import re

import pytest

from miles_core import ConfigError, PlanError
from miles_core.testing import plan, toy_run

STEPS = 4
#: Kills an engine in a rollout, and the first rank in training, once each; the new rank finds no shared memory.
FAULTS = r"""
import os, re, signal
from pathlib import Path
from torch import distributed
from miles_core import hookimpl
from miles_zero_copy import segment

def process(run, name):
    return int(re.findall(r"process (\d+) on", (run.directory / "workers" / f"{name}.log").read_text())[-1])

@hookimpl
def on_start(run):
    if (run.directory / "killed").exists():
        segment.DIRECTORY = Path("/nowhere")

@hookimpl
def on_sample(run, sample):
    if sample.index == 9:
        os.kill(process(run, "engine-0"), signal.SIGKILL)

@hookimpl
def on_batch(run, batch):
    flag = run.directory / "killed"
    if run.step == 2 and distributed.get_rank() == 0 and not flag.exists():
        flag.touch()
        print("a last word", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def rewards(done):
    return [m["reward/mean"] for m in done.metrics]


def test_workers_on_two_nodes_compute_what_one_process_does_and_survive(cluster, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    options = {"steps": STEPS, "save_interval": 1}
    one = toy_run(["r3", "tis"], **options)
    given = {"runtime": "ray", "actor_num_nodes": 2, "rollout_num_gpus": 2, "log_level": "info"}
    plugins = ["r3", "tis", "zero_copy", str(tmp_path / "faults.py")]
    done = toy_run(plugins, directory=tmp_path / "run", **options, **given)
    assert rewards(done) == pytest.approx(rewards(one))
    for a, b in zip(done.metrics, one.metrics, strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
        assert {"busy/trainer-1", "idle/engine-0", "idle/engine-1", "time/train"} <= a.keys()
    log = (tmp_path / "run/run.log").read_text()
    assert "worker engine-0 was lost: its process died" in log
    assert re.search(r"worker trainer-0 was lost: its process died [^;]*; its last lines:\n(.*\n)*  a last word", log)
    assert "trainer-0 was replaced at step 2; the run goes on from step 2" in log
    assert len(re.findall(r"engine-1: miles_core.remote.output: process \d+ on", log)) == 1
    before, _, after = log.partition("a last word")
    assert "weights travel through shared memory\n" in before
    assert "weights travel through messages over the runtime's channel, because there is no shared memory" in after


def test_more_than_there_is_is_refused_before_anything_is_built(cluster):
    with pytest.raises(ConfigError, match=r"this run takes 7 CPUs, 6 to train .* and 1 for engines .* has 4"):
        toy_run(runtime="ray", actor_num_nodes=2, actor_num_gpus_per_node=3)


def test_a_trainer_process_that_cannot_be_placed_is_told(cluster, monkeypatch):
    monkeypatch.setattr("miles_ray.runtime.PLACING", 0.5)
    with pytest.raises(
        ConfigError,
        match=r"has no room for --actor-num-nodes 1 x --actor-num-gpus-per-node 3: its machines have 2, 2 CPUs",
    ):
        toy_run(runtime="ray", actor_num_gpus_per_node=3)


def test_what_the_options_contradict_is_refused():
    with pytest.raises(
        ConfigError, match=r"--rollout-num-gpus 3 are not whole engines of --rollout-num-gpus-per-engine 2"
    ):
        toy_run(runtime="ray", rollout_num_gpus=3, rollout_num_gpus_per_engine=2)
    with pytest.raises(PlanError, match="the plugin is a runtime"):
        plan(["ray"])


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127.0.0.1:9 \(--ray-address\): start one with"):
        toy_run(runtime="ray", ray_address="127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"answers at 127.0.0.1:9 \(RAY_ADDRESS\)"):
        toy_run(runtime="ray")
