"""The backend that ships with the core: a Transformers model as engine and as trainer, in this process.

It registers itself by this manifest like any other backend. ``model`` is what both sides share, ``engine`` generates,
``trainer`` trains, ``quantized`` is the forward of quantised layers on both sides.

What plugins may import from here, looked up when it is first used: ``load_model``, ``decoder_layers``, ``is_embedded``,
``routed_blocks`` (of ``Routed``, one by one ``routed``) and, inside of a layer, ``active_context`` for those that hook modules;
``make_engine`` and ``make_trainer`` for those that wrap a whole side; ``Decoder``, ``Emitted``, ``Prompts``, ``one_each`` and
``pick`` for those that decode; ``new_layer``, ``add_layer``, ``read_layer`` and ``run_layer`` for those that put layers behind
a model's own, ``checkpoint_config``, ``unloaded_model`` and ``prepare`` for those that build a model beside it,
``OptimizerGroup`` and ``optimizer_group`` for those that train parameters in their own way, ``held`` and ``whole`` where ranks share these
out, and ``views`` where what is exported is not they,
``Released`` for tensors that do without their memory for a while, ``model_size``, ``size_of``, ``longest_sample``, ``wanted_rows`` and
``engines_gpus`` for plans that count memory; ``Operations`` (its functions'
types beside it) with ``operations_of`` and ``use_operations``, and the calls that attention works on, for those that compute a
model's steps in another way. ``miles_embedded.testing`` is public too.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports
from miles_embedded.manifest import plugin

if TYPE_CHECKING:
    from miles_embedded.engine.attention import DecodeCall
    from miles_embedded.engine.build import make_engine
    from miles_embedded.engine.cached_rows import CachedRows
    from miles_embedded.engine.decoder import Decoder, Emitted, one_each
    from miles_embedded.engine.prompts import Prompts
    from miles_embedded.engine.sampling import pick
    from miles_embedded.memory.model_size import ModelSize, model_size
    from miles_embedded.memory.usage import engines_gpus, longest_sample, size_of, wanted_rows
    from miles_embedded.model.attention import AttentionOptions
    from miles_embedded.model.call import Call, active_context
    from miles_embedded.model.configuration import text_configuration
    from miles_embedded.model.export import export_checkpoint
    from miles_embedded.model.extra_layers import add_layer, new_layer, read_layer, run_layer
    from miles_embedded.model.load import (
        backbone,
        checkpoint_config,
        decoder_layers,
        has_windows,
        is_embedded,
        load_model,
        prepare,
        unloaded_model,
    )
    from miles_embedded.model.logprobs import logits_of
    from miles_embedded.model.onednn import available
    from miles_embedded.model.operations import (
        Attention,
        Experts,
        LogProbs,
        Operations,
        operations_of,
        use_operations,
    )
    from miles_embedded.model.released import Released
    from miles_embedded.model.routers import Routed, routed, routed_blocks
    from miles_embedded.model.sharded import held, whole
    from miles_embedded.model.views import views
    from miles_embedded.trainer.attention import PackedCall
    from miles_embedded.trainer.build import make_trainer
    from miles_embedded.trainer.optimizer_group import OptimizerGroup, optimizer_group
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
    "ModelSize",
    "Operations",
    "OptimizerGroup",
    "PackedCall",
    "Packing",
    "Prompts",
    "Released",
    "Routed",
    "active_context",
    "add_layer",
    "available",
    "backbone",
    "checkpoint_config",
    "decoder_layers",
    "engines_gpus",
    "export_checkpoint",
    "has_windows",
    "held",
    "is_embedded",
    "load_model",
    "logits_of",
    "longest_sample",
    "make_engine",
    "make_trainer",
    "model_size",
    "new_layer",
    "one_each",
    "operations_of",
    "optimizer_group",
    "pick",
    "plugin",
    "prepare",
    "read_layer",
    "routed",
    "routed_blocks",
    "run_layer",
    "size_of",
    "text_configuration",
    "unloaded_model",
    "use_operations",
    "views",
    "wanted_rows",
    "whole",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_embedded.engine.attention": "DecodeCall",
        "miles_embedded.engine.build": "make_engine",
        "miles_embedded.engine.cached_rows": "CachedRows",
        "miles_embedded.engine.decoder": "Decoder Emitted one_each",
        "miles_embedded.engine.prompts": "Prompts",
        "miles_embedded.engine.sampling": "pick",
        "miles_embedded.memory.model_size": "ModelSize model_size",
        "miles_embedded.memory.usage": "engines_gpus longest_sample size_of wanted_rows",
        "miles_embedded.model.attention": "AttentionOptions",
        "miles_embedded.model.call": "Call active_context",
        "miles_embedded.model.export": "export_checkpoint",
        "miles_embedded.model.extra_layers": "add_layer new_layer read_layer run_layer",
        "miles_embedded.model.configuration": "text_configuration",
        "miles_embedded.model.load": "backbone checkpoint_config decoder_layers has_windows is_embedded load_model prepare unloaded_model",
        "miles_embedded.model.logprobs": "logits_of",
        "miles_embedded.model.onednn": "available",
        "miles_embedded.model.operations": "Attention Experts LogProbs Operations operations_of use_operations",
        "miles_embedded.model.released": "Released",
        "miles_embedded.model.routers": "Routed routed routed_blocks",
        "miles_embedded.model.sharded": "held whole",
        "miles_embedded.model.views": "views",
        "miles_embedded.trainer.attention": "PackedCall",
        "miles_embedded.trainer.build": "make_trainer",
        "miles_embedded.trainer.optimizer_group": "OptimizerGroup optimizer_group",
        "miles_embedded.trainer.packing": "Packing",
    },
)
