"""Samplers that differ from the trainer stop a run before it trains, and sound runs pass."""

import logging

import numpy as np
import pytest

from miles_core import defaults
from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch import first_steps
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_speculative.checkpoint import with_mtp
from miles_testing import toy_files
from miles_testing.doubles import remote

FP8 = {"rollout_precision": "fp8", "emulate_precision": True}
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32}
APART = {"plugins": [remote.__file__], "runtime": "remote"}
LONG = {"rollout_max_response_len": 24, "rollout_temperature": 0.5}


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    """Other checks do not look at the engine, so that this one has to."""
    monkeypatch.setattr(defaults, "make_first_sync_check", lambda run: None)
    for side in ("engine", "trainer"):
        monkeypatch.setattr(f"miles_embedded.{side}.build.self_check", lambda model: None)


def scale_logits(monkeypatch, factor, calls=None):
    """The sampler multiplies logits by ``factor``, or by 1 after ``calls`` calls."""
    sample, seen = EmbeddedEngine.sample, []

    def scaled(self, logits, *args, **options):
        seen.append(1)
        return sample(self, logits * (factor if calls is None or len(seen) <= calls else 1.0), *args, **options)

    monkeypatch.setattr(EmbeddedEngine, "sample", scaled)


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that were trained."""
    trained, step = [], EmbeddedTrainer.step
    monkeypatch.setattr(EmbeddedTrainer, "step", lambda self, *a, **b: trained.append(1) or step(self, *a, **b))
    return trained


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, APART], ids=["float32", "bfloat16", "worker"])
def test_a_temperature_that_is_applied_twice_stops_the_run_before_its_first_step(toy_run, monkeypatch, steps, options):
    scale_logits(monkeypatch, 1 / LONG["rollout_temperature"])
    sharp = {"initializer_range": 0.5}  # as a trained model, which is not equally uncertain about all tokens
    with pytest.raises(MismatchError) as caught:
        toy_run(**options, **LONG, sizes=sharp, self_check=True)
    text = str(caught.value)
    assert (
        "tokens of step 1" in text
        and "(version 0)" in text
        and "--allow-mismatch" in text
        and "sampling options" in text
    )
    assert not steps and "\n" not in text


def test_allow_mismatch_makes_it_a_warning_and_it_is_given_once(toy_run, monkeypatch, caplog):
    scale_logits(monkeypatch, 2.0)
    run = toy_run(**LONG, self_check=True, allow_mismatch=True)
    assert len(run.metrics) == 2
    assert sum("did not sample from the distribution" in r.message for r in caplog.records) == 1


def test_it_is_off_with_no_self_check(toy_run, monkeypatch):
    scale_logits(monkeypatch, 2.0)
    assert len(toy_run(**LONG).metrics) == 2


def test_a_difference_near_the_bound_is_decided_by_three_steps(toy_run, monkeypatch, steps):
    found = iter([0.06, 0.01, 0.05, 0.01])
    monkeypatch.setattr(first_steps, "measure", lambda s, t, mask: np.r_[np.full(9, 0.0), 10 * next(means)])
    monkeypatch.setattr(first_steps, "first_step_bound", lambda engine, trainer: 0.045)
    means = (value for value in found for _ in range(8))  # of the 8 samples of a step
    with pytest.raises(MismatchError, match=r"tokens of step 3.* by 0.05 nats .*median 0.05 over 3 steps"):
        toy_run(steps=5, self_check=True)
    assert len(steps) == 2
    found = [0.06, 0.01, 0.02]
    means = (value for value in found for _ in range(8))
    assert len(toy_run(steps=5, self_check=True).metrics) == 5  # and later steps are not compared


SOUND = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "supports": {"rollout_top_p": 0.7, "rollout_top_k": 5},
    "whole vocabulary": {"rollout_temperature": 1.0},
    "r3": {"plugins": ["r3"], "dtype": "bfloat16"},
    "tis": {"plugins": ["tis"], "dtype": "bfloat16"},
    "fp8": {"plugins": ["fp8"], **FP8},
    "fp8 both": {"plugins": ["fp8"], "train_precision": "fp8", **FP8},
    "mxfp8": {"plugins": ["mxfp8"], "rollout_precision": "mxfp8", "emulate_precision": True, "sizes": SIZES},
    "int4": {"plugins": ["int4"], "rollout_precision": "int4", "int4_group_size": 16},
    "switch": {"plugins": ["fp8"], "warmup_steps": 1, **FP8},
    "async": {"schedule": "async", "lr": 1e-2},
    "ahead": {"schedule": "ahead", "lr": 1e-2},
    "partial": {"schedule": "async", "partial_rollout": True, "pause_generation_mode": "in_place", "lr": 1e-2},
    "lora": {"plugins": ["lora"], "lora_rank": 2, "lora_dropout": 0.5, "family": "qwen3"},
    "drafts": {"plugins": ["speculative"], "spec_lookahead": 2},
    "capacity": {"plugins": ["experts"], "moe_capacity_factor": 0.5},
    "steps": {"global_batch_size": 4, "lr": 1e-2},
    "engine's log-probs": {"use_rollout_logprobs": True},
    "workers": APART,
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_runs_pass(toy_run, caplog, case, tmp_path):
    options = {"rollout_max_response_len": 12, "rollout_temperature": 0.8, **SOUND[case]}
    if case == "drafts":
        options["hf_checkpoint"] = with_mtp(toy_files() / "model", tmp_path / "mtp")
    with caplog.at_level(logging.INFO):
        run = toy_run(**options, steps=3, self_check=True, log_level="info")
    said = [r.message for r in caplog.records if "engine and trainer differ by" in r.message]
    assert len(run.metrics) == 3 and said and said[0].startswith("samples of step 1:")
    assert len(said) == (2 if case == "switch" else 1)  # the first step decides


def of(versions, mask=None, log_probs=(-1.0, -2.0)):
    return Sample(
        tokens=[1, 2, 3, 4], response_length=2, weight_versions=versions, loss_mask=mask, rollout_log_probs=log_probs
    )


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (of([(2, 5)]), [True, True]),
        (of([(2, 5)], [0, 1]), [False, True]),
        (of([(2, 4), (3, 5)]), None),
        (of([(2, 4)]), None),
        (of([]), [True, True]),
        (of([(2, 5)], [0, 0]), None),
        (of([(2, 5)], log_probs=None), None),
    ],
)
def test_only_samples_of_the_trained_weights_count(sample, expected):
    found = first_steps.find_current(sample, 5, unstamped=True)
    assert expected is None if found is None else found.tolist() == expected
    assert first_steps.find_current(of([]), 5, unstamped=False) is None


def test_differences_are_limited():
    sample = of([(2, 5)], log_probs=[-1.0, float("nan")])
    assert first_steps.measure(sample, np.array([-1.25, 0.0]), np.array([True, True])).tolist() == [0.25, 1.0]
    assert first_steps.measure(sample, np.array([-9.0, 0.0]), np.array([True, False])).tolist() == [1.0]
