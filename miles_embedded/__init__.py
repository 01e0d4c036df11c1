"""The backend that ships with the core: a Transformers model as engine and as trainer, in this process.

It registers itself by this manifest like any other backend. ``model`` is what both sides share, ``engine`` generates,
``trainer`` trains, ``quantized`` is the forward of quantised layers on both sides.

What plugins may import from here, looked up when it is first used: ``load_model``, ``decoder_layers`` and, inside of a layer,
``active_context`` for those that hook modules; ``make_engine`` and ``make_trainer`` for those that wrap a whole side;
``Decoder``, ``Emitted`` and ``one_each`` for those that decode. ``miles_embedded.testing`` is public too.
"""

from typing import TYPE_CHECKING

from miles_core import Plugin, __version__
from miles_core.lookup import looked_up

if TYPE_CHECKING:
    from miles_embedded.engine.build import make_engine
    from miles_embedded.engine.decoder import Decoder, Emitted, one_each
    from miles_embedded.model.call import active_context
    from miles_embedded.model.load import decoder_layers, load_model
    from miles_embedded.trainer.trainer import make_trainer

__all__ = [
    "Decoder",
    "Emitted",
    "active_context",
    "decoder_layers",
    "load_model",
    "make_engine",
    "make_trainer",
    "one_each",
    "plugin",
]

__getattr__, __dir__ = looked_up(
    __name__,
    {
        "miles_embedded.engine.build": "make_engine",
        "miles_embedded.engine.decoder": "Decoder Emitted one_each",
        "miles_embedded.model.call": "active_context",
        "miles_embedded.model.load": "decoder_layers load_model",
        "miles_embedded.trainer.trainer": "make_trainer",
    },
)

plugin = Plugin(
    name="embedded",
    summary="engine and trainer for Transformers models, in one process and on any machine",
    version=__version__,
    core=f"=={__version__}",
    provides={
        "model": {"transformers": "miles_embedded.model.load:make_model"},
        "engine": {"embedded": "miles_embedded.engine.build:make_engine"},
        "trainer": {"embedded": "miles_embedded.trainer.trainer:make_trainer"},
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
        ),
        "trainer": ("entropy", "sampling_support", "routing_replay", "rebuild"),
    },
    defaults={"engine": "embedded", "trainer": "embedded"},
)
