"""The test kit's toy run and plan."""

from __future__ import annotations

import time

import pytest

from miles_core.errors import PlanError
from miles_testing.toy import toy_arguments, toy_files


def test_a_toy_run_is_a_real_run(toy_run):
    run = toy_run(["r3", "tis"], steps=2)
    assert [record["step"] for record in run.metrics] == [1, 2] and run.run.step == 2
    assert (run.directory / "checkpoints" / "step_00000002").is_dir()


def test_it_takes_less_than_a_second(toy_run):
    toy_run(["r3", "tis"])  # imports, and the model on disk
    best = 10.0
    for _ in range(4):
        start = time.process_time()
        toy_run(["r3", "tis"])
        best = min(best, time.process_time() - start)
    assert best < 1.0  # of processor time: the machine may be busy


def test_two_toy_runs_are_equal(toy_run):
    one, two = (toy_run(steps=2).metrics for _ in range(2))
    for first, second in zip(one, two, strict=True):
        same = [n for n in first if not n.startswith("time") and "second" not in n]
        assert [first[n] for n in same] == [second[n] for n in same]


def test_files_are_made_once():
    assert toy_files() is toy_files() and toy_files("llama") != toy_files()


def test_options_become_flags():
    words = toy_arguments(["r3"], "out", use_tis=True, full_vocab_logprobs=False, lr=None, rollout_top_k=3)
    assert words[:2] == ["--plugins", "r3"] and "--use-tis" in words and "--no-full-vocab-logprobs" in words
    assert "--lr" not in words and words[words.index("--rollout-top-k") + 1] == "3"
    assert words[words.index("--save") + 1] == "out"


def test_plan_resolves_without_running(plan):
    accepted = plan(["r3", "tis"])
    assert accepted.order == ("r3", "tis", "embedded")
    with pytest.raises(PlanError, match="there is no router to replay"):
        plan(["r3"], family="llama")
    assert plan(["fp8"], facts=["gpu=B200"], rollout_precision="fp8").order == ("fp8", "embedded")
