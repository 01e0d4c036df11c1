"""Engine and trainer are compared after the first sync: defects stop the run, rounding does not."""

import time

import numpy as np
import pytest
import transformers

from miles_core.errors import MilesError, MismatchError
from miles_core.mismatch import first_sync
from miles_embedded.engine import build
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.testing import decode_defects, more_defects
from miles_embedded.testing.defects import DEFECTS, planted
from miles_embedded.testing.families import FAMILIES
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_testing import tiny

TRIED = [*tiny.FAMILIES, *tiny.ROUTER_FAMILIES]


#: The defects that outside reviews named, each in a dtype in which it was not found by limits on the medians.
NAMED = [
    *((defect, "bfloat16") for defect in (*more_defects.NAMED, *decode_defects.NAMED)),
    *(
        (defect, "float32")
        for defect in more_defects.NAMED
        if defect.name in ("correction bias ignored", "one expert never chosen")
    ),
]


@pytest.fixture
def run_with(toy_run, tmp_path, monkeypatch):
    """Runs with an engine that has a defect."""
    monkeypatch.setattr(build, "self_check", lambda model: None)  # it is judged by its own tests

    def run(defect, **options):
        with planted(defect):
            checkpoint = defect.checkpoint(tmp_path / "model")
            return toy_run(hf_checkpoint=checkpoint, self_check=True, **{"steps": 0, **defect.options, **options})

    return run


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_stops_the_run(defect, run_with):
    words = "lm_head.weight" if "head" in defect.name else "compute different functions"
    with pytest.raises(MilesError, match=words):
        run_with(defect)


@pytest.mark.parametrize(("defect", "dtype"), NAMED, ids=[f"{defect.name}, {dtype}" for defect, dtype in NAMED])
def test_a_small_defect_stops_the_run(defect, dtype, run_with):
    words = "generated with the same weights" if defect.generating else "scored with the same weights"
    with pytest.raises(MismatchError, match=words):
        run_with(defect, dtype=dtype)


def test_allow_mismatch_warns(run_with, caplog):
    run = run_with(next(d for d in DEFECTS if d.name == "wrong rope theta"), allow_mismatch=True, steps=1)
    assert "compute different functions" in caplog.text and "--allow-mismatch was given" in caplog.text
    assert run.metrics[-1]["step"] == 1


@pytest.mark.parametrize("family", TRIED)
def test_no_family_is_stopped(family, toy_run, caplog):
    """In turn in either dtype; ``benchmarks/mismatch/planted_defects.py`` tries all families in both."""
    dtype = ("float32", "bfloat16")[TRIED.index(family) % 2]
    toy_run(family=family, dtype=dtype, steps=0, self_check=True, log_level="info")
    assert "engine embedded and trainer embedded agree" in caplog.text


@pytest.mark.parametrize("schedule", ["sync", "ahead", "async"])
def test_no_schedule_is_stopped(schedule, toy_run, caplog):
    toy_run(schedule=schedule, dtype="bfloat16", steps=2, self_check=True, log_level="info")
    assert caplog.text.count("engine embedded and trainer embedded agree") == 2  # scored and generated tokens


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
    assert caplog.text.count("engine embedded and trainer embedded agree") == 4


@pytest.mark.parametrize("options", [{"rollout_temperature": 0.7}, {"rollout_top_p": 0.8}, {}])
def test_an_engine_that_cannot_score_is_compared_by_what_it_generates(options, toy_run, monkeypatch, caplog):
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"score"})
    toy_run(steps=0, self_check=True, log_level="info", **options)
    assert "cannot score a given text" in caplog.text and "agree" in caplog.text


def test_what_an_engine_generates_shows_a_defect(run_with, monkeypatch):
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"score"})
    with pytest.raises(MismatchError, match="compute different functions"):
        run_with(next(d for d in DEFECTS if d.name == "wrong activation"))


@pytest.mark.parametrize("family", ["qwen3_moe", "phimoe", "deepseek_v32"])
def test_large_rounding_errors_of_a_model_are_its_own(family, toy_run, tmp_path, caplog):
    """Experts without normalized top-k and large weights: rounding changes routes and is as large on either side."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    if family == "qwen3_moe":
        config.norm_topk_prob = False
    checkpoint = tiny.random_checkpoint(config, tmp_path / "model")
    toy_run(hf_checkpoint=checkpoint, dtype="bfloat16", steps=0, self_check=True, log_level="info")
    assert caplog.text.count("engine embedded and trainer embedded agree") == 2


def test_a_trainer_without_a_wider_type_is_compared_within_the_declared_precisions(
    toy_run, run_with, monkeypatch, caplog
):
    emulate = EmbeddedTrainer.emulate

    def without(self, emulation, *args):
        if emulation.wider:
            raise MilesError("this trainer has one type")
        return emulate(self, emulation, *args)

    monkeypatch.setattr(EmbeddedTrainer, "emulate", without)
    toy_run(dtype="bfloat16", steps=0, self_check=True, log_level="info")
    assert "has no reference in a wider type (this trainer has one type)" in caplog.text and "agree" in caplog.text
    with pytest.raises(
        MismatchError, match=r"The precisions \(engine bfloat16; trainer bfloat16\) do not explain that"
    ):
        run_with(next(d for d in DEFECTS if d.name == "wrong activation"), dtype="bfloat16")


def test_one_failure_is_not_enough(toy_run, monkeypatch, caplog):
    """Chance does not repeat on other text."""
    attempts = []
    judge_draws = first_sync.judge_draws

    def unlucky(*args):
        attempts.append(args)
        return ["too likely"] if len(attempts) == 1 else judge_draws(*args)

    monkeypatch.setattr(first_sync, "judge_draws", unlucky)
    toy_run(steps=0, self_check=True, log_level="info")
    assert len(attempts) == 2 and "agree" in caplog.text


def test_log_probabilities_that_are_no_numbers_stop_the_run(toy_run, monkeypatch):
    async def score(self, sequences, temperature=1.0, media=()):
        return [np.full(len(s) - 1, np.nan, np.float32) for s in sequences]

    monkeypatch.setattr(EmbeddedEngine, "score", score)
    with pytest.raises(MismatchError, match="are not finite numbers"):
        toy_run(steps=0, self_check=True)


def test_each_engine_behind_a_front_is_compared(toy_run, monkeypatch):
    async def score_each(self, sequences, temperature=1.0, media=()):
        right = await self.score(sequences, temperature)
        return {"engine-0": right, "engine-1": [row * 0.97 for row in right]}

    monkeypatch.setattr(EmbeddedEngine, "score_each", score_each)
    with pytest.raises(MismatchError, match=r"engine embedded \(engine-1\) and trainer"):
        toy_run(steps=0, self_check=True)


def test_it_takes_less_than_two_seconds_and_changes_no_training_sample(toy_run, monkeypatch):
    seconds = []
    examine = first_sync.FirstSync._examine

    async def timed(self, *args):
        start = time.process_time()
        found = await examine(self, *args)
        seconds.append(time.process_time() - start)
        return found

    monkeypatch.setattr(first_sync.FirstSync, "_examine", timed)
    checked, without = toy_run(self_check=True), toy_run(self_check=False)
    assert len(seconds) == 1 and seconds[0] < 2
    losses = [[record.get("train/loss") for record in run.metrics] for run in (checked, without)]
    assert losses[0] == losses[1]
