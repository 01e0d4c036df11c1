"""What this backend provides and can do, as any backend declares it."""

from miles_core import Plugin, __version__

plugin = Plugin(
    name="embedded",
    summary="engine and trainer for Transformers models, in one process and on any machine",
    version=__version__,
    core=f"=={__version__}",
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
            "transport:buckets",
        ),
        "trainer": ("entropy", "sampling_support", "routing_replay", "rebuild"),
    },
    defaults={"engine": "embedded", "trainer": "embedded"},
)
