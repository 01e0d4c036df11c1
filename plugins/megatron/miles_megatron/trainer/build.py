"""Builds the trainer from a run's configuration: the provider of ``--trainer megatron``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from miles_core.plugin import Policy, Run
from miles_core.trainer import OptimizerConfig, collect_mtp_request, micro_batch_limits
from miles_formats import make_codec, use_float32_products
from miles_megatron import families
from miles_megatron.config import table
from miles_megatron.recipes import RECIPES
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.groups import start_groups
from miles_megatron.trainer.without_cuda import adapt_modules, without_cuda

if TYPE_CHECKING:
    from miles_megatron.trainer.settings import Settings
    from miles_megatron.trainer.trainer import MegatronTrainer

#: Options that set fields of ``Sizes`` and not fields of Megatron-Core's configurations.
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_model_parallel_size": "virtual",
    "num_layers_in_first_pipeline_stage": "first",
    "num_layers_in_last_pipeline_stage": "last",
    "sequence_parallel": "sequence",
    "account_for_embedding_in_pipeline_split": "embedding",
    "account_for_loss_in_pipeline_split": "loss",
}


def make_trainer(run: Run, policy: Policy) -> MegatronTrainer:
    """Build this process's rank. With several ranks, torch.distributed must be initialised."""
    use_float32_products()
    options = run.config.plugin("megatron")
    given = {field: getattr(options, name) for name, field in _SIZES.items() if getattr(options, name)}
    tp = given.setdefault("tp", 1)
    given["sequence"] = tp > 1 and given.get("sequence", False)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = Sizes(ranks=ranks, **{"etp": tp, **given})
    with without_cuda():
        world = start_groups(sizes, run.config.train.seed)
        adapt_modules()
        from miles_megatron.trainer.trainer import MegatronTrainer
        from miles_megatron.trainer.value_head import make_value_head

        directory = Path(run.config_of(policy).model.ref_load or policy.hf_checkpoint)
        architecture = families.read(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        codec = make_codec(run, policy, run.config_of(policy).train.precision)

        def notify_plugins(chunk: nn.Module) -> None:
            run.hooks.on("on_model", run=run, policy=policy, model=chunk, role="critic" if critic else "train")

        critic = policy.role == "critic"
        request = None if critic else collect_mtp_request(run, policy)
        trainer = MegatronTrainer(
            architecture,
            sizes,
            world,
            directory,
            settings(run.config_of(policy)),
            directory,
            notify_plugins,
            codec,
            request,
            partial(make_value_head, run, policy) if critic else None,
        )
    if run.config_of(policy).precision.warmup_steps:
        trainer.rebuild("bf16")
    return trainer


def settings(config: Any) -> Settings:
    """Build the settings from the configuration."""
    from miles_megatron.trainer.settings import Settings

    train, rollout = config.train, config.rollout
    chosen = chosen_fields(config.plugin("megatron"))
    if train.activation_checkpointing and "recompute_granularity" not in chosen["TransformerConfig"]:
        chosen["TransformerConfig"] |= FULL_RECOMPUTATION
    if torch.cuda.is_available():
        chosen["TransformerConfig"] |= RECIPES.get(train.precision, {})
    samples, tokens = micro_batch_limits(config, "cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.cuda.is_available() if config.model.dtype == "auto" else config.model.dtype == "bfloat16"
    return Settings(
        adamw=OptimizerConfig.of(config),
        temperature=rollout.temperature,
        micro_batch_size=samples,
        max_tokens=tokens,
        entropy=config.algorithm.entropy_coef > 0,
        balance=train.aux_loss_coef,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        longest=rollout.max_context_len or rollout.max_response_len + (rollout.max_prompt_len or 4096),
        model=chosen["TransformerConfig"],
        optimizer=chosen["OptimizerConfig"],
        reduction=chosen["DistributedDataParallelConfig"],
    )


#: TransformerConfig fields for ``--recompute-activations``: recompute every layer from its input.
FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def chosen_fields(options: Any) -> dict[str, dict[str, Any]]:
    """Return the options that have a value, by Megatron-Core class; model parallel options are listed under TransformerConfig."""
    found: dict[str, dict[str, Any]] = {
        owner: {} for owner in ("TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")
    }
    for row in table():
        name = row["name"]
        value = getattr(options, name)
        if value in (None, ()) or name in _SIZES:
            continue
        owner = row["owner"] if row["owner"] in found else "TransformerConfig"
        found[owner][name] = _value(row, value)
    model = found["TransformerConfig"]
    if model.get("recompute_granularity") == "full":
        model.setdefault("recompute_method", "uniform")
        model.setdefault("recompute_num_layers", 1)
    return found


def _value(row: Mapping[str, Any], value: Any) -> Any:
    if row["type"] == "words":
        return value[0] if row["name"] == "cp_comm_type" and len(value) == 1 else list(value)
    return value
