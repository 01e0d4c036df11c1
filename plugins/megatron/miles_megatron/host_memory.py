"""Host memory of a machine's ranks, for the plan. Imports no torch.

The estimate includes: the optimizer's state and masters in host memory (``--optimizer-cpu-offload``), with the pinned copies of gradients
that Megatron-Core's hybrid optimizer keeps; pinned memory for a sleeping rank (``--colocate``); the reference model; a copy of a
checkpoint that is written in the background (``--async-save``); and the processes themselves. It does not include the page cache while
weights are read, which the system can reclaim.

Compared with published runs that offload all of Adam's state of 671 billion parameters: 1,500 GB per machine were published for 96 GPUs
(verl's guide to DeepSeek 671B), and 1,400 to 1,500 GB for 128 GPUs (miles' guide to DeepSeek), whose trainer also keeps pinned copies
of gradients and of the actor while it sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from miles_core.plugin import Facts
from miles_megatron.architecture import Architecture
from miles_megatron.memory import GB, Work, memory
from miles_megatron.sizes import Sizes

#: Bytes per parameter of the gradient and of the parameter that are pinned for copies, of an optimizer in host memory.
_GRADIENT, _PINNED_PARAMETER = 4.0, 4.0
#: PyTorch rounds pinned allocations up to powers of two: on average over all sizes this factor, 1 / ln 2.
PINNED = 1.44
#: Bytes of a process: Python, CUDA's and NCCL's libraries, buffers. An assumption.
_PROCESS = 5.0 * GB
_MACHINE = 8


@dataclass(frozen=True)
class HostMemory:
    """Host memory of one machine, in bytes.

    Attributes:
        optimizer: masters, moments and gradients of an optimizer in host memory.
        sleeping: what sleeping ranks moved to the host.
        reference: weights of the reference model.
        checkpoint: copy of a checkpoint that is written in the background.
        processes: ranks, and engines on the same GPUs.
    """

    optimizer: float = 0.0
    sleeping: float = 0.0
    reference: float = 0.0
    checkpoint: float = 0.0
    processes: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def host_memory(facts: Facts, a: Architecture, s: Sizes, w: Work) -> HostMemory:
    """Estimate the host memory of a machine; that of the stage with the most parameters counts for all of its ranks."""
    stages = memory(a, s, replace(w, offloaded=0.0))
    ranks = min(s.ranks, int(facts.value("gpu.count") or _MACHINE))
    state, weights = max(stage.optimiser for stage in stages), max(stage.weights for stage in stages)
    parameters = state / w.state if w.state else 0.0  # of a rank's share of the optimizer
    pinned = parameters * (_GRADIENT + _PINNED_PARAMETER)
    offloaded = w.offloaded * (state + parameters * _GRADIENT + (PINNED - 1) * pinned)
    colocated = bool(facts.value("colocate"))
    reference = bool(facts.value("algorithm.kl_loss_coef") or facts.value("algorithm.kl_coef"))
    return HostMemory(
        optimizer=ranks * offloaded,
        sleeping=ranks * PINNED * (weights + (1 - w.offloaded) * state) if colocated else 0.0,
        reference=ranks * PINNED * weights if reference else 0.0,
        checkpoint=ranks * (parameters * 2.0 + state) if facts.value("async_save") else 0.0,
        processes=ranks * _PROCESS * (2 if colocated else 1),
    )


def describe_host(facts: Facts, a: Architecture, s: Sizes, w: Work) -> str:
    """Describe the host memory of a machine for the plan; empty if only processes need any."""
    found = host_memory(facts, a, s, w)
    if found.total == found.processes:
        return ""
    parts = [(getattr(found, field.name) / GB, field.name) for field in fields(HostMemory)]
    listed = " + ".join(f"{size:,.0f} {name}" for size, name in parts if size >= 0.5)
    each = min(s.ranks, int(facts.value("gpu.count") or _MACHINE))
    return f"; about {found.total / GB:,.0f} GB of host memory for the {each} rank{'s' * (each > 1)} of a machine: {listed}"
