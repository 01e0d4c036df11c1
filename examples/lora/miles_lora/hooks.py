"""Hooks of the plugin: add adapters, and merge them into exported weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from miles_core.data import Unit
from miles_core.plugin import ConfigError, Policy, Run, hookimpl
from miles_lora import LoraOptions

BASE, DOWN, UP = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


class Lora:
    """Adds adapters to the trained model, and merges them into the weights that the trainer sends or exports."""

    def __init__(self, options: LoraOptions) -> None:
        self.options = options

    @hookimpl
    def on_model(self, run: Run, model: nn.Module, role: str) -> None:
        if role not in ("train", "shared"):  # engine and reference model use merged or original weights
            return
        options = self.options
        config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=list(options.modules))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.config.train.seed)  # the same adapters on every rank
            try:
                inject_adapter_in_model(config, model)
            except ValueError as error:  # peft found no such module
                raise ConfigError(f"--lora-modules {','.join(options.modules)}: {error}") from error
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)

    @hookimpl
    def wrap_weights(self, policy: Policy, purpose: str) -> Callable | None:
        if purpose == "snapshot":  # a snapshot is loaded back into the model with adapters
            return None
        scale = self.options.alpha / self.options.rank

        def wrap(inner: Callable[[], Iterator[Unit]]) -> Callable[[], Iterator[Unit]]:
            def weights() -> Iterator[Unit]:
                waiting: dict[str, dict[str, Tensor]] = {}
                for unit in inner():
                    plain = {}
                    for name, tensor in unit.tensors.items():
                        end = next((end for end in (BASE, DOWN, UP) if name.endswith(end)), None)
                        if end is None:
                            plain[name.replace(".base_layer.", ".")] = tensor
                            continue
                        layer = name.removesuffix(end)
                        parts = waiting.setdefault(layer, {})
                        parts[end] = tensor.clone()
                        if len(parts) == 3:
                            plain[f"{layer}.weight"] = merge(waiting.pop(layer), scale)
                    if plain:
                        yield Unit(plain, unit.lasting and plain.keys() == unit.tensors.keys())

            return weights

        return wrap


def merge(parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return W + scale B A [out, in], computed in float32, in the dtype of W."""
    base = parts[BASE]
    return (base.float() + scale * (parts[UP].float() @ parts[DOWN].float())).to(base.dtype)
