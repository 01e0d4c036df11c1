"""Fully sharded data parallelism (FSDP2): each process stores its rows of every parameter, gradient and optimizer state.

The parameters of a decoder layer are gathered when the layer starts and freed when it ends, in the forward and the backward pass. Its
gradient is reduce-scattered as soon as it is complete (Zhao et al., arXiv 2304.11277; torch's ``fully_shard``). Parameters outside
layers (embeddings, last norm, head) are gathered for a whole forward.

Each of these steps is a collective operation, so all processes must make the same number of forward calls. A process with fewer
micro-batches makes additional calls that train nothing.
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
from miles_embedded.model.parts import decoder_layers
from miles_embedded.trainer.data_parallel import Replicated


class FullyShard(Replicated):
    """Every process stores a shard of the model.

    Args:
        world: rank and size of this process in torch.distributed's default group.
        device: device of the model.
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
        # Reduce in float32; gradients keep the dtype of their parameters, inputs are not cast.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._synchronise(model)
        for whole in [*decoder_layers(model), root]:
            for module in [*find_other_dtypes(whole), whole]:
                # By default a root keeps its parameters gathered after a forward, and would miss later writes to the shards.
                sharded: FSDPModule = fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])  # attributes that others set on parameters, e.g. the optimizer group

    @torch.no_grad()
    def _synchronise(self, model: nn.Module) -> None:
        """Broadcast parameters whose values differ between ranks from rank 0, e.g. a plugin's randomly initialised module. Shards of
        different tensors would not form one tensor."""
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
        """See ``Alone.call``; a model that is not sharded is called directly."""
        root = self._roots.get(model)
        if root is None:
            return forward(model, micro_batch, ctx)
        found: Output = root(forward, micro_batch, ctx)[0]
        return found

    def sum_gradients(self, masters: Any) -> None:
        """See ``Alone.sum_gradients``; the backward pass has already reduced them."""

    def square_norm(self, value: Tensor) -> Tensor:
        """See ``Alone.square_norm``."""
        return self.sum(value)


class _Root(nn.Module):
    """Wraps a model so that its forward is the whole ``forward`` function, including plugins' wrappers. Embeddings, head and additional
    modules are therefore gathered for everything that it computes.

    Args:
        model: the model; not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, forward: Forward, micro_batch: Batch, ctx: Context) -> tuple[Output, dict[str, Any], Any]:
        """Return the output, and all tensors through which a gradient may arrive.

        FSDP2 gathers the root's parameters for the backward pass when a gradient reaches a returned tensor, and searches dictionaries
        and tuples for tensors. A loss may also use tensors that a plugin stored in ``ctx``; a gradient that arrived only through these
        would find parameters without storage.
        """
        output = forward(self.model, micro_batch, ctx)
        return output, vars(output), (ctx.attached, ctx.extras, ctx.metrics)


def find_other_dtypes(whole: nn.Module) -> list[nn.Module]:
    """Return the modules inside ``whole`` to shard separately, innermost first. FSDP2 requires one dtype per group, but plugins add
    modules of other dtypes (adapters and heads in float32).

    Raises:
        ConfigError: a module itself has parameters of two dtypes.
    """
    owned: dict[nn.Module, set[torch.dtype]] = {}
    elements: Counter[torch.dtype] = Counter()
    for module in _find_unsharded(whole):
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
                "full_shard shards a module separately if its dtype differs from the model's; use one dtype per module, or no_shard"
            )
        found += [child for child in module.modules() if child is not module and child in owned]
        found.append(module)
    return list(dict.fromkeys(found))


def _find_unsharded(whole: nn.Module) -> Iterator[nn.Module]:
    """Yield ``whole`` and the modules inside it, without modules that are already sharded."""
    yield whole
    for child in whole.children():
        if not isinstance(child, FSDPModule):
            yield from _find_unsharded(child)
