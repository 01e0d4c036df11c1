"""Plan check: Muon needs whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_embedded import training_of


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.plugin.Plugin.review``."""
    if (
        facts.value("train.optimizer") != "muon"
        or facts.value("trainer") != "embedded"
        or not training_of(facts).sharded
    ):
        return Review()
    names = ("train.optimizer", "embedded.sharding_strategy")
    return Review(
        problems=(
            Problem(
                "optimizers",
                "--sharding-strategy no_shard, or one trainer rank",
                "Muon orthogonalizes whole matrices, and full_shard leaves each rank some of their rows; --optimizer adamw8bit and adamw "
                "work with shards",
                tuple(describe_fact(facts.lookup(name)) for name in names),
                choices=names,
            ),
        )
    )
