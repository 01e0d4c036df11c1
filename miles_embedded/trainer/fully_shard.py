"""Fully sharded data parallelism (FSDP2): each process keeps its rows of every parameter, gradient and optimiser state.

A decoder layer's parameters are put together when it starts and given up when it ends, in forward and backward alike; its
gradient is summed over processes and divided among them as soon as it is complete (Zhao et al., arXiv 2304.11277; torch's
``fully_shard``). What belongs to no layer (embeddings, the last norm, the head) is put together for a whole forward.

Each such step is a collective, so all processes make equally many forward calls; whoever has fewer micro-batches makes
further ones that train nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from miles_core.contracts.trainer import Context, Forward, Output
from miles_core.data.batch import Batch
from miles_core.data.world import World
from miles_core.errors import ConfigError
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

    def shard(self, model: nn.Module) -> None:
        """See ``Alone.shard``."""
        marks = {}
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.contiguous()
            marks[name] = dict(vars(parameter))
        root = self._roots[model] = _Root(model)
        # Sums in float32, of gradients in the parameters' own dtype; inputs stay as they are.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._agree(model)
        for whole in [*decoder_layers(model), root]:
            for module in [*of_other_dtype(whole), whole]:
                # A root keeps its parameters after a forward by default, and would not see what is written to them then.
                sharded: FSDPModule = fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])  # what others noted on a parameter, its optimiser group for one

    @torch.no_grad()
    def _agree(self, model: nn.Module) -> None:
        """Take the first rank's values where ranks made parameters of different ones, a plugin's module with random numbers say: each
        rank keeps some rows of its own, and they would not belong together."""
        parameters = dict(model.named_parameters())
        if not parameters:
            return
        sums = torch.stack([p.double().sum() for p in parameters.values()]).to(self.device)
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        for parameter, differs in zip(parameters.values(), (low != high).tolist(), strict=True):
            if differs:
                dist.broadcast(parameter.data, 0)

    def call(self, forward: Forward, model: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """See ``Alone.call``; a model that was not divided is called as it is."""
        root = self._roots.get(model)
        if root is None:
            return forward(model, micro_batch, ctx)
        found: Output = root(forward, micro_batch, ctx)[0]
        return found

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

    def forward(self, forward: Forward, micro_batch: Batch, ctx: Context) -> tuple[Output, dict[str, Any], Any]:
        """The output, and behind it all tensors through which a gradient may come back.

        FSDP2 puts the root's parameters together for the backward pass when a gradient reaches a tensor that a forward returned, and
        looks for tensors in dictionaries and tuples. A loss may also read what a plugin left in ``ctx``; a gradient that came back
        through that alone would find parameters without storage.
        """
        output = forward(self.model, micro_batch, ctx)
        return output, vars(output), (ctx.attached, ctx.extras, ctx.metrics)


def of_other_dtype(whole: nn.Module) -> list[nn.Module]:
    """The modules inside ``whole`` that have to be divided by themselves, innermost first: FSDP2 wants parameters of one dtype in a group,
    and plugins add modules of another (adapters and heads in float32).

    Raises:
        ConfigError: a module holds parameters of two dtypes itself.
    """
    owned: dict[nn.Module, set[torch.dtype]] = {}
    elements: Counter[torch.dtype] = Counter()
    for module in _outside_of_groups(whole):
        for parameter in module.parameters(recurse=False):
            owned.setdefault(module, set()).add(parameter.dtype)
            elements[parameter.dtype] += parameter.numel()
    if len(elements) < 2:
        return []
    main = elements.most_common(1)[0][0]
    found: list[nn.Module] = []
    for module, dtypes in owned.items():
        if dtypes == {main}:
            continue
        if len(dtypes) > 1:
            raise ConfigError(
                f"a {type(module).__name__} has parameters of the types {', '.join(sorted(map(str, dtypes)))}: --sharding-strategy "
                "full_shard divides a module by itself where its type differs from the model's; give it one type, or use no_shard"
            )
        found += [child for child in module.modules() if child is not module and child in owned]
        found.append(module)
    return list(dict.fromkeys(found))


def _outside_of_groups(whole: nn.Module) -> Iterator[nn.Module]:
    """``whole`` and the modules inside it, without those that were divided before."""
    yield whole
    for child in whole.children():
        if not isinstance(child, FSDPModule):
            yield from _outside_of_groups(child)
