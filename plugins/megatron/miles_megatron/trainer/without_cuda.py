"""Runs Megatron-Core on a machine without CUDA, for tests and small models.

Megatron-Core hard-codes CUDA in many places where any device would work: buffers with ``device="cuda"``, streams and events around copies,
the current device. ``without_cuda`` redirects these calls to the CPU and does nothing if CUDA is available. Collectives then use gloo, and
the modules are those of Megatron-Core's local specification.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _Idle:
    """Stand-in for a CUDA stream or event; all operations complete immediately."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        """Return that all work is complete."""
        return True

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None: ...


class _OnCpu(TorchFunctionMode):
    """Replaces ``device="cuda"`` by the CPU, and makes ``Tensor.type()`` report the CUDA type."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(args[0]).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Run Megatron-Core on the CPU inside the context; does nothing if CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    _replace_calls()
    with torch.compiler.set_stance("force_eager"), _OnCpu():  # Megatron-Core compiles some methods
        yield


@cache
def _replace_calls() -> None:
    """Replace functions of ``torch.cuda`` for the rest of the process; a process without CUDA does not need the originals."""
    calls: Any = torch.cuda
    calls.current_device = lambda: torch.device("cpu")
    calls.current_stream = lambda *a, **k: _Idle()
    calls.Stream = calls.Event = _Idle
    calls.stream = lambda stream: contextlib.nullcontext()
    calls.synchronize = lambda *a, **k: None


@cache
def adapt_modules() -> None:
    """Patch Megatron-Core's modules for the CPU: random-number states, split sizes for gloo, norms with sequence parallelism, optimizer
    step counts, in-place additions, and projections around experts. Call it after the process groups exist; does nothing if CUDA is available."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    states: Any = random
    states.initialize_rng_tracker()
    states._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    states._set_cuda_rng_state = lambda *args, **kwargs: None
    tracker: Any = type(states.get_cuda_rng_tracker())
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    _convert_split_sizes()
    _mark_norm_parameters()
    _handle_step_counts()
    _clone_reduced_tensors()
    _replace_latent_projections()


def _convert_split_sizes() -> None:
    """Pass split sizes of all-to-all as integers, which gloo requires."""
    original: Any = dist.all_to_all_single

    def exchange(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *rest: Any, **named: Any
    ) -> Any:
        def numbers(sizes: Any) -> Any:
            return None if sizes is None else [int(size) for size in sizes]

        return original(output, input, numbers(output_split_sizes), numbers(input_split_sizes), *rest, **named)

    places: Any = (dist, dist.distributed_c10d)
    for place in places:
        place.all_to_all_single = exchange


def _handle_step_counts() -> None:
    """Add torch AdamW's step count to the states that Megatron-Core sets; it expects only moments there."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer: Any = DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: original(
        self, parameter, {"step": None, **tensors}
    )


def _clone_reduced_tensors() -> None:
    """Clone the result of the reduction over tensor-parallel ranks.

    Local experts add their bias to it in place, which torch rejects if an autograd function returned its own input."""
    from megatron.core.tensor_parallel import mappings

    function: Any = mappings._ReduceFromModelParallelRegion
    original = function.forward
    function.forward = staticmethod(lambda ctx, *arguments: original(ctx, *arguments).clone())


def _replace_latent_projections() -> None:
    """Build the projections around experts in torch; Megatron-Core has them in TransformerEngine only."""
    from megatron.core.transformer.moe import moe_layer

    from miles_megatron.trainer.duplicated import DuplicatedLinear

    layer: Any = moe_layer
    layer.HAVE_TE, layer.TELinear = True, DuplicatedLinear


def _mark_norm_parameters() -> None:
    """Allow torch's norm with sequence parallelism: mark its parameters, so that Megatron-Core sums their gradients."""
    from megatron.core.transformer import torch_norm

    wrapped: Any = torch_norm.WrappedTorchNorm
    original = wrapped.__new__

    def make(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence, config.sequence_parallel = config.sequence_parallel, False
        try:
            made = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence
        for parameter in made.parameters():
            parameter.sequence_parallel = sequence
        return made

    wrapped.__new__ = make
