"""The backend that ships with core: an engine and a trainer for Transformers models, in this process.

The backend registers itself with a manifest like any other backend. ``model`` is shared by both sides, ``engine`` generates,
``trainer`` trains, and ``quantized`` implements quantised layers for both.

Plugins may import the names in ``__all__``, which are loaded on first use:

- to hook modules: ``load_model``, ``decoder_layers``, ``is_embedded``, ``routed_blocks`` and ``find_routed`` (both return ``Routed``), and
  inside a layer ``active_context``;
- to wrap an engine or a trainer: ``make_engine``, ``make_trainer``;
- to write decoders: ``Decoder``, ``StepEngine``, ``Row``, ``Sampled``, ``Emitted``, ``Prompts``, ``pick``; with steps in static buffers,
  which CUDA graphs replay: ``AsyncScheduling``, ``Launched``, ``StaticBatch``, ``StaticCall``, ``fill_rows``, ``padded_rows``, ``distribution``,
  ``stream_start``, ``uniform_from``, ``check_finite``;
- to add layers after the model's own: ``new_layer``, ``add_layer``, ``read_layer``, ``run_layer``; a value head next to
  the output layer: ``new_value_head``, ``add_value_head``, ``VALUE_HEAD``;
- to pass images to an engine: ``ImageProcessor``, ``find_processor``;
- to build a second model: ``checkpoint_config``, ``unloaded_model``, ``prepare``;
- to keep a base under adapters: ``mark_constant``, ``encode_weights``, ``read_weights``, ``share_weights``, ``full_values``, ``make_model``;
- to train parameters with their own settings: ``OptimizerGroup``, ``optimizer_group``; ``local_shard`` and ``gather_tensor`` if ranks
  shard them, and ``views`` if the exported tensors differ from them;
- to decode policies that differ in a plugin's modules in one batch: ``mark_variant``, ``Variant``, ``VariantParts``, ``TokenVariants``,
  ``VARIANTS``;
- to free device memory temporarily: ``Released``; to keep parameters in host memory: ``mark_hosted``, ``offload_gradient``;
- to examine a model for a plan without importing torch: ``find_known_weights``;
- to estimate memory in plans: ``model_size``, ``size_of``, ``longest_sample``, ``wanted_rows``, ``engines_gpus``, ``training_of``,
  ``Frozen``, ``trainer_parts``, ``trainer_usage``, ``engine_usage``, ``format_billions``;
- to count the tokens of each expert: ``ExpertLoads``, summed with ``sum_over_ranks``;
- to replace steps of a model: ``Operations`` (with the types of its functions), ``operations_of``, ``use_operations``, ``accepts_given``, and
  the calls that attention receives; to run without the replaced steps: ``class_forwards``.

``miles_embedded.testing`` is public too.
"""

import logging
from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports
from miles_embedded.manifest import plugin

# Transformers imports torchao if it is installed, which logs a warning about kernels for other devices in every process.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

if TYPE_CHECKING:
    from miles_embedded.engine.async_scheduling import AsyncScheduling, Launched, fill_rows
    from miles_embedded.engine.attention import DecodeCall, PromptCall, Prompts
    from miles_embedded.engine.build import make_engine
    from miles_embedded.engine.cache import CachedRows
    from miles_embedded.engine.decoder import Decoder
    from miles_embedded.engine.row import Row
    from miles_embedded.engine.sampling import Sampled, check_finite, distribution, pick, stream_start, uniform_from
    from miles_embedded.engine.static_attention import StaticCall
    from miles_embedded.engine.static_batch import StaticBatch
    from miles_embedded.engine.static_prompts import StaticPromptCall
    from miles_embedded.engine.static_step import padded_rows
    from miles_embedded.engine.step import Emitted, StepEngine
    from miles_embedded.kernels.available import kernels_run
    from miles_embedded.known import find_known_weights
    from miles_embedded.memory.model_size import ModelSize, model_size
    from miles_embedded.memory.usage import (
        Frozen,
        engine_usage,
        engines_gpus,
        format_billions,
        longest_sample,
        size_of,
        trainer_parts,
        trainer_usage,
        training_of,
        wanted_rows,
    )
    from miles_embedded.model.attention import AttentionOptions
    from miles_embedded.model.call import Call, active_context
    from miles_embedded.model.examine import examine
    from miles_embedded.model.experts import Routed, find_routed, routed_blocks
    from miles_embedded.model.export import export_checkpoint
    from miles_embedded.model.extra_layers import add_layer, new_layer, read_layer, run_layer
    from miles_embedded.model.gpu_operations import with_row_kernels
    from miles_embedded.model.grouped_experts import uses_grouped_product
    from miles_embedded.model.image_processor import ImageProcessor, find_processor
    from miles_embedded.model.joint_linear import joined_layers
    from miles_embedded.model.load import (
        build_empty,
        checkpoint_config,
        is_embedded,
        load_model,
        make_model,
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
    from miles_embedded.model.parts import backbone, class_forwards, decoder_layers, head, text_configuration
    from miles_embedded.model.released import Released
    from miles_embedded.model.replaced_steps import accepts_given
    from miles_embedded.model.storage import (
        codes_of,
        full_values,
        gather_tensor,
        is_constant,
        local_shard,
        mark_constant,
        mark_hosted,
        offload_gradient,
    )
    from miles_embedded.model.value_head import VALUE_HEAD, add_value_head, new_value_head
    from miles_embedded.model.variants import VARIANTS, TokenVariants, Variant, VariantParts, mark_variant
    from miles_embedded.model.views import views
    from miles_embedded.model.windows import has_windows, mask_for
    from miles_embedded.quantized.codes import EncodedParameter
    from miles_embedded.quantized.encoded import encode_weights, read_weights, share_weights
    from miles_embedded.trainer.attention import PackedCall
    from miles_embedded.trainer.build import make_trainer
    from miles_embedded.trainer.data_parallel import sum_over_ranks
    from miles_embedded.trainer.expert_loads import ExpertLoads
    from miles_embedded.trainer.optimizer_group import OptimizerGroup, optimizer_group
    from miles_embedded.trainer.packing import Packing

__all__ = [
    "VALUE_HEAD",
    "VARIANTS",
    "AsyncScheduling",
    "Attention",
    "AttentionOptions",
    "CachedRows",
    "Call",
    "DecodeCall",
    "Decoder",
    "Emitted",
    "EncodedParameter",
    "ExpertLoads",
    "Experts",
    "Frozen",
    "ImageProcessor",
    "Launched",
    "LogProbs",
    "ModelSize",
    "Operations",
    "OptimizerGroup",
    "PackedCall",
    "Packing",
    "PromptCall",
    "Prompts",
    "Released",
    "Routed",
    "Row",
    "Sampled",
    "StaticBatch",
    "StaticCall",
    "StaticPromptCall",
    "StepEngine",
    "TokenVariants",
    "Variant",
    "VariantParts",
    "accepts_given",
    "active_context",
    "add_layer",
    "add_value_head",
    "available",
    "backbone",
    "build_empty",
    "check_finite",
    "checkpoint_config",
    "class_forwards",
    "codes_of",
    "decoder_layers",
    "distribution",
    "encode_weights",
    "engine_usage",
    "engines_gpus",
    "examine",
    "export_checkpoint",
    "fill_rows",
    "find_known_weights",
    "find_processor",
    "find_routed",
    "format_billions",
    "full_values",
    "gather_tensor",
    "has_windows",
    "head",
    "is_constant",
    "is_embedded",
    "joined_layers",
    "kernels_run",
    "load_model",
    "local_shard",
    "logits_of",
    "longest_sample",
    "make_engine",
    "make_model",
    "make_trainer",
    "mark_constant",
    "mark_hosted",
    "mark_variant",
    "mask_for",
    "model_size",
    "new_layer",
    "new_value_head",
    "offload_gradient",
    "operations_of",
    "optimizer_group",
    "padded_rows",
    "pick",
    "plugin",
    "prepare",
    "read_layer",
    "read_weights",
    "routed_blocks",
    "run_layer",
    "share_weights",
    "size_of",
    "stream_start",
    "sum_over_ranks",
    "text_configuration",
    "trainer_parts",
    "trainer_usage",
    "training_of",
    "uniform_from",
    "unloaded_model",
    "use_operations",
    "uses_grouped_product",
    "views",
    "wanted_rows",
    "with_row_kernels",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_embedded.engine.async_scheduling": "AsyncScheduling Launched fill_rows",
        "miles_embedded.engine.attention": "DecodeCall PromptCall Prompts",
        "miles_embedded.engine.build": "make_engine",
        "miles_embedded.engine.cache": "CachedRows",
        "miles_embedded.engine.decoder": "Decoder",
        "miles_embedded.engine.row": "Row",
        "miles_embedded.engine.sampling": "Sampled check_finite distribution pick stream_start uniform_from",
        "miles_embedded.engine.static_attention": "StaticCall",
        "miles_embedded.engine.static_batch": "StaticBatch",
        "miles_embedded.engine.static_prompts": "StaticPromptCall",
        "miles_embedded.engine.static_step": "padded_rows",
        "miles_embedded.engine.step": "Emitted StepEngine",
        "miles_embedded.kernels.available": "kernels_run",
        "miles_embedded.known": "find_known_weights",
        "miles_embedded.memory.model_size": "ModelSize model_size",
        "miles_embedded.memory.usage": "Frozen engine_usage engines_gpus format_billions longest_sample size_of trainer_parts trainer_usage "
        "training_of wanted_rows",
        "miles_embedded.model.attention": "AttentionOptions",
        "miles_embedded.model.call": "Call active_context",
        "miles_embedded.model.export": "export_checkpoint",
        "miles_embedded.model.extra_layers": "add_layer new_layer read_layer run_layer",
        "miles_embedded.model.parts": "backbone class_forwards decoder_layers head text_configuration",
        "miles_embedded.model.storage": "codes_of full_values gather_tensor offload_gradient is_constant local_shard mark_constant mark_hosted",
        "miles_embedded.quantized.codes": "EncodedParameter",
        "miles_embedded.quantized.encoded": "encode_weights read_weights share_weights",
        "miles_embedded.model.examine": "examine",
        "miles_embedded.model.gpu_operations": "with_row_kernels",
        "miles_embedded.model.grouped_experts": "uses_grouped_product",
        "miles_embedded.model.image_processor": "ImageProcessor find_processor",
        "miles_embedded.model.joint_linear": "joined_layers",
        "miles_embedded.model.load": "build_empty checkpoint_config is_embedded load_model make_model prepare unloaded_model",
        "miles_embedded.model.logprobs": "logits_of",
        "miles_embedded.model.onednn": "available",
        "miles_embedded.model.operations": "Attention Experts LogProbs Operations operations_of use_operations",
        "miles_embedded.model.released": "Released",
        "miles_embedded.model.replaced_steps": "accepts_given",
        "miles_embedded.model.experts": "Routed find_routed routed_blocks",
        "miles_embedded.model.value_head": "VALUE_HEAD add_value_head new_value_head",
        "miles_embedded.model.variants": "VARIANTS TokenVariants Variant VariantParts mark_variant",
        "miles_embedded.model.views": "views",
        "miles_embedded.model.windows": "has_windows mask_for",
        "miles_embedded.trainer.attention": "PackedCall",
        "miles_embedded.trainer.build": "make_trainer",
        "miles_embedded.trainer.data_parallel": "sum_over_ranks",
        "miles_embedded.trainer.expert_loads": "ExpertLoads",
        "miles_embedded.trainer.optimizer_group": "OptimizerGroup optimizer_group",
        "miles_embedded.trainer.packing": "Packing",
    },
)
