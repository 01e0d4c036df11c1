"""The backend that ships with the core: a Transformers model as engine and as trainer, in this process.

It registers itself by this manifest like any other backend. ``model`` is what both sides share, ``engine`` generates,
``trainer`` trains, ``quantized`` is the forward of quantised layers on both sides.

What plugins may import from here, looked up when it is first used: ``load_model``, ``decoder_layers``, ``is_embedded`` and, inside
of a layer, ``active_context`` for those that hook modules; ``make_engine`` and ``make_trainer`` for those that wrap a whole
side; ``Decoder``, ``Emitted`` and ``one_each`` for those that decode; ``Operations`` (its functions' types beside it) with
``operations_of`` and ``use_operations``, and the calls that attention works on, for those that compute a model's steps in
another way. ``miles_embedded.testing`` is public too.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import looked_up
from miles_embedded.manifest import plugin

if TYPE_CHECKING:
    from miles_embedded.engine.attention import DecodeCall
    from miles_embedded.engine.build import make_engine
    from miles_embedded.engine.cached_rows import CachedRows
    from miles_embedded.engine.decoder import Decoder, Emitted, one_each
    from miles_embedded.model.attention import AttentionOptions
    from miles_embedded.model.call import Call, active_context
    from miles_embedded.model.load import decoder_layers, is_embedded, load_model
    from miles_embedded.model.onednn import available
    from miles_embedded.model.operations import (
        Attention,
        Experts,
        LogProbs,
        Operations,
        operations_of,
        use_operations,
    )
    from miles_embedded.trainer.attention import PackedCall
    from miles_embedded.trainer.build import make_trainer
    from miles_embedded.trainer.packing import Packing

__all__ = [
    "Attention",
    "AttentionOptions",
    "CachedRows",
    "Call",
    "DecodeCall",
    "Decoder",
    "Emitted",
    "Experts",
    "LogProbs",
    "Operations",
    "PackedCall",
    "Packing",
    "active_context",
    "available",
    "decoder_layers",
    "is_embedded",
    "load_model",
    "make_engine",
    "make_trainer",
    "one_each",
    "operations_of",
    "plugin",
    "use_operations",
]

__getattr__, __dir__ = looked_up(
    __name__,
    {
        "miles_embedded.engine.attention": "DecodeCall",
        "miles_embedded.engine.build": "make_engine",
        "miles_embedded.engine.cached_rows": "CachedRows",
        "miles_embedded.engine.decoder": "Decoder Emitted one_each",
        "miles_embedded.model.attention": "AttentionOptions",
        "miles_embedded.model.call": "Call active_context",
        "miles_embedded.model.load": "decoder_layers is_embedded load_model",
        "miles_embedded.model.onednn": "available",
        "miles_embedded.model.operations": "Attention Experts LogProbs Operations operations_of use_operations",
        "miles_embedded.trainer.attention": "PackedCall",
        "miles_embedded.trainer.build": "make_trainer",
        "miles_embedded.trainer.packing": "Packing",
    },
)
