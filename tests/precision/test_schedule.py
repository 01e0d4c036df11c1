"""The warm-up: both sides plain for N optimiser steps, then both in their formats."""

import io
import logging

import pytest
import torch
from rich.console import Console

from miles_core.config.load import load
from miles_core.errors import ConfigError, MilesError, PlanError
from miles_core.launch import launch
from miles_core.precision.schedule import Precisions, precisions
from miles_core.run.prepare import apply_plan, prepare
from miles_testing.toy import ToyRun, toy_arguments

UNIFIED = {"rollout_fp8": True, "train_fp8": True, "emulate_precision": True}
MIXED = {"rollout_fp8": True, "emulate_precision": True}
WEIGHT = "model.layers.0.mlp.experts.down_proj"


def held(run):
    """A quantised weight on each side: the engine's own, and what the trainer's forward finds."""
    trainer = run.trainer
    plain = dict(trainer.model.named_parameters())[WEIGHT]
    return dict(run.engine.model.named_parameters())[WEIGHT], plain, trainer.precision


def test_the_phase_follows_from_the_optimiser_steps():
    config = load(["--rollout-precision", "fp8", "--warmup-steps", "3"])
    assert [precisions(config, n).rollout for n in range(5)] == ["bf16", "bf16", "bf16", "fp8", "fp8"]
    assert precisions(config, 3) == Precisions("fp8", "bf16")


def test_both_sides_switch_together(toy_run, caplog):
    with caplog.at_level(logging.INFO, "miles_core.precision.schedule"):
        found = toy_run(**UNIFIED, steps=1, warmup_steps=2, log_level="info")
        weight, plain, precision = held(found)
        assert torch.equal(weight, plain) and precision.current == "bf16"
        found = toy_run(**UNIFIED, steps=2, warmup_steps=2)
    weight, plain, precision = held(found)
    assert not torch.equal(weight, plain) and precision.current == "fp8"
    assert "after 2 optimiser steps: rollout bf16 -> fp8, training bf16 -> fp8" in caplog.text


def test_the_first_steps_are_those_of_a_plain_run(toy_run):
    plain = toy_run(steps=3).metrics
    warm = toy_run(**UNIFIED, steps=4, warmup_steps=3).metrics
    # the numbers of three plain steps, bit for bit; the fourth is quantised on both sides
    for key in ("reward/mean", "train/loss", "mismatch/abs_log_prob", "train/grad_norm"):
        assert [m.get(key) for m in warm[:3]] == [m.get(key) for m in plain], key
    assert any(key in plain[0] for key in ("train/grad_norm",))
    assert warm[3]["mismatch/abs_log_prob"] > 0


def test_several_optimiser_steps_a_rollout_are_counted(toy_run):
    found = toy_run(**MIXED, steps=2, warmup_steps=3, num_steps_per_rollout=2)
    assert found.run.policy.trained == 4
    weight, plain, precision = held(found)
    assert not torch.equal(weight, plain) and precision.current == "bf16"


def resumed(source, directory, steps):
    config = load(
        [
            *toy_arguments((), directory, steps, **UNIFIED, warmup_steps=3, warmup_precision="bf16"),
            "--load",
            str(source),
        ]
    )
    plan, catalogue = prepare(config)
    done = launch(apply_plan(config, plan), plan, catalogue, Console(file=io.StringIO()))
    return ToyRun(done.run, done.parts, [])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_run_continues_in_its_phase_bit_for_bit(toy_run, tmp_path, stop):
    whole = toy_run(**UNIFIED, steps=5, warmup_steps=3)
    first = toy_run(**UNIFIED, steps=stop, warmup_steps=3)
    second = resumed(first.directory, tmp_path / "second", 5)
    assert second.run.policy.trained == 5
    for a, b in zip(held(whole)[:2], held(second)[:2], strict=True):
        assert torch.equal(a, b)
    assert [s for s in whole.samples if s["step"] > stop] == second.samples


def test_a_warm_up_without_a_format_is_refused(plan):
    with pytest.raises(ConfigError, match=r"--warmup-steps 3: it needs rollout.precision != bf16 or"):
        plan(warmup_steps=3)


FIXED = """
from miles_embedded.engine.build import make_engine
from miles_embedded.trainer.build import make_trainer
from miles_embedded import plugin as EMBEDDED
from miles_core.plugin.manifest import Plugin
from miles_core.contracts.engine import Engine
from miles_core.contracts.trainer import Trainer

plugin = Plugin(
    "fixed", "backends that stay as they were built", "0", "~=0.1",
    provides={"engine": {"fixed": "engine"}, "trainer": {"fixed": "trainer"}},
    capabilities={
        kind: tuple(c for c in EMBEDDED.capabilities[kind] if c != "rebuild") for kind in ("engine", "trainer")
    },
)


def fixed(part, base):
    part.rebuild = lambda precision: base.rebuild(part, precision)
    return part


def engine(run, policy):
    return fixed(make_engine(run, policy), Engine)


def trainer(run, policy):
    return fixed(make_trainer(run, policy), Trainer)
"""


@pytest.fixture
def fixed(tmp_path):
    (tmp_path / "fixed.py").write_text(FIXED)
    return [str(tmp_path / "fixed.py")]


@pytest.mark.parametrize("kind", ["engine", "trainer"])
def test_a_backend_that_cannot_switch_is_refused_before_the_run(plan, fixed, kind):
    with pytest.raises(PlanError) as refused:
        plan(fixed, **UNIFIED, warmup_steps=2, **{kind: "fixed"})
    (problem,) = refused.value.problems
    side = "rollout" if kind == "engine" else "train"
    assert problem.headline == f"a warm-up to {side}.precision fp8 needs the {kind} capability rebuild"
    assert "after 2 optimiser steps it changes its precision" in problem.because and "--warmup-steps" in problem.because
    assert plan(fixed, **UNIFIED, **{kind: "fixed"})  # without a warm-up it may stay as it is


def test_a_trainer_that_stays_in_bf16_need_not_switch(toy_run, fixed):
    found = toy_run(fixed, **MIXED, trainer="fixed", steps=3, warmup_steps=2)
    weight, plain, _ = held(found)
    assert not torch.equal(weight, plain)


def test_an_engine_whose_layout_changed_waits_for_weights(toy_run):
    import asyncio

    from miles_core.contracts.engine import Request, Sampling

    engine = toy_run(**MIXED, steps=1).engine

    async def main():
        await engine.start()
        await engine.rebuild("bf16")
        with pytest.raises(MilesError, match="the layout changed"):
            await engine.generate(Request([3, 4], Sampling(2)))

    asyncio.run(main())
    assert engine.codec.format is None
