"""Sends adapters to an engine with an API for loading them (transport ``adapter``), in peft's format.

The message is ``{"adapter": name of the policy, "config": adapter_config.json, "tensors": adapter_model.safetensors as bytes}``. Engines
that take it declare the capability ``transport:adapter``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from safetensors.torch import save
from torch import Tensor

from miles_core.data import Encoded
from miles_core.engine import Engine, SyncReport, Transport
from miles_core.plugin import Policy, Run, SyncError
from miles_embedded import views
from miles_lora.adapter import CHILD
from miles_lora.hooks import TRAINED, Trained
from miles_lora.peft_files import adapter_config, names_of


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
                        f"the stream has {name}, which is no adapter; another plugin added it (wrap_weights)"
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


def make(run: Run, policy: Policy, engine: Engine) -> AdapterTransport:
    """Provider of ``--transport adapter``."""
    return AdapterTransport(engine, policy, run.state[TRAINED][policy.name])
