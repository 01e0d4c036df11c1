"""Hooks of the plugin: adapters are added to models, merged into exports, and saved in peft's format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data import WeightUnit
from miles_core.plugin import CheckpointError, Policy, Run, StateKey, Store, hookimpl
from miles_embedded import (
    Variant,
    build_empty,
    checkpoint_config,
    full_values,
    is_constant,
    mark_constant,
    mark_variant,
    views,
)
from miles_lora import LoraOptions
from miles_lora.adapter import Adapter, attach, delta_of, squared_norm
from miles_lora.base import codec_of
from miles_lora.one_engine import batch_key, shares_engine, value_of
from miles_lora.peft_files import read_adapter, write_adapter
from miles_lora.sharded import ShardedAdapters
from miles_lora.stacks import Stacks
from miles_lora.targets import Target, find_targets

log = logging.getLogger(__name__)


@dataclass
class Trained:
    """The trained model of one policy, with its adapters by the name of the adapted parameter."""

    model: nn.Module
    targets: list[Target]
    adapters: dict[str, Adapter]
    options: LoraOptions

    @cached_property
    def views(self) -> dict[str, Any]:
        """Every tensor of the model's checkpoint by its name, those of the adapters included."""
        return {view.name: view for view in views(self.model)}

    @cached_property
    def own(self) -> set[str]:
        """Names of the adapters' parameters."""
        adapters = [name for name, module in self.model.named_modules() if isinstance(module, Adapter)]
        return {f"{name}.{leaf}" for name in adapters for leaf in ("lora_A", "lora_B")}

    def matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the complete A and B of each adapter. A collective if ranks divide them."""
        return {n: (full_values(a.lora_A), full_values(a.lora_B)) for n, a in self.adapters.items()}

    def squared_norm(self) -> Tensor:
        """Return the squared Frobenius norm of all weight changes by adapters. A collective if ranks divide them."""
        return torch.stack([squared_norm(self.adapters[n], a, b) for n, (a, b) in self.matrices().items()]).sum()

    def base(self) -> Iterator[WeightUnit]:
        """Yield the checkpoint tensors of the base. A collective."""
        state, source, values = self.model.state_dict(keep_vars=True), "", torch.empty(0)
        for view in views(self.model):
            if not is_constant(state[view.source]):
                continue
            if view.source != source:
                source, values = view.source, full_values(state[view.source])
            yield WeightUnit({view.name: view.of(values)})


#: policy -> its trained model, in the process of the trainer.
TRAINED = StateKey[dict[str, Trained]]()


class Lora:
    """Adds adapters to the models of policies that train, and freezes the rest."""

    def __init__(self) -> None:
        self.trained: dict[str, Trained] = {}
        self.sharded: dict[str, ShardedAdapters] = {}

    @hookimpl
    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        if role == "critic":  # trained in full
            return
        options: LoraOptions = run.config_of(policy).plugin("lora")
        if hasattr(model, "matrices"):  # of a trainer that splits them among ranks
            if not _has_adapters(policy):
                return
            if policy.name not in self.sharded:
                self.sharded[policy.name] = _make_sharded(run, policy, options)
            self.sharded[policy.name].attach(model)
            return
        separate, trains = options.sync == "adapter", role in ("train", "shared") and _has_adapters(policy)
        if trains and not separate:
            mark_constant(model.parameters())
        together = role == "rollout" and shares_engine(run, policy, model)
        if not (trains or together or (separate and role == "rollout" and _has_adapters(policy))):
            return
        format = codec_of(run, policy, role).format
        targets = find_targets(model, options.target_modules)
        seed = _seed_of(run, policy, options)
        adapters = attach(targets, options, seed, raw_inputs=format is not None and format.quantizes_activations)
        if together:
            mark_variant(model, Variant(batch_key(value_of(run, policy)), Stacks))
        if not _has_adapters(policy):  # in one batch with policies that have some; its own stay 0
            mark_constant((p for a in adapters.values() for p in a.parameters()), streamed=False)
        if not trains:
            return
        if options.adapter is not None:
            shapes = {n: (a.lora_A.shape, a.lora_B.shape) for n, a in adapters.items()}
            for source, (left, right) in read_adapter(options.adapter, shapes, targets).items():
                adapters[source].lora_A.data.copy_(left)
                adapters[source].lora_B.data.copy_(right)
        self.trained[policy.name] = run.state.setdefault(TRAINED, {})[policy.name] = Trained(
            model, targets, adapters, options
        )
        own = sum(p.numel() for a in adapters.values() for p in a.parameters())
        every = sum(p.numel() for p in model.parameters())
        log.info(
            "%s: %d adapters of rank %d, %.3g %% of %d parameters",
            policy.name,
            len(adapters),
            options.rank,
            100 * own / every,
            every,
        )

    @hookimpl
    def wrap_weights(self, policy: Policy, purpose: str) -> Callable[..., Any] | None:
        trained = self.trained.get(policy.name)
        # a snapshot is loaded back into the model with adapters; a sync of adapters streams nothing else
        if (
            trained is None
            or purpose in ("snapshot", "convert")
            or (purpose == "sync" and trained.options.sync == "adapter")
        ):
            return None

        def wrap(inner: Callable[[], Iterator[WeightUnit]]) -> Callable[[], Iterator[WeightUnit]]:
            def weights() -> Iterator[WeightUnit]:
                yield from merge(trained, inner())
                if trained.options.sync == "adapter":  # the stream has adapters only
                    yield from merge(trained, trained.base())

            return weights

        return wrap

    @hookimpl
    def wrap_export(self, policy: Policy) -> Callable[..., Any] | None:
        trained = self._find(policy)
        if trained is None or trained.options.export != "adapter":
            return None

        def wrap(inner: Callable[[Path], None]) -> Callable[[Path], None]:
            def export(directory: Path) -> None:
                matrices = trained.matrices()
                if torch.distributed.is_initialized() and torch.distributed.get_rank():
                    return
                directory = Path(directory)
                if directory.exists() and any(directory.iterdir()):
                    raise CheckpointError(
                        f"{directory} already exists and is not empty; choose another directory for the export"
                    )
                self._write(directory, policy, trained, matrices)

            return export

        return wrap

    @hookimpl
    def wrap_optimizer_step(self, policy: Policy) -> Callable[..., Any] | None:
        trained = self._find(policy)
        if trained is None:
            return None

        def wrap(inner: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
            @torch.no_grad()
            def optimizer_step() -> dict[str, float]:
                metrics = inner()
                return {**metrics, "lora_delta_norm": float(trained.squared_norm().sqrt())}

            return optimizer_step

        return wrap

    @hookimpl
    def on_save(self, policy: Policy | None, store: Store) -> None:
        trained = self._find(policy) if policy is not None else None
        if trained is None or policy is None:
            return
        matrices = trained.matrices()
        if store.world.rank == 0:
            self._write(store.directory / "lora", policy, trained, matrices)

    def _find(self, policy: Policy) -> Trained | ShardedAdapters | None:
        return self.trained.get(policy.name) or self.sharded.get(policy.name)

    def _write(
        self,
        directory: Path,
        policy: Policy,
        trained: Trained | ShardedAdapters,
        matrices: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        write_adapter(directory, trained.targets, matrices, trained.options, policy.hf_checkpoint, trained.model)


def _has_adapters(policy: Policy) -> bool:
    """Whether the models of a policy have adapters: it trains them, or loads those of a policy that does."""
    return policy.learns or bool(policy.follows)


def _seed_of(run: Run, policy: Policy, options: LoraOptions) -> str:
    """Return the seed of a policy's initial values."""
    return f"{run.config.train.seed}/{policy.name}" if options.seed is None else str(options.seed)


def _make_sharded(run: Run, policy: Policy, options: LoraOptions) -> ShardedAdapters:
    chosen = run.config_of(policy).model
    config = checkpoint_config(chosen.ref_load or policy.hf_checkpoint, chosen.trust_remote_code)
    model = build_empty(config, chosen.trust_remote_code)
    made = ShardedAdapters(model, options, _seed_of(run, policy, options))
    if options.adapter is not None:
        made.start = read_adapter(options.adapter, made.shapes(), made.targets)
    return made


@torch.no_grad()
def merge(trained: Trained, stream: Iterator[WeightUnit]) -> Iterator[WeightUnit]:
    """Yield the checkpoint tensors of ``stream`` with their adapters added, without the adapters themselves.

    Sums are computed in float32 and rounded once to the dtype of the base. A collective: every rank consumes it to the end.
    """
    matrices, parameters = trained.matrices(), trained.model.state_dict(keep_vars=True)
    source, delta = "", torch.empty(0)
    for unit in stream:
        tensors, changed = {}, False
        for name, tensor in unit.tensors.items():
            view = trained.views.get(name)
            if view is not None and view.source in trained.own:  # under the name that a checkpoint would have
                continue
            if view is not None and view.source in matrices:
                if view.source != source:
                    source, delta = view.source, delta_of(trained.adapters[view.source], *matrices[view.source])
                    delta = _like(parameters[source], delta)
                tensor, changed = (tensor.float() + view.of(delta)).to(tensor.dtype), True
            tensors[name] = tensor
        if tensors:
            yield WeightUnit(tensors, unit.lasting and not changed)


def _like(parameter: Tensor, delta: Tensor) -> Tensor:
    """Return ``delta`` in the memory layout of the parameter, so that views of the parameter are views of it."""
    if delta.stride() == parameter.stride():
        return delta
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=delta.dtype, device=delta.device).copy_(delta)
