"""What this backend provides and can do, as any backend declares it."""

from dataclasses import dataclass
from typing import Literal

from miles_core import Plugin, __version__, option


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
    """Engine and trainer for Transformers models."""

    sharding_strategy: Literal["full_shard", "no_shard"] = option(
        "full_shard",
        flag="--sharding-strategy",
        help="of a trainer of several ranks: full_shard divides weights, gradients and optimiser among them (FSDP2), no_shard "
        "keeps all of them on every rank",
    )


plugin = Plugin(
    name="embedded",
    summary="engine and trainer for Transformers models, on any machine",
    version=__version__,
    core=f"=={__version__}",
    config=EmbeddedConfig,
    provides={
        "model": {"transformers": "miles_embedded.model.load:make_model"},
        "engine": {"embedded": "miles_embedded.engine.build:make_engine"},
        "trainer": {"embedded": "miles_embedded.trainer.build:make_trainer"},
        "decoder": {"plain": "miles_embedded.engine.decoder:make_decoder"},
    },
    capabilities={
        "engine": (
            "routed_experts",
            "sampling_support",
            "score",
            "score_temperature",
            "token_versions",
            "draft",
            "keyed_sampling",
            "hot_update",
            "rebuild",
            "shared_storage",
            "sleep",
            "transport:buckets",
        ),
        "trainer": ("entropy", "sampling_support", "routing_replay", "rebuild", "sleep"),
    },
    defaults={"engine": "embedded", "trainer": "embedded"},
)
