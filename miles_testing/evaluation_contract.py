"""Contract tests for plugins that add metrics to evaluations (``on_evaluation``).

Subclass the contract and name the plugin and the options that turn its metrics on::

    class TestMyMetrics(EvaluationContract):
        plugins = ("mine",)
        options = {"mine_metric": "median"}
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_testing.run_contract import RunContract, comparable
from miles_testing.toy import ToyRun, toy_run


class EvaluationContract(RunContract):
    """Contract tests for ``on_evaluation``; runs evaluate the same five prompts as two data sets, ``one`` and ``two``.

    The prompts have the metadata ``kind``, and rewards are 0 or 1.
    """

    def run(self, **options: Any) -> ToyRun:
        return super().run(**{**_evaluation(), **options})

    def test_it_adds_metrics(self) -> None:
        added = _names(self.whole_run()) - _plain_names()
        assert added, "the evaluation has no metrics besides those of core"
        nameless = sorted(name for name in added if not name.startswith(("eval/one/", "eval/two/")))
        assert not nameless, f"metrics without the name of a data set: {nameless}"

    def test_each_data_set_has_metrics_of_its_own(self) -> None:
        """Greedy answers to equal prompts are equal, so both data sets must have equal metrics under their names."""
        records = [r for r in map(_evaluated, self.run(steps=1, eval_temperature=0.0).metrics) if r]
        assert records
        for found in records:
            one, two = (_of_set(found, name) for name in ("one", "two"))
            assert one and one == two

    def test_equal_weights_have_equal_metrics(self) -> None:
        """Evaluations of unchanged weights draw the same answers; a plugin that carries state from one to the next fails here."""
        records = [r for r in map(_evaluated, self.run(lr=0.0, weight_decay=0.0).metrics) if r]
        assert len(records) >= 2 and all(record == records[0] for record in records)

    def test_evaluating_does_not_change_training(self) -> None:
        often, once = self.whole_run(), self.run(eval_interval=self.steps)
        for one, two in zip(_trained(often), _trained(once), strict=True):
            assert one == two


@cache
def _evaluation() -> Mapping[str, Any]:
    """Options of a run with evaluations."""
    directory = Path(tempfile.mkdtemp(prefix="miles-toy-evaluation-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    rows = [{"input": letter, "metadata": {"kind": "vowel" if letter in "ae" else "other"}} for letter in "abcde"]
    prompts, reward = directory / "held_out.jsonl", directory / "odd.py"
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    reward.write_text("async def reward(args, sample):\n    return float(sample.tokens[-1] % 2)\n", encoding="utf-8")
    return {
        "eval_prompt_data": f"one={prompts},two={prompts}",
        "eval_interval": 1,
        "n_samples_per_eval_prompt": 4,
        "custom_rm_path": reward,
    }


def _evaluated(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in comparable(record).items() if name.startswith("eval/")}


def _names(done: ToyRun) -> set[str]:
    return {name for record in done.metrics for name in _evaluated(record)}


@cache
def _plain_names() -> set[str]:
    return _names(toy_run(steps=1, **_evaluation()))


def _of_set(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    start = f"eval/{name}/"
    return {metric.removeprefix(start): value for metric, value in metrics.items() if metric.startswith(start)}


def _trained(done: ToyRun) -> list[dict[str, float]]:
    return [
        {name: value for name, value in comparable(record).items() if name.startswith(("train/", "reward/"))}
        for record in done.metrics
        if record["step"] > 0
    ]
