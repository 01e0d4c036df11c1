"""Hooks of the plugin: compile the kernels at the start of the run, and install them in every model."""

from __future__ import annotations

import logging

import torch
from torch import nn

from miles_core.plugin import ConfigError, hookimpl
from miles_cpu_kernels.experts import left_to_torch
from miles_cpu_kernels.library import why_not
from miles_cpu_kernels.table import add_kernels
from miles_embedded import is_embedded, operations_of, use_operations

log = logging.getLogger(__name__)


class CpuKernels:
    """Installs the kernels in the models of the embedded engine and trainer."""

    @hookimpl
    def on_start(self) -> None:
        if reason := why_not():
            raise ConfigError(f"--plugins cpu_kernels: {reason}; leave the plugin out to compute with torch")

    @hookimpl
    def on_model(self, model: nn.Module, role: str) -> None:
        if is_embedded(model):
            use_kernels(model, f"the {role} model")


def use_kernels(model: nn.Module, what: str = "the model") -> None:
    """Install the kernels in a model and log which operations use them.

    Args:
        model: a model prepared by ``miles_embedded.model.load``.
        what: name of the model in log and error messages.

    Raises:
        ConfigError: the model is not float32 on a CPU.
        CannotCompileError: the kernels cannot be compiled.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
            raise ConfigError(
                f"--plugins cpu_kernels: the kernels need a float32 model on a CPU, but {name} of {what} is "
                f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}; give --device cpu --dtype float32, "
                "or leave the plugin out"
            )
    done = use_operations(model, add_kernels(operations_of(model)))
    reason = left_to_torch()
    log.info(
        "cpu_kernels: %s computes with compiled norms (%d), rotary embeddings (%d), log-probabilities, attention over few keys%s",
        what,
        done["norm"],
        done["rotation"],
        f"; experts use torch, because {reason}" if reason else " and small experts",
    )
