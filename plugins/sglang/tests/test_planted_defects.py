"""An SGLang that computes something else never trains: runs on a double whose schedulers hold a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_scheduler_double import SchedulerModel

from miles_core.plugin import MismatchError
from miles_embedded.testing.decode_defects import NAMED
from miles_embedded.testing.defects import DEFECTS, Defect, planted

GENERATED = [defect for defect in NAMED if not defect.options]
OPTIONS = {"engine": "sglang", "device": "cpu", "self_check": True, "steps": 0}


def with_defect(defect: Defect) -> Callable[[Path], SchedulerModel]:
    """Makes the model of a start of SGLang that has a defect."""

    def make(checkpoint: Path) -> SchedulerModel:
        untied = defect.name == "untied head"
        model = SchedulerModel(checkpoint, own_head=untied, takes_head=not untied)
        if not untied:
            defect.plant(model.__dict__["module"])
        return model

    return make


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_stops_the_run(defect: Defect, toy_run: Any, sglang_with: Any) -> None:
    sglang_with(with_defect(defect))
    words = "did not reach lm_head.weight of SGLang's SchedulerModel" if "head" in defect.name else "compute different"
    with pytest.raises(MismatchError, match=words):
        toy_run(family=defect.family, sizes=dict(defect.sizes), **OPTIONS)


@pytest.mark.parametrize("defect", GENERATED, ids=lambda defect: defect.name)
def test_a_defect_of_generated_tokens_stops_the_run(defect: Defect, toy_run: Any, sglang_with: Any) -> None:
    sglang_with(SchedulerModel)
    with planted(defect), pytest.raises(MismatchError, match="generated with the same weights"):
        toy_run(family=defect.family, **OPTIONS, **defect.options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_sound_model_passes(family: str, toy_run: Any, sglang_with: Any, caplog: Any) -> None:
    sglang_with(SchedulerModel)
    toy_run(family=family, log_level="info", **{**OPTIONS, "steps": 1})
    assert "engine sglang and trainer embedded agree" in caplog.text


def test_an_output_layer_of_its_own_gets_the_embedding_where_the_checkpoint_ties_them(
    toy_run: Any, sglang_with: Any
) -> None:
    made: list[SchedulerModel] = []

    def make(checkpoint: Path) -> SchedulerModel:
        made.append(SchedulerModel(checkpoint, own_head=True))
        return made[-1]

    sglang_with(make)
    options = {**OPTIONS, "steps": 3}
    run = toy_run(family="qwen3_moe", sizes={"tie_word_embeddings": True}, **options)
    parameters = dict(made[0].named_parameters())
    assert (parameters["lm_head.weight"] == parameters["model.embed_tokens.weight"]).all()
    assert all(step["mismatch/abs_log_prob"] < 1e-4 for step in run.metrics if step["step"])


def test_allow_mismatch_goes_on_with_a_warning(toy_run: Any, sglang_with: Any, caplog: Any) -> None:
    for number, name in enumerate(("untied head", "logit scale .97")):
        defect = next(d for d in DEFECTS if d.name == name)
        sglang_with(with_defect(defect))
        toy_run(family=defect.family, sizes=dict(defect.sizes), allow_mismatch=True, **OPTIONS)
        assert ("did not reach lm_head.weight" in caplog.text) is (number == 0)
        assert "compute different functions" in caplog.text
        caplog.clear()


def test_the_benchmark_tries_the_defect_and_watches_sound_runs() -> None:
    from benchmarks.mismatch import planted_defects

    defect = next(d for d in DEFECTS if d.name == "logit scale .97")
    assert "engine sglang and trainer embedded compute different" in planted_defects.stopped_by("sglang", defect)
    found = planted_defects.sound(family="llama")
    assert found["stopped"] == "" and len(found["errors"]) == 2 and found["seconds"] > 0
