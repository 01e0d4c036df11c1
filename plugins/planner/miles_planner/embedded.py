"""Layouts of the embedded trainer: replicas whose weights are sharded over all GPUs. The entry point ``trainer.embedded``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_embedded import ModelSize, size_of, trainer_parts, training_of
from miles_planner.layout import TrainerLayout

#: Options to try, fastest first, and whether they recompute.
_SAVINGS: tuple[tuple[dict[str, Any], bool], ...] = (({}, False), ({"train.activation_checkpointing": True}, True))


def read(facts: Facts, model: Mapping[str, Any]) -> TrainerLayout | None:
    """Implements ``miles_planner.layout.TrainerPlanner``."""
    size = size_of(facts, model)
    return None if size is None else _layout(facts, size, training_of(facts).ranks, {})


def find(facts: Facts, model: Mapping[str, Any], ranks: int, budget: float) -> Iterator[TrainerLayout]:
    """Implements ``miles_planner.layout.TrainerPlanner``."""
    size = size_of(facts, model)
    if size is None:
        return
    sharding = {"embedded.sharding_strategy": "full_shard"} if ranks > 1 else {}
    for options, recompute in _SAVINGS:
        if facts.value("train.activation_checkpointing") and not recompute:
            continue
        layout = _layout(facts, size, ranks, {**sharding, **options})
        if layout.estimate()[0].parts.total <= budget:
            yield layout


def explain(facts: Facts, model: Mapping[str, Any], ranks: int) -> str:
    """Implements ``miles_planner.layout.TrainerPlanner``."""
    size = size_of(facts, model)
    if size is None:
        return "config.json does not determine the size of the model"
    least = _layout(facts, size, ranks, {"train.activation_checkpointing": True}).estimate()[0].parts.total
    return f"sharded over {ranks} ranks with recomputation, it needs {least / 1e9:.0f} GB on a GPU of {facts.value('gpu.memory_gb')} GB"


def _layout(facts: Facts, size: ModelSize, ranks: int, changes: Mapping[str, Any]) -> TrainerLayout:
    recompute = bool(changes.get("train.activation_checkpointing", facts.value("train.activation_checkpointing")))
    sharded = (
        ranks > 1 and changes.get("embedded.sharding_strategy", facts.value("embedded.sharding_strategy")) != "no_shard"
    )
    how = replace(training_of(facts), ranks=ranks, sharded=sharded, recompute=recompute)

    def estimate() -> tuple[Usage, ...]:
        parts: Parts = trainer_parts(size, how)
        return (Usage("trainer", "rank", parts, parts.other, processes=ranks),)

    counted = facts.value("train.micro_batch_size") and not facts.value("train.use_dynamic_batch_size")
    return TrainerLayout(
        ranks=ranks,
        stage_layers=size.layers,
        tokens=how.tokens,
        samples=int(facts.value("train.micro_batch_size")) if counted else 0,
        recompute=float(recompute),
        precision=str(facts.value("train.precision") or "bf16"),
        sharded=sharded,
        modules="_embedded",
        changes=changes,
        estimate=estimate,
    )
