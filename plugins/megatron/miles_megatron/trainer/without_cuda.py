"""Megatron-Core on a machine without CUDA, for tests and small models.

Megatron-Core names the CUDA device in many places where any device would do: buffers made with ``device="cuda"``, streams and events
around copies, the current device. ``without_cuda`` lets these calls mean the CPU; nothing is changed where there is a GPU.
Tensors then travel through gloo, and the modules are those of Megatron-Core's local specification.
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
    """A stream or an event that has nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        """Whatever was asked for is done."""
        return True

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None: ...


class _OnCpu(TorchFunctionMode):
    """``device="cuda"`` means the CPU while this mode is on, and a tensor's type is said to be a GPU's."""

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
    """While this is open, Megatron-Core computes on the CPU; nothing happens where CUDA is there."""
    if torch.cuda.is_available():
        yield
        return
    _replace_calls()
    with _OnCpu():
        yield


@cache
def _replace_calls() -> None:
    """For the rest of this process: a process without CUDA has no other use for these calls."""
    calls: Any = torch.cuda
    calls.current_device = lambda: torch.device("cpu")
    calls.current_stream = lambda *a, **k: _Idle()
    calls.Stream = calls.Event = _Idle
    calls.stream = lambda stream: contextlib.nullcontext()
    calls.synchronize = lambda *a, **k: None


@cache
def adapt_modules() -> None:
    """What only a CPU lacks in Megatron-Core's modules: random-number states of a GPU, split sizes as numbers for gloo, a norm under
    sequence parallelism. To be called once Megatron-Core's groups exist."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    states: Any = random
    states.initialize_rng_tracker()
    states._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    states._set_cuda_rng_state = lambda *args, **kwargs: None
    tracker: Any = type(states.get_cuda_rng_tracker())
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    _exchange_by_numbers()
    _norms_of_shards()
    _counts_of_torch()
    _sums_of_their_own()


def _exchange_by_numbers() -> None:
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


def _counts_of_torch() -> None:
    """torch's AdamW counts steps in its state, where Megatron-Core looks for moments alone; it sets the counts itself."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer: Any = DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: original(
        self, parameter, {"step": None, **tensors}
    )


def _sums_of_their_own() -> None:
    """Local experts add their bias in place to a sum over ranks, which torch refuses where a function returned what it was given."""
    from megatron.core.tensor_parallel import mappings

    function: Any = mappings._ReduceFromModelParallelRegion
    original = function.forward
    function.forward = staticmethod(lambda ctx, *arguments: original(ctx, *arguments).clone())


def _norms_of_shards() -> None:
    """torch's norm knows no sequence parallelism: its parameters are marked here, so that their gradients are summed."""
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
