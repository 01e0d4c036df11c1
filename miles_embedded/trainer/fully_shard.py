"""Fully sharded data parallelism (FSDP2): each process keeps its rows of every parameter, gradient and optimiser state.

A decoder layer's parameters are put together when it starts and given up when it ends, in forward and backward alike; its
gradient is summed over processes and divided among them as soon as it is complete (Zhao et al., arXiv 2304.11277; torch's
``fully_shard``). What belongs to no layer (embeddings, the last norm, the head) is put together for a whole forward.

Each such step is a collective, so all processes make equally many forward calls; whoever has fewer micro-batches makes
further ones that train nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from miles_core.contracts.trainer import Context, Forward, Output
from miles_core.data.batch import Batch
from miles_core.data.world import World
from miles_embedded.model.load import decoder_layers
from miles_embedded.trainer.data_parallel import Replicated


class FullyShard(Replicated):
    """Every process has its rows of the model.

    Args:
        world: this process among the others, which are torch.distributed's default group.
        device: where the model is.
    """

    in_step = True

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world, device)
        self._mesh = init_device_mesh(device.type, (world.size,))
        self._roots: dict[nn.Module, _Root] = {}

    def divide(self, model: nn.Module) -> None:
        """See ``Alone.divide``."""
        marks = {}
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.contiguous()
            marks[name] = dict(vars(parameter))
        root = self._roots[model] = _Root(model)
        # Sums in float32, of gradients in the parameters' own dtype; inputs stay as they are.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in [*decoder_layers(model), root]:
            # A root keeps its parameters after a forward by default, and would not see what is written to them then.
            sharded: FSDPModule = fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])  # what others noted on a parameter, its optimiser group for one

    def call(self, forward: Forward, model: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """See ``Alone.call``; a model that was not divided is called as it is."""
        root = self._roots.get(model)
        if root is None:
            return forward(model, micro_batch, ctx)
        return Output(**root(forward, micro_batch, ctx))

    def sum_gradients(self, masters: Any) -> None:
        """See ``Alone.sum_gradients``: the backward pass did it."""

    def square_norm(self, value: Tensor) -> Tensor:
        """See ``Alone.square_norm``."""
        return self.sum(value)


class _Root(nn.Module):
    """A model whose forward call is the whole of ``forward``, plugins' wrappers included: what it computes with the embeddings,
    the head or modules of its own happens while these are together.

    Args:
        model: any; not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, forward: Forward, micro_batch: Batch, ctx: Context) -> dict[str, Any]:
        """The output's fields: FSDP2 looks for tensors in dictionaries and not in other classes."""
        return vars(forward(self.model, micro_batch, ctx))
