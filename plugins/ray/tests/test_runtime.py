"""Runs on two nodes. Starting a worker costs the seconds that importing torch takes, so one run shows much."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import ClassVar

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_testing import RuntimeContract, plan, toy_run
from miles_testing.tiny import tiny_checkpoint

STEPS = 3
#: A machine dies in the second step's training: with its first rank and the engine beside it. The new ones find no shared memory.
FAULTS = r"""
import os, signal
from pathlib import Path
from torch import distributed
from miles_core.plugin import hookimpl
from miles_zero_copy import segment

@hookimpl
def on_start(run):
    if (run.directory / "killed").exists():
        segment.DIRECTORY = Path("/nowhere")

@hookimpl
def on_batch(run, batch):
    flag = run.directory / "killed"
    if run.step == 1 and distributed.get_rank() == 0 and not flag.exists():
        flag.touch()
        print("a last word", flush=True)
        os.kill(os.getppid(), signal.SIGKILL)  # Ray's process of this machine
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
class TestTwoMachinesOfWhichOneDies(RuntimeContract):
    """Two ranks, and an engine that takes turns with them; the first rank's machine dies on the way."""

    options: ClassVar = {
        "runtime": "ray",
        "actor_num_nodes": 2,
        "rollout_num_gpus": 1,
        "colocate": True,
        "log_level": "info",
    }
    rel = 1e-3
    workers = ("trainer-0", "trainer-1", "engine-0")
    steps = STEPS

    @pytest.fixture(scope="class", autouse=True)
    def faults(self, request, cluster, tmp_path_factory):
        path = tmp_path_factory.mktemp("faults") / "faults.py"
        path.write_text(FAULTS)
        request.cls.plugins = ("r3", "tis", "zero_copy", str(path))

    def test_the_dead_are_named_and_replaced(self, done):
        assert all("time/colocate" in metrics for metrics in done.metrics)
        log = (done.directory / "run.log").read_text()
        assert re.search(
            r"worker trainer-0 was lost: its machine died [^;]*; its last lines:\n(.*\n)*  a last word", log
        )
        assert "worker engine-0 was lost: its machine died" in log
        assert "trainer-0 was replaced at step 1; the run continues from step 1" in log
        assert len(re.findall(r"engine-0: miles_workers.output: process \d+ on", log)) == 2
        before, _, after = log.partition("a last word")
        assert "weights travel through shared memory\n" in before
        assert "weights travel through messages over the runtime's channel, because there is no shared memory" in after


@pytest.mark.thorough
def test_a_machine_that_does_not_come_back_ends_the_run_with_the_numbers(cluster, monkeypatch, tmp_path):
    import ray

    monkeypatch.setattr("miles_ray.workers.REPLACING", 3.0)
    (tmp_path / "faults.py").write_text(FAULTS.replace("from miles_zero_copy import segment", "segment = None"))
    machines = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    run = {"actor_num_nodes": machines, "colocate": True, "rollout_num_gpus": 1, "save_interval": 1, "steps": 3}
    try:
        message = r"its machine left the cluster, and for 3 s none of the others \(2 CPUs.*\) had room for 1 CPU more"
        with pytest.raises(ConfigError, match=message):
            toy_run([str(tmp_path / "faults.py")], directory=tmp_path / "run", runtime="ray", **run)
        assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir(), "the run can be resumed"
    finally:
        cluster.add_node(num_cpus=2)


def test_more_than_there_is_is_refused_before_anything_is_built(cluster):
    with pytest.raises(ConfigError, match=r"this run takes 7 CPUs, 6 to train .* and 1 for engines .* has [46]"):
        toy_run(runtime="ray", actor_num_nodes=2, actor_num_gpus_per_node=3)


def test_a_trainer_process_that_cannot_be_placed_is_told(cluster, monkeypatch):
    monkeypatch.setattr("miles_ray.runtime.PLACING", 0.5)
    with pytest.raises(
        ConfigError,
        match=r"has no room for --actor-num-nodes 1 x --actor-num-gpus-per-node 3: its machines have 2, 2.* CPUs",
    ):
        toy_run(runtime="ray", actor_num_gpus_per_node=3)


def test_what_the_options_contradict_is_refused_in_the_plan(monkeypatch):
    def refused(*facts, **options):
        with pytest.raises(PlanError) as found:
            plan(runtime="ray", facts=facts, **options)
        return str(found.value)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("miles_ray.review._initialised", lambda: False)
    assert "--rollout-num-gpus 3 are not a multiple of --rollout-num-gpus-per-engine 2" in refused(
        rollout_num_gpus=3, rollout_num_gpus_per_engine=2
    )
    odd = refused(actor_num_gpus_per_node=3, rollout_num_gpus_per_engine=2, colocate=True)
    assert "engines of 2 GPUs that divide the 3 of a machine" in odd and "--rollout-num-gpus-per-engine 1" in odd
    assert "the cluster has only this machine" in refused(actor_num_nodes=2)
    two = ("gpu=H200", "gpu.count=2", "gpu.machines=1")
    assert "the trainer takes 1 x 2 and 1 x 1 to generate, and there are 2" in refused(*two, actor_num_gpus_per_node=2)
    assert plan(runtime="ray", facts=two, actor_num_gpus_per_node=2, colocate=True)
    with pytest.raises(PlanError, match="the plugin is a runtime"):
        plan(["ray"])


def test_a_cluster_that_does_not_answer_is_named_in_the_plan(monkeypatch):
    with pytest.raises(PlanError, match=r"no process listens at 127.0.0.1:9 \(--ray-address\): start one with"):
        plan(runtime="ray", ray_address="127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(PlanError, match=r"no process listens at 127.0.0.1:9 \(RAY_ADDRESS\)"):
        plan(runtime="ray")


def test_signals_are_the_run_s_own_again_after_ray_has_started():
    """Ray's handler of SIGTERM aborts the process; a run that is told to end keeps its last completed step."""
    from miles_ray.cluster import _preserve_handlers

    def handle(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(RuntimeError), _preserve_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise RuntimeError
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_while_ray_starts_reaches_the_run():
    """Otherwise Ray's handler raises SystemExit somewhere in ``ray.init``, and the run continues or ends with another status."""
    import ray

    from miles_ray.cluster import _preserve_handlers

    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    install = ray._private.utils.set_sigterm_handler
    try:
        with _preserve_handlers():
            ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as ray.init does
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] and ray._private.utils.set_sigterm_handler is install
    finally:
        signal.signal(signal.SIGTERM, before)


SHARED = {"share_policy_gpus": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}
OWN = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("places", [SHARED, OWN], ids=["shared", "own"])
def test_a_critic_learns_the_same_on_gpus_of_its_own_and_on_those_of_its_policy(cluster, places):
    """Two ranks each and two engines: apart, policy and critic take six CPUs, shared they take four."""
    options = {"advantage_estimator": "ppo", "critic_lr": 1e-2, "lr": 1e-3, "steps": 2}
    here = toy_run(["ppo"], **options)
    there = toy_run(["ppo"], runtime="ray", **places, **options)
    for name in ("critic/train/value_loss", "train/grad_norm", "reward/mean"):
        assert [m[name] for m in there.metrics] == pytest.approx([m[name] for m in here.metrics], rel=1e-3)


def test_policies_that_share_gpus_do_not_take_turns_on_them():
    with pytest.raises(PlanError, match="the other policies' processes would keep their"):
        plan(runtime="ray", share_policy_gpus=True, colocate=True)


def test_an_engine_on_several_machines_is_planned(tmp_path):
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 64}
    model = tiny_checkpoint("llama", tmp_path / "model", **heads)  # divides among 16 GPUs
    facts = ("hardware=4x8xH100",)
    sizes = {"hf_checkpoint": model, "rollout_num_gpus_per_engine": 16, "rollout_num_gpus": 16}
    sizes |= {"actor_num_gpus_per_node": 8}
    assert plan(runtime="ray", engine="sglang", facts=facts, **sizes)
    shared = {"colocate": True, "actor_num_nodes": 2, "sglang_mem_fraction_static": 0.5}
    assert plan(runtime="ray", engine="sglang", facts=facts, **shared, **sizes)
    with pytest.raises(PlanError, match="--engine embedded runs on one machine; --engine sglang can use several"):
        plan(runtime="ray", facts=facts, **sizes)
    with pytest.raises(PlanError, match="engines of 12 GPUs that divide the 8 of a machine or take whole machines"):
        changed = sizes | {"rollout_num_gpus_per_engine": 12, "rollout_num_gpus": 12}
        plan(runtime="ray", engine="sglang", facts=facts, colocate=True, actor_num_nodes=2, **changed)


def test_parts_of_an_engine():
    from miles_ray.sizes import Sizes

    sizes = Sizes(nodes=4, per_node=8, engines=2, per_engine=16, colocate=True)
    assert sizes.parts(8) == 2 and sizes.parts(16) == 1 and sizes.parts(5) == 4
    assert [sizes.ranks_of(1, part, 2) for part in range(2)] == [range(16, 24), range(24, 32)]
