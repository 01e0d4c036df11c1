"""Build the embedded trainer from the configuration of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from miles_core.contracts.run import Policy
from miles_core.errors import PluginError, describe
from miles_core.train.micro_batches import micro_batch_limits
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.free_memory import check_free_memory
from miles_embedded.model.image_processor import find_processor
from miles_embedded.model.load import build_model, resolve_device
from miles_embedded.quantized.trained import TrainedPrecision
from miles_embedded.trainer.data_parallel import Alone, Replicated, current_world
from miles_embedded.trainer.deterministic import DeterministicTrainer
from miles_embedded.trainer.fully_shard import FullyShard
from miles_embedded.trainer.optimizer import find_fault
from miles_embedded.trainer.self_check import self_check
from miles_embedded.trainer.threads import warn_if_crowded
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig


def make_trainer(run: Any, policy: Any) -> EmbeddedTrainer:
    """Make the trainer of ``--trainer embedded``."""
    config = run.config_of(policy)
    check_free_memory(run, config, "trainer")
    precision = TrainedPrecision(run, policy, current_world().size)
    trains = policy.learns and steps_follow(config)

    def build(role: str, checked: bool = False) -> nn.Module:
        model = build_model(run, policy if trains else host_policy(run, policy), role)
        if checked:  # before a number format, whose rounding may send tokens to other experts in one of the compared forward passes
            self_check(model)
        precision.add(model)
        return model

    def optimizer(groups: list[dict[str, Any]]) -> Any:
        name = config.train.optimizer
        made = run.hooks.make("optimizer", name, run=run, policy=policy, groups=groups)
        if wrong := find_fault(made, groups):
            raise PluginError(f"{run.hooks.describe_part('optimizer', name)}: it returned {describe(made)}{wrong}")
        return made

    engine_is_checked = run.config.run.engine == "embedded" and policy.generates
    model = build("critic" if policy.role == "critic" else "train", config.model.self_check and not engine_is_checked)
    device = next(model.parameters()).device
    if device.type == "cpu":
        warn_if_crowded()
    parallel = data_parallel(config.embedded.sharding_strategy, device)
    settings = trainer_config(config, device, trains=trains)
    kind = DeterministicTrainer if config.embedded.deterministic else EmbeddedTrainer
    processor = find_processor(run, policy)
    return kind(model, settings, lambda: build("ref"), precision, parallel, optimizer, processor)


def steps_follow(config: Any) -> bool:
    """Whether the run has any optimizer step; an evaluation (``--num-rollout 0``) has none."""
    return bool(config.rollout.num_rollout or config.sft.data)


def host_policy(run: Any, policy: Policy) -> Policy:
    """Return a policy whose trainer keeps its model in host memory, if the model is only sent to the engine and compared with it. A model
    that engine and trainer share, or that is sharded, stays on the device.
    """
    options = run.config_of(policy).model
    shared = run.config.run.transport != "copy" or run.hooks.find_provided("model")[0] != "transformers"
    if shared or current_world().size > 1 or policy.role == "frozen" or resolve_device(options.device) == "cpu":
        return policy
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    return replace(policy, options={**policy.options, "model.device": "cpu", "model.dtype": dtype})


def data_parallel(strategy: str, device: torch.device) -> Alone:
    """Make the data-parallel strategy for the processes of torch.distributed's default group, which the runtime created.

    Args:
        strategy: ``full_shard`` or ``no_shard``, as ``--sharding-strategy``.
        device: device of the model.
    """
    world = current_world()
    if world.size == 1:
        return Alone()
    return FullyShard(world, device) if strategy == "full_shard" else Replicated(world, device)


def trainer_config(config: Any, device: torch.device, trains: bool = True) -> TrainerConfig:
    """Derive the trainer's settings from the configuration of a policy."""
    train, rollout = config.train, config.rollout
    samples, tokens = micro_batch_limits(config, device.type)
    return TrainerConfig(
        optimizer=OptimizerConfig.of(config),
        temperature=rollout.temperature,
        micro_batch_size=samples,
        max_tokens=tokens,
        recompute=train.activation_checkpointing,
        aux_loss_coef=train.aux_loss_coef,
        entropy=config.algorithm.entropy_coef > 0,
        trains=trains,
        offload_optimizer=config.embedded.offload_optimizer,
        loss_scale=(config.embedded.initial_loss_scale, config.embedded.loss_scale_window),
    )
