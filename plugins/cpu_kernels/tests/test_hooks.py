"""Asking for the plugin means compiled kernels: in every model of a run, or an error that says why not."""

import logging
from types import SimpleNamespace

import pytest
import torch

from miles_core.errors import ConfigError, PlanError
from miles_cpu_kernels import hooks
from miles_cpu_kernels.hooks import CpuKernels, use_kernels
from miles_cpu_kernels.kernels import rms_norm
from miles_embedded.model.load import NAME
from miles_embedded.model.operations import TORCH, operations_of
from miles_testing import toy_run
from miles_testing.toy import plan


def test_every_model_of_a_run_computes_with_them(kernels):
    with_them, without = toy_run(["cpu_kernels"], kl_loss_coef=0.1), toy_run(kl_loss_coef=0.1)
    for model in (with_them.engine.model, with_them.trainer.model, with_them.trainer.reference):
        assert operations_of(model).norm is rms_norm
    for model in (without.engine.model, without.trainer.model):
        assert operations_of(model) is TORCH
    one, two = (run.metrics[0]["train/grad_norm"] for run in (with_them, without))
    assert one == pytest.approx(two, rel=1e-4)


def test_a_run_says_what_is_compiled_and_what_is_not(kernels, caplog, monkeypatch):
    monkeypatch.setattr(hooks, "left_to_torch", lambda: "it is so")
    with caplog.at_level(logging.INFO, hooks.log.name):
        use_kernels(torch.nn.Sequential(), "the draft model")
    (said,) = (record.getMessage() for record in caplog.records)
    assert "the draft model computes with compiled norms (0)" in said and "experts use torch, because it is so" in said


def test_without_a_compiler_a_run_ends_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(hooks, "why_not", lambda: "no C compiler is here (install gcc)")
    monkeypatch.setattr("miles_embedded.model.load.make_model", lambda *a: pytest.fail("a model was built"))
    with pytest.raises(
        ConfigError, match=r"--plugins cpu_kernels: no C compiler is here \(install gcc\); leave the plugin out"
    ):
        toy_run(["cpu_kernels"])


@pytest.mark.parametrize(
    ("options", "facts", "needs"),
    [
        ({"device": "cuda"}, ["gpu=H200"], "model.device == cpu"),
        ({}, ["gpu=H200", "gpu.count=1"], "model.device == cpu"),
        ({"dtype": "bfloat16"}, [], "model.dtype != bfloat16"),
    ],
)
def test_other_models_are_refused_by_the_plan(options, facts, needs):
    with pytest.raises(PlanError) as caught:
        plan(["cpu_kernels"], facts, **options)
    assert any(needs in problem.headline for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("options", "facts"), [({"device": "cpu"}, ["gpu=H200"]), ({"dtype": "float32"}, ["gpu=none"])]
)
def test_a_float32_model_on_a_cpu_is_not(options, facts):
    assert plan(["cpu_kernels"], facts, **options).order[0] == "cpu_kernels"


def test_a_model_that_is_not_float32_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(
        ConfigError, match=r"1\.weight of the train model is bfloat16 on cpu; give --device cpu --dtype float32"
    ):
        use_kernels(model, "the train model")


def test_models_of_other_backends_are_left_alone(monkeypatch):
    found = []
    monkeypatch.setattr(hooks, "use_kernels", lambda model, what: found.append(model))
    other, mine = (SimpleNamespace(config=SimpleNamespace(_attn_implementation=name)) for name in ("sdpa", NAME))
    for model in (other, mine, torch.nn.Linear(2, 2)):
        CpuKernels().on_model(model=model, role="train")
    assert found == [mine]
