"""Metrics of environments, and the levels of curricula, after each step."""

from __future__ import annotations

import statistics
from collections import defaultdict

from miles_core.data import Sample
from miles_core.plugin import Run, hookimpl
from miles_environments.registry import KEY, has_registry, registry_of


class Environments:
    """Hooks of the plugin."""

    @hookimpl
    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        if not has_registry(run):
            return
        registry = registry_of(run)
        outcomes, registry.outcomes = sorted(registry.outcomes, key=lambda o: (o.group, o.index)), []
        for label, curriculum in registry.curricula.items():
            own = [outcome for outcome in outcomes if outcome.label == label]
            name = f"environments/{label}"
            if own:
                metrics[f"{name}/reward"] = statistics.fmean(outcome.reward for outcome in own)
            metrics[f"{name}/rollouts"] = float(len(own))
            if curriculum.levels > 1:
                metrics[f"{name}/level"] = float(curriculum.level)
            curriculum.update((outcome.level, outcome.reward) for outcome in own)
        metrics["environments/masked"], registry.masked = float(registry.masked), 0

    @hookimpl
    def on_evaluation(self, run: Run, name: str, groups: list[list[Sample]], metrics: dict[str, float]) -> None:
        if not has_registry(run):
            return
        rewards: dict[str, list[float]] = defaultdict(list)
        for sample in (sample for group in groups for sample in group):
            info = sample.metadata.get(KEY)
            if isinstance(info, dict):
                rewards[info["label"]].append(sample.reward_value(run.config.reward.reward_key))
        if len(rewards) > 1:
            prefix = f"eval/{name}" if name else "eval"
            metrics |= {f"{prefix}/{label}/reward": statistics.fmean(own) for label, own in rewards.items()}

    @hookimpl
    def on_stop(self, run: Run) -> None:
        if has_registry(run):
            registry_of(run).close()
