"""Engine and trainer score one text after the first sync: defects stop the run, rounding does not."""

import time

import numpy as np
import pytest

from miles_core.errors import MilesError, MismatchError
from miles_core.mismatch import first_sync
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.testing.defects import DEFECTS
from miles_testing import tiny

FAMILIES = [*tiny.FAMILIES, *tiny.ROUTER_FAMILIES]


@pytest.fixture
def planted(monkeypatch):
    """Plants a defect into every model that the embedded engine is built with."""

    def plant(defect):
        from miles_embedded.engine import build

        build_model = build.build_model

        def built(run, policy, role):
            model = build_model(run, policy, role)
            defect.plant(model)
            return model

        monkeypatch.setattr(build, "build_model", built)
        monkeypatch.setattr(build, "self_check", lambda model: None)  # it is judged by its own tests

    return plant


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_stops_the_run(defect, toy_run, planted):
    planted(defect)
    words = "lm_head.weight" if "head" in defect.name else "compute different functions"
    with pytest.raises(MilesError, match=words):
        toy_run(family=defect.family, sizes=dict(defect.sizes), steps=0, self_check=True)


@pytest.mark.parametrize("name", ["logit scale .97", "late temperature", "shifted positions", "one expert swapped"])
def test_in_bfloat16_too(name, toy_run, planted):
    defect = next(d for d in DEFECTS if d.name == name)
    planted(defect)
    with pytest.raises(MismatchError, match="bfloat16"):
        toy_run(family=defect.family, sizes=dict(defect.sizes), steps=0, self_check=True, dtype="bfloat16")


def test_allow_mismatch_warns(toy_run, planted, caplog):
    planted(next(d for d in DEFECTS if d.name == "wrong rope theta"))
    run = toy_run(family="qwen3", self_check=True, allow_mismatch=True, steps=1)
    assert "compute different functions" in caplog.text and "--allow-mismatch was given" in caplog.text
    assert run.metrics[-1]["step"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_stopped(family, toy_run, caplog):
    """In turn in either dtype; ``benchmarks/planted_defects.py`` tries all families in both."""
    dtype = ("float32", "bfloat16")[FAMILIES.index(family) % 2]
    toy_run(family=family, dtype=dtype, steps=0, self_check=True, log_level="info")
    assert "engine embedded and trainer embedded agree" in caplog.text


@pytest.mark.parametrize("schedule", ["sync", "ahead", "async"])
def test_no_schedule_is_stopped(schedule, toy_run, caplog):
    toy_run(schedule=schedule, dtype="bfloat16", steps=2, self_check=True, log_level="info")
    assert caplog.text.count("engine embedded and trainer embedded agree") == 1


@pytest.mark.parametrize(
    ("rollout", "train"),
    [("fp8", "bf16"), ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("int4", "int4"), ("nvfp4", "nvfp4")],
)
def test_no_format_is_stopped(rollout, train, toy_run, caplog):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
    precision = {"rollout_precision": rollout, "train_precision": train, "emulate_precision": True}
    toy_run([rollout], sizes=sizes, dtype="bfloat16", steps=1, self_check=True, log_level="info", **precision)
    assert "engine embedded and trainer embedded agree" in caplog.text


def test_a_change_of_the_number_format_is_compared_again(toy_run, caplog):
    options = {"rollout_precision": "fp8", "emulate_precision": True, "warmup_steps": 1}
    toy_run(["fp8"], steps=2, self_check=True, log_level="info", **options)
    assert caplog.text.count("engine embedded and trainer embedded agree") == 2


@pytest.mark.parametrize("options", [{"rollout_temperature": 0.7}, {"rollout_top_p": 0.8}, {}])
def test_an_engine_that_cannot_score_is_compared_by_what_it_generates(options, toy_run, monkeypatch, caplog):
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"score"})
    toy_run(steps=0, self_check=True, log_level="info", **options)
    assert "cannot score a given text" in caplog.text and "agree" in caplog.text


def test_what_an_engine_generates_shows_a_defect(toy_run, planted, monkeypatch):
    planted(next(d for d in DEFECTS if d.name == "wrong activation"))
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"score"})
    with pytest.raises(MismatchError, match="compute different functions"):
        toy_run(family="qwen3", steps=0, self_check=True)


def test_log_probabilities_that_are_no_numbers_stop_the_run(toy_run, monkeypatch):
    async def score(self, sequences, temperature=1.0):
        return [np.full(len(s) - 1, np.nan, np.float32) for s in sequences]

    monkeypatch.setattr(EmbeddedEngine, "score", score)
    with pytest.raises(MismatchError, match="are not finite numbers"):
        toy_run(steps=0, self_check=True)


def test_each_engine_behind_a_front_is_compared(toy_run, monkeypatch):
    async def score_each(self, sequences, temperature=1.0):
        right = await self.score(sequences, temperature)
        return {"engine-0": right, "engine-1": [row * 0.97 for row in right]}

    monkeypatch.setattr(EmbeddedEngine, "score_each", score_each)
    with pytest.raises(MismatchError, match=r"engine embedded \(engine-1\) and trainer"):
        toy_run(steps=0, self_check=True)


def test_it_takes_less_than_two_seconds_and_changes_no_training_sample(toy_run, monkeypatch):
    seconds = []
    compared = first_sync.FirstSync._compare

    async def timed(self, *args):
        start = time.perf_counter()
        found = await compared(self, *args)
        seconds.append(time.perf_counter() - start)
        return found

    monkeypatch.setattr(first_sync.FirstSync, "_compare", timed)
    checked, without = toy_run(self_check=True), toy_run(self_check=False)
    assert len(seconds) == 1 and seconds[0] < 2
    losses = [[record.get("train/loss") for record in run.metrics] for run in (checked, without)]
    assert losses[0] == losses[1]
