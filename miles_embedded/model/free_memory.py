"""Compares the memory that a run needs with the free memory of its GPU, when engine and trainer are built. The plan compares it with the
total memory of the GPU. If other programs use a part of it, the run would fail at its first step or at the first long response.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from miles_core.errors import ConfigError
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import Facts
from miles_core.plugin.memory import GB, USABLE, Usage
from miles_core.plugin.model_config import model_config
from miles_embedded.model.load import resolve_device

log = logging.getLogger(__name__)


def check_free_memory(run: Any, config: Any, kind: str) -> None:
    """Check that the GPU of this process has the memory for an engine or trainer, before it is built.

    Weights, gradients and optimizer state are certain, so a run that has no room for them is refused. Activations and cache are estimated for the
    longest samples, so a run that has no room for these gets a warning.

    Args:
        run: the run; its plan has the options and the plugins that estimate memory.
        config: configuration of the policy.
        kind: ``engine`` or ``trainer``. In one process, both are counted unless they take turns.

    Raises:
        ConfigError: other programs hold so much memory that the rest is too small.
    """
    if resolve_device(config.model.device) != "cuda":
        return
    free, whole = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    if free + reserved >= USABLE * whole:
        return  # the plan has compared with this
    usages = usages_of(run, config)
    together = run.plan.fact("runtime") == "inline" and not run.plan.fact("colocate")
    asked = [u for u in usages if together or u.kind == kind]
    join = sum if together else max
    needed = join([0.0, *(u.parts.total for u in asked)])
    certain = join([0.0, *(u.parts.total - u.parts.activations - u.parts.cache for u in asked)])
    if needed <= free + reserved:
        return
    parts = ", ".join(f"{u.parts.total / GB:.1f} GB for the {u.kind}" for u in asked)
    text = (
        f"the GPU has {(free + reserved) / GB:.1f} of {whole / GB:.1f} GB free, because other programs use the rest, and this run asks for "
        f"{needed / GB:.1f} GB ({parts}; `miles plan` shows its parts): end those programs or choose another GPU with CUDA_VISIBLE_DEVICES; "
        "--max-running-requests and --rollout-max-response-len make the engine's cache smaller, --max-tokens-per-gpu and "
        "--recompute-activations the trainer's activations, --offload-optimizer its state"
    )
    if certain > free + reserved:
        raise ConfigError(text)
    log.warning("%s", text)


def usages_of(run: Any, config: Any) -> list[Usage]:
    """Return the memory of the run's processes on a GPU, as its active plugins estimate it; empty if the checkpoint has no known sizes."""
    from importlib import import_module

    model, facts, found = model_config(config.model.hf_checkpoint), Facts(run.plan.facts), list[Usage]()
    if model is None:
        return found
    active, manifests = run.plan.order, discover()
    for name in (n for n in active if n in manifests and manifests[n].memory):
        module, _, function = manifests[name].memory.partition(":")
        found += getattr(import_module(module), function)(facts, model)
    replaced = {(u.kind, u.label) for u in found if u.replaces}
    return [u for u in found if u.replaces or (u.kind, u.label) not in replaced]
