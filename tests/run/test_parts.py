"""What plugins put around a policy's ``learn``, and the optimizer and head that they provide."""

from __future__ import annotations

import gc

import pytest
import torch

from miles_core.errors import ConfigError, MilesError, PluginError
from miles_core.run import parts
from miles_testing.doubles import remote

#: A frozen teacher that generates nothing: its log-probs of the samples' tokens and its best tokens travel with the samples.
TEACHER = """
import numpy as np
from miles_core.data import Field
from miles_core.plugin import Plugin, Policy, hookimpl
from miles_core.trainer import Loss

plugin = Plugin(
    name="teacher", summary="distillation", version="1", core=">=0",
    fields=(Field("teacher", "float32", "response"), Field("best", "int32", "response")), hooks={"": ""},
)

@hookimpl
def on_start(run):
    run.policies.append(Policy(run.policy.hf_checkpoint, "teacher", "frozen"))

@hookimpl
def wrap_learn(run, policy, handles):
    def wrap(inner):
        async def learn(samples, step):
            own = await handles["teacher"].log_probs(samples)
            top = await handles["teacher"].top_log_probs(samples, 3)
            alone = await handles["teacher"].columns(samples, "verify", ("log_normalizer",))
            assert all(np.isfinite(c["log_normalizer"]).all() and c["log_normalizer"].all() for c in alone)
            for sample, log_probs, best in zip(samples, own, top, strict=True):
                assert best.tokens.shape == best.log_probs.shape == (sample.response_length, 3)
                where = best.tokens == np.asarray(sample.tokens[sample.prompt_length:])[:, None]
                np.testing.assert_allclose(best.log_probs[where], log_probs[where.any(1)], atol=1e-5)
                assert (best.log_probs[:, 0] >= best.log_probs[:, 1]).all()
                sample.fields |= {"teacher": log_probs, "best": best.tokens[:, 0]}
            return await inner(samples, step)
        return learn
    return wrap

@hookimpl
def wrap_loss(policy):
    def wrap(inner):
        def loss(output, batch, ctx):
            gap = (output.log_probs.detach() - batch.column("teacher")) * batch.mask
            return Loss(inner(output, batch, ctx).value, {"teacher/gap": (gap.abs().sum(), batch.mask.sum())})
        return loss
    return wrap
"""

LEARN = """
from miles_core.plugin import hookimpl
from miles_core.trainer import Learned

@hookimpl
def wrap_learn(run, policy, handles):
    assert list(handles) == ["policy"]
    def wrap(inner):
        async def learn(samples, step):
            return ANSWER
        return learn
    return wrap
"""

SGD = """
import torch
from miles_core.plugin import Plugin

plugin = Plugin(name="sgd", summary="SGD", version="1", core=">=0", provides={"optimizer": {"sgd": "make"}})

def make(run, policy, groups):
    return MADE
"""


@pytest.mark.parametrize(
    "where", [{}, {"plugins": [str(remote.__file__)], "runtime": "remote"}], ids=["inline", "remote"]
)
def test_a_frozen_teacher_scores_without_engine_and_optimizer(toy_run, tmp_path, where):
    (tmp_path / "teacher.py").write_text(TEACHER)
    plugins = [str(tmp_path / "teacher.py"), *where.pop("plugins", [])]
    done = toy_run(plugins, directory=tmp_path / "run", steps=2, lr=1e-2, **where)
    first, second = (record["teacher/gap"] for record in done.metrics)
    assert first < 1e-5 < 1e-3 < second  # the same weights, until the policy has moved
    _, teacher = done.parts
    assert teacher.engine is None and (teacher.policy.version, teacher.policy.trained) == (-1, 0)
    with pytest.raises(ConfigError, match=r"the policy teacher .role frozen. has no engine"):
        _ = teacher.serving
    if not where:
        trainer = teacher.learner.rank.trainer
        assert not trainer.optimizer.masters and not any(p.requires_grad for p in trainer.model.parameters())


def test_a_step_may_be_left_out(toy_run, tmp_path):
    (tmp_path / "skip.py").write_text(LEARN.replace("ANSWER", "await inner(samples, step) if step else Learned({}, 0)"))
    done = toy_run([str(tmp_path / "skip.py")], steps=2)
    assert ["train/loss" in record for record in done.metrics] == [False, True]
    assert done.run.policy.trained == 1 and done.run.policy.version == 2


def test_what_learn_returns_is_looked_at(toy_run, tmp_path):
    (tmp_path / "none.py").write_text(LEARN.replace("ANSWER", "None"))
    with pytest.raises(PluginError, match="hook wrap_learn: it returned None; expected what learn returned"):
        toy_run([str(tmp_path / "none.py")], steps=1)


def test_another_optimizer_steps_and_is_resumed(toy_run, tmp_path):
    (tmp_path / "sgd.py").write_text(SGD.replace("MADE", "torch.optim.SGD(groups, lr=0, momentum=0.9)"))
    options = {"optimizer": "sgd", "lr": 1e-2}
    whole = toy_run([str(tmp_path / "sgd.py")], steps=3, **options)
    optimizer = whole.trainer.optimizer
    assert type(optimizer._inner) is torch.optim.SGD and {n.split(".")[0] for n in optimizer.tensors()} == {
        "momentum_buffer"
    }
    toy_run([str(tmp_path / "sgd.py")], directory=tmp_path / "run", steps=2, **options)
    again = toy_run([str(tmp_path / "sgd.py")], directory=None, save=None, load=tmp_path / "run", steps=3, **options)
    for name, value in whole.trainer.optimizer.tensors().items():
        torch.testing.assert_close(again.trainer.optimizer.tensors()[name], value)
    (tmp_path / "sgd.py").write_text(SGD.replace("MADE", "3"))
    with pytest.raises(
        PluginError, match=r"make_optimizer \(sgd\): it returned a int, 3, which has no step, param_groups, state"
    ):
        toy_run([str(tmp_path / "sgd.py")], steps=1, **options)


def test_two_policies_export_and_save_into_folders_of_their_own(toy_run, tmp_path):
    (tmp_path / "two.yaml").write_text("policies: {solver: {lr: 0.01}, proposer: {lr: 0.02}, judge: {role: frozen}}")
    (tmp_path / "turns.py").write_text(
        "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_sample(run, sample):\n"
        "    sample.policy = run.policies[sample.group_index % 2].name\n"
    )
    options = {"config": tmp_path / "two.yaml", "lr": None, "export_hf": tmp_path / "hf"}
    done = toy_run([str(tmp_path / "turns.py")], directory=tmp_path / "run", steps=1, **options)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["proposer", "solver"]
    assert all((tmp_path / "hf" / name / "model.safetensors").is_file() for name in ("solver", "proposer"))
    saved = tmp_path / "run/checkpoints/step_00000001"
    assert (saved / "solver/trainer").is_dir() and (saved / "proposer/trainer").is_dir()
    assert not (saved / "judge/trainer").exists()  # what never changes needs no copy
    assert {"solver/train/loss", "proposer/train/loss"} <= done.metrics[-1].keys()
    resumed = toy_run(
        [str(tmp_path / "turns.py")],
        directory=None,
        save=None,
        load=tmp_path / "run",
        steps=2,
        lr=None,
        export_hf=tmp_path / "again",
    )
    assert [p.name for p in resumed.run.policies] == ["solver", "proposer", "judge"]
    assert [record["step"] for record in resumed.metrics] == [1, 2]


def test_a_critic_is_asked_for_values_only(toy_run, tmp_path):
    (tmp_path / "ask.py").write_text(
        TEACHER.replace('"teacher", "frozen"', '"teacher", "critic"').replace(
            "log_probs(samples)", "log_probs(samples)"
        )
    )
    with pytest.raises(MilesError, match="this model computes values and not log_probs"):
        toy_run([str(tmp_path / "ask.py")], steps=1)


COPY = """
from miles_core.plugin import Plugin, Policy, hookimpl

plugin = Plugin(name="copies", summary="an opponent of the past", version="1", core=">=0", hooks={"": ""})

@hookimpl
def on_start(run):
    run.policies.append(Policy(run.policy.hf_checkpoint, "past", "frozen", generates=True))
    run.state["synced"], run.state["engines"] = [], {}

@hookimpl
def wrap_learn(run, policy, handles, engines):
    run.state["engines"] = dict(engines)
    def wrap(inner):
        async def learn(samples, step):
            if step == 1:
                await handles["policy"].save(run.directory / "copy")
                await handles["past"].load(run.directory / "copy")
            own, past = await handles["policy"].log_probs(samples), await handles["past"].log_probs(samples)
            gaps = [abs(a - b).max() for a, b in zip(own, past, strict=True)]
            run.state["gap"] = float(max(gaps))
            return await inner(samples, step)
        return learn
    return wrap

@hookimpl
def on_step(run, metrics):
    metrics["copies/gap"] = run.state["gap"]
    served = [(policy.name, policy.version) for policy in run.policies]
    run.state["synced"] += [each for each in served if each not in run.state["synced"]]
"""

CONFIGURE = """
from miles_core.plugin import hookimpl

@hookimpl
def wrap_learn(run, policy, handles):
    def wrap(inner):
        async def learn(samples, step):
            if step:
                await handles[policy.name].configure(OPTIONS)
            return await inner(samples, step)
        return learn
    return wrap
"""


@pytest.mark.parametrize("runtime", ["inline", "remote"])
def test_a_frozen_policy_takes_weights_and_its_engine_gets_them(toy_run, tmp_path, runtime):
    (tmp_path / "copies.py").write_text(COPY)
    plugins = [str(tmp_path / "copies.py"), *([remote.__file__] if runtime == "remote" else [])]
    done = toy_run(plugins, steps=3, lr=1e-2, runtime=runtime, directory=tmp_path / "run")
    state = done.run.state
    assert [s for s in state["synced"] if s[0] == "past"] == [("past", 0), ("past", 2)]
    assert sorted(state["engines"]) == ["past", "policy"]
    gaps = [record["copies/gap"] for record in done.metrics]
    assert gaps[0] == gaps[1] == 0.0 or gaps[1] == 0.0 < gaps[2]
    if runtime == "inline":
        again = toy_run(plugins, steps=4, lr=1e-2, directory=tmp_path / "run", load=tmp_path / "run")
        assert again.metrics[-1]["copies/gap"] > gaps[2] > 0  # the weights of step 1, not those of the checkpoint


@pytest.mark.parametrize("runtime", ["inline", "remote"])
def test_options_change_while_the_trainer_runs(toy_run, tmp_path, runtime):
    options = {"train.lr": 2e-3, "algorithm.eps_clip": 0.01}
    (tmp_path / "changes.py").write_text(CONFIGURE.replace("OPTIONS", repr(options)))
    plugins = [str(tmp_path / "changes.py"), *([remote.__file__] if runtime == "remote" else [])]
    done = toy_run(plugins, steps=2, lr=1e-3, runtime=runtime, num_steps_per_rollout=2, directory=tmp_path / runtime)
    assert [record["train/lr"] for record in done.metrics] == [1e-3, 2e-3]
    assert done.run.config_of(done.run.policy).algorithm.eps_clip == 0.01
    clipped = [record["train/clip_fraction_high"] + record["train/clip_fraction_low"] for record in done.metrics]
    assert clipped[1] > clipped[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout.temperature": 0.5}, "rollout.temperature of the policy policy cannot change"),
        ({"train.lr": -1.0}, "train.lr|--lr"),
    ],
)
def test_an_option_that_cannot_change_is_refused(toy_run, tmp_path, options, message):
    (tmp_path / "changes.py").write_text(CONFIGURE.replace("OPTIONS", repr(options)))
    with pytest.raises(ConfigError, match=message):
        toy_run([str(tmp_path / "changes.py")], steps=2)


def test_built_parts_search_for_garbage_again_and_leave_out_what_was_there_before(monkeypatch):
    monkeypatch.setattr(parts, "gc", gc)  # the suite replaces it
    usual = gc.get_threshold()
    gc.set_threshold(50_000)
    try:
        parts.freeze_gc()
        assert gc.get_threshold()[0] == 100_000
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
