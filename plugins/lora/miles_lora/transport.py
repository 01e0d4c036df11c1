"""Sends adapters to an engine with an API for loading them (transport ``adapter``), in peft's format.

The message is ``{"adapter": name of the policy, "config": adapter_config.json, "tensors": adapter_model.safetensors as bytes}``; a policy
without adapters, which computes with the base alone, sends the config None. Adapters of joined experts are those of the config's
``target_parameters``. Engines that take the message declare the capability ``transport:adapter``; their plugins refuse adapters that they
cannot apply.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from safetensors.torch import save
from torch import Tensor

from miles_core.data import Encoded
from miles_core.engine import Engine, SyncReport, Transport
from miles_core.plugin import Policy, Run, SyncError
from miles_embedded import views
from miles_lora.adapter import CHILD
from miles_lora.hooks import TRAINED, Trained
from miles_lora.peft_files import adapter_config, names_of


class BaseTransport(Transport):
    """Sends the version of a policy without adapters: the engine has loaded the base itself."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self.engine, self.policy = engine, policy

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started = time.perf_counter()
        for unit in units:
            raise SyncError(f"the stream of {self.policy.name}, which has no adapters, has {', '.join(unit.parts)}")
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            await self.engine.receive({"adapter": self.policy.name, "config": None}, version, True)
        return SyncReport(version, 0, 0, time.perf_counter() - started)


class AdapterTransport(Transport):
    """Sends one message per version."""

    def __init__(self, engine: Engine, policy: Policy, trained: Trained) -> None:
        self.engine, self.policy, self.trained = engine, policy, trained
        streamed = {
            view.source: view.name for view in views(trained.model)
        }  # names in the stream are those of a checkpoint
        self._names = {
            streamed[
                f"{_parent(target.source)}.{CHILD}{f'.{target.attribute}' if target.is_joined else ''}.lora_{x}"
            ]: f"{start}lora_{x}.weight"
            for target in trained.targets
            for start in (names_of(trained.targets)[target.source],)
            for x in "AB"
        }

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started = time.perf_counter()
        tensors: dict[str, Tensor] = {}
        for unit in units:
            for name, tensor in unit.parts.items():
                if name not in self._names:
                    raise SyncError(
                        f"the stream has {name}, which is not an adapter; another plugin added it (wrap_weights)"
                    )
                tensors[self._names[name]] = tensor.detach().to("cpu").contiguous()
        if not tensors:  # another rank sends them
            return SyncReport(version, 0, 0, time.perf_counter() - started)
        data, trained = save(tensors), self.trained
        config = adapter_config(trained.targets, trained.options, self.policy.hf_checkpoint, trained.model)
        await self.engine.receive({"adapter": self.policy.name, "config": config, "tensors": data}, version, True)
        return SyncReport(version, len(data), len(tensors), time.perf_counter() - started)


def _parent(source: str) -> str:
    return source.rpartition(".")[0]


def make(run: Run, policy: Policy, engine: Engine) -> Transport:
    """Provider of ``--transport adapter``."""
    trained = run.state.get(TRAINED, {}).get(policy.name)
    return BaseTransport(engine, policy) if trained is None else AdapterTransport(engine, policy, trained)
