"""Where cpu_kernels plugs in: it compiles before anything is built, and gives every model its table of operations."""

from __future__ import annotations

import logging

import torch
from torch import nn

from miles_core.plugin import ConfigError, hookimpl
from miles_cpu_kernels.experts import left_to_torch
from miles_cpu_kernels.library import why_not
from miles_cpu_kernels.table import compiled
from miles_embedded import is_embedded, operations_of, use_operations

log = logging.getLogger(__name__)


class CpuKernels:
    """Compiled steps for the models of the embedded engine and trainer."""

    @hookimpl
    def on_start(self) -> None:
        if reason := why_not():
            raise ConfigError(f"--plugins cpu_kernels: {reason}; without the plugin, torch computes alone")

    @hookimpl
    def on_model(self, model: nn.Module, role: str) -> None:
        if is_embedded(model):
            use_kernels(model, f"the {role} model")


def use_kernels(model: nn.Module, what: str = "the model") -> None:
    """Let a model compute with the kernels from now on; what it computes with them is logged.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        what: what to call it in the log and in an error.

    Raises:
        ConfigError: the model is not float32 on a CPU.
        CannotCompileError: there are no kernels here.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
            raise ConfigError(
                f"--plugins cpu_kernels: the kernels are for a float32 model on a CPU, and {name} of {what} is "
                f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}; give --device cpu --dtype float32, "
                "or leave the plugin out"
            )
    done = use_operations(model, compiled(operations_of(model)))
    reason = left_to_torch()
    log.info(
        "cpu_kernels: %s computes with compiled norms (%d), rotary embeddings (%d), log-probabilities, attention over few keys%s",
        what,
        done["norm"],
        done["rotation"],
        f"; experts are torch's, because {reason}" if reason else " and experts of small weights",
    )
