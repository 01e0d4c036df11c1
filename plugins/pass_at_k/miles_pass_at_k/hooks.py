"""Hooks: add metrics to evaluations, and stop a run that no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from miles_core.data import Sample
from miles_core.plugin import DataError, Run, hookimpl
from miles_pass_at_k.config import PassAtKConfig, check_metric
from miles_pass_at_k.estimate import find_answer, majority_at, mean_interval, pass_at

log = logging.getLogger(__name__)

Groups = Sequence[Sequence[Sample]]


class PassAtK:
    """Metrics per data set, and early stopping.

    Attributes:
        best: best value of the metric so far; -inf before the first evaluation.
        waited: evaluations since then.
    """

    def __init__(self, options: PassAtKConfig) -> None:
        self.options = options
        self.best, self.waited = -math.inf, 0

    @hookimpl
    def on_evaluation(self, run: Run, name: str, groups: Groups, metrics: dict[str, float]) -> None:
        prefix, key = f"eval/{name}" if name else "eval", run.config.reward.reward_key
        metrics |= measure(self.options, groups, prefix, key)
        subset = self.options.subset_key
        if subset is not None:
            for value, own in split(groups, subset).items():
                start = f"{prefix}/{subset}={value}"
                right = [s.reward_value(key) >= 1.0 for group in own for s in group]
                metrics |= {f"{start}/accuracy": sum(right) / len(right), **measure(self.options, own, start, key)}
        if self.options.patience is not None and self.options.metric in metrics:
            self._compare(metrics[self.options.metric])

    @hookimpl
    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        patience = self.options.patience
        if patience is None:
            return
        check_metric("--early-stop-metric", self.options.metric, metrics)
        several = any(entry.rpartition("=")[0] for entry in run.config.evaluation.prompt_data)
        if several and self.options.metric in metrics and self.options.metric.count("/") == 1:
            self._compare(metrics[self.options.metric])  # over all data sets; on_evaluation receives only one
        if self.waited >= patience and not run.stop_requested:
            log.warning(
                "stopping: %s has not risen above %.4g in %d evaluations (--early-stop-after)",
                self.options.metric,
                self.best,
                self.waited,
            )
            run.stop_requested = True

    @hookimpl
    def on_save(self, policy: Any, store: Any) -> None:
        if policy is None and self.best > -math.inf:
            store.put("pass_at_k", data={"best": self.best, "waited": self.waited})

    @hookimpl
    def on_load(self, policy: Any, store: Any) -> None:
        if policy is None and "pass_at_k" in store:
            kept = store.get("pass_at_k")[1]
            self.best, self.waited = kept["best"], kept["waited"]

    def _compare(self, value: float) -> None:
        self.best, self.waited = (value, 0) if value > self.best else (self.best, self.waited + 1)


def measure(options: PassAtKConfig, groups: Groups, prefix: str, reward_key: str | None) -> dict[str, float]:
    """Return pass@k and majority@k over the prompts of ``groups``, with intervals."""
    found: dict[str, float] = {}
    right = [[s.reward_value(reward_key) >= 1.0 for s in group] for group in groups]
    for k in options.pass_at:
        _add(found, f"{prefix}/pass_at_{k}", [pass_at(len(own), sum(own), k) for own in right if len(own) >= k])
    answers = [[answer_of(s, options.answer_key) for s in group] for group in groups] if options.majority_at else []
    for k in options.majority_at:
        pairs = [pair for pair in zip(answers, right, strict=True) if len(pair[0]) >= k]
        _add(found, f"{prefix}/majority_at_{k}", [majority_at(*pair, k) for pair in pairs])
    return found


def _add(metrics: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        mean, width = mean_interval(values)
        metrics[name] = mean
        if width is not None:
            metrics[f"{name}_interval"] = width


def answer_of(sample: Sample, key: str | None) -> str:
    """Return the answer of a sample. DataError if its metadata lacks ``key``."""
    if key is None:
        return find_answer(sample.response)
    if key not in sample.metadata:
        raise DataError(
            f"--eval-answer-key {key}: sample {sample.index} has no such entry in its metadata "
            f"({', '.join(map(str, sample.metadata)) or 'which is empty'})"
        )
    return str(sample.metadata[key])


def split(groups: Groups, key: str) -> dict[str, list[Sequence[Sample]]]:
    """Return the groups by an entry of their metadata; groups without it are in no subset."""
    found: dict[str, list[Sequence[Sample]]] = {}
    for group in groups:
        if group and key in group[0].metadata:
            found.setdefault(str(group[0].metadata[key]).replace("/", "_"), []).append(group)
    return found
