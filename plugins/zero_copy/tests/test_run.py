"""Whole runs: which path is taken, that the numbers do not depend on it, and what happens when it fails."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from miles_core.plugin import PlanError
from miles_testing import plan
from miles_testing.doubles import remote
from miles_tools.commands import doctor
from miles_zero_copy import segment

SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32}
FP8 = {"rollout_precision": "fp8", "train_precision": "fp8", "emulate_precision": True}

#: An engine that is spoken to by messages, as a single file. The first ``failures`` buckets it gets after the first are wrong.
ELSEWHERE = """
from miles_core.plugin import Plugin, SyncError
from miles_embedded import make_engine

plugin = Plugin(
    name="elsewhere", summary="an engine that takes messages", version="1", core=">=0",
    provides={"engine": {"elsewhere": "make"}},
    capabilities={"engine": ("score", "score_temperature", "token_versions", "keyed_sampling", "transport:buckets", "format:*")},
)


def make(run, policy):
    engine = make_engine(run, policy)
    engine.capabilities = engine.capabilities - {"shared_storage"}
    engine.kinds, engine.failures, receive = [], FAILURES, engine.receive

    async def spoiled(message, version, last):
        engine.kinds.append(message["memory"]["kind"])
        if message["units"] and engine.failures:
            engine.failures -= 1
            message = {**message, "checksum": 0}
        await receive(message, version, last)

    engine.receive = spoiled
    return engine
"""


def weights(run):
    return [p.detach().clone() for p in run.trainer.model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def elsewhere(tmp_path, failures=0):
    file = tmp_path / "elsewhere.py"
    file.write_text(ELSEWHERE.replace("FAILURES", str(failures)))
    return str(file)


def test_one_storage_moves_nothing_and_changes_nothing(toy_run):
    copied, shared = toy_run(), toy_run(use_zero_copy_sync=True)
    assert equal(weights(copied), weights(shared))
    assert [r["reward/mean"] for r in copied.metrics] == [r["reward/mean"] for r in shared.metrics]
    assert {r["sync/bytes"] for r in shared.metrics} == {0.0} and copied.metrics[0]["sync/bytes"] > 0
    pairs = zip(shared.trainer.model.parameters(), shared.engine.model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def test_quantised_weights_are_the_engine_s_own_and_the_rest_is_shared_also_after_a_warm_up(toy_run):
    options = {**FP8, "sizes": SIZES, "steps": 3, "warmup_steps": 1}
    copied, shared = toy_run(["fp8"], **options), toy_run(["fp8"], use_zero_copy_sync=True, **options)
    assert equal(weights(copied), weights(shared))
    trained, served = shared.trainer.model.state_dict(), shared.engine.model.state_dict()
    one = {name for name in trained if trained[name].data_ptr() == served[name].data_ptr()}
    assert "model.embed_tokens.weight" in one and "model.layers.0.self_attn.q_proj.weight" not in one
    assert 0 < shared.metrics[-1]["sync/bytes"] < copied.metrics[-1]["sync/bytes"] * 4
    for name in trained:
        assert torch.equal(served[name], dict(copied.engine.model.state_dict())[name])


@pytest.mark.parametrize("schedule", ["ahead", "async"])
def test_an_engine_that_generates_while_the_trainer_steps_has_weights_of_its_own(toy_run, schedule):
    run = toy_run(use_zero_copy_sync=True, schedule=schedule)
    assert run.metrics[-1]["sync/bytes"] > 0
    engine = {p.data_ptr() for p in run.engine.model.parameters()}
    assert not engine & {p.data_ptr() for p in run.trainer.model.parameters()}


def test_codes_are_written_into_shared_memory_and_arrive(toy_run, tmp_path):
    copied = toy_run(["fp8"], sizes=SIZES, **FP8)
    run = toy_run(["fp8", elsewhere(tmp_path)], sizes=SIZES, engine="elsewhere", use_zero_copy_sync=True, **FP8)
    assert equal(weights(copied), weights(run)) and set(run.engine.kinds) == {"file"}
    assert [r["sync/bytes"] for r in run.metrics] == [r["sync/bytes"] for r in copied.metrics]
    assert all(r["sync/of_limit"] > 0 for r in run.metrics)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_sync_is_made_again_then_by_the_plain_copy(toy_run, tmp_path, failures, caplog):
    run = toy_run([elsewhere(tmp_path, failures)], engine="elsewhere", use_zero_copy_sync=True, log_level="info")
    assert equal(weights(toy_run()), weights(run)) and len(run.metrics) == 2
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == failures and "pushed again" in said[0] and "checksum" in said[0]
    assert ("sync/of_limit" in run.metrics[-1]) == (failures == 1)  # the plain copy has none
    if failures == 2:
        assert "weights travel by the plain copy from version 0 on" in said[1]


def test_engines_elsewhere_get_what_changed(toy_run, monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "DIRECTORY", tmp_path / "shm")
    options = {"dtype": "bfloat16", "lr": 1e-6, "steps": 3, "use_zero_copy_sync": True}
    run = toy_run([remote.__file__], runtime="remote", remote_engines=2, **options)
    here = toy_run(**options)
    assert [r["reward/mean"] for r in run.metrics] == [r["reward/mean"] for r in here.metrics]
    assert [r["train/grad_norm"] for r in run.metrics] == [r["train/grad_norm"] for r in here.metrics]
    assert all(0 < r["sync/travelled"] < 0.2 for r in run.metrics)


def test_a_trainer_and_an_engine_that_take_turns_share_what_stays_awake(toy_run):
    plain, turns = toy_run(), toy_run(use_zero_copy_sync=True, colocate=True)
    assert [r["train/grad_norm"] for r in plain.metrics] == [r["train/grad_norm"] for r in turns.metrics]
    assert {r["sync/bytes"] for r in turns.metrics} == {0.0}


def test_the_plan_says_which_path_and_why():
    assert any("share the storage" in line for line in plan(use_zero_copy_sync=True).advice)
    assert any("copies each version" in line for line in plan(use_zero_copy_sync=True, schedule="async").advice)


def test_an_engine_that_takes_no_such_message_is_refused(tmp_path):
    file = tmp_path / "deaf.py"
    file.write_text(ELSEWHERE.replace(', "transport:buckets"', "").replace("FAILURES", "0"))
    with pytest.raises(PlanError, match="the transport buckets needs the engine capability transport:buckets"):
        plan([str(file)], engine="elsewhere", use_zero_copy_sync=True)


def test_a_staged_version_is_put_in_force_when_it_is_pushed(toy_run):
    options = {"schedule": "async", "partial_rollout": True, "pause_generation_mode": "in_place", "steps": 3}
    run = toy_run(async_weight_sync=True, **options)
    assert all(r["sync/switch_seconds"] > 0 and r["sync/of_limit"] > 0 for r in run.metrics)
    assert run.engine.version == 3
    served = run.engine.model.state_dict()
    assert all(torch.equal(served[name], tensor) for name, tensor in run.trainer.model.state_dict().items())
    assert max(r["rollout/staleness_max"] for r in run.metrics) <= 1


def test_staging_is_refused_where_nothing_is_generated_meanwhile():
    with pytest.raises(PlanError, match="the engine does not generate while weights are sent"):
        plan(async_weight_sync=True)


def test_the_doctor_measures_what_a_sync_is_compared_with(capsys):
    assert doctor.run(["--measure", "--json"]) in (0, 2)
    found = json.loads(capsys.readouterr().out)["measured"]["zero_copy"]
    assert float(found["one copy of memory"].split()[0]) > 0 and "GB free" in found["shared memory"]
