"""The matrices of this rank's chunks, for plugins that compute with a changed matrix, such as base plus adapter.

Every chunk has a list ``matrices``. A plugin changes a matrix in ``on_model``, before the chunk is wrapped: modules then compute with the
changed matrix, and weight syncs and exports send it. Passes of the reference model use the matrix as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from miles_megatron.families.parts import Entry
from miles_megatron.layout import shard
from miles_megatron.trainer.weights import Weights


class Matrix:
    """This rank's shard of one matrix of Megatron-Core's model, which may consist of several matrices of the checkpoint.

    Attributes:
        names: the checkpoint's matrices, in the order of their rows.
        shapes: their shapes [out, in].
        expert: index of its expert; None for other matrices.
        module, attribute: where it is stored.
    """

    def __init__(
        self, weights: Weights, entry: Entry, shapes: Mapping[str, tuple[int, ...]], module: nn.Module, attribute: str
    ) -> None:
        self._weights, self._entry = weights, entry
        self.names, self.expert = entry.checkpoint, entry.expert
        self.shapes = [shapes[name] for name in self.names]
        self.module, self.attribute = module, attribute
        self._cut = weights.is_cut(entry, self.weight)

    @property
    def weight(self) -> nn.Parameter:
        """The stored shard."""
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one that stores the parameters of this matrix (see ``add_parameter``)."""
        return not any(self._replica())

    def _replica(self) -> tuple[int, int]:
        """Return this rank's indices among the ranks that split, and among those that replicate the matrix."""
        if self.expert is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            return parallel_state.get_tensor_model_parallel_rank(), group.rank()
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_group().rank(),
        )

    def add_parameter(self, name: str, value: Tensor) -> nn.Parameter:
        """Make a trained parameter that is complete on every rank that has a shard of this matrix.

        The caller assigns it to a module of the chunk.

        Args:
            name: unique in the whole model; checkpoints store it under this name.
            value: initial value, the same on all of these ranks.
        """
        parameter, weight = nn.Parameter(value.to(self.weight.device, self.weight.dtype)), self.weight
        if not getattr(weight, "allreduce", True):
            parameter.allreduce = False  # type: ignore[attr-defined]
        if not self._cut and getattr(weight, "sequence_parallel", False):
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        self._weights.added_parameters[name] = (parameter, self._replica())
        return parameter

    def shard_factors(self, factors: Sequence[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor]:
        """Return left [rows, R] and right [R, columns] whose product is this rank's shard of the products of ``factors``.

        The backward pass sums gradients over the ranks that split the matrix.

        Args:
            factors: for each of ``names`` left [out, r] and right [r, in], or None for a product of 0.
        """
        pairs = [
            None if pair is None else (self._sum_gradient(pair[0]), self._sum_gradient(pair[1])) for pair in factors
        ]
        width, at, lefts = sum(pair[0].shape[1] for pair in pairs if pair is not None), 0, []
        like = next(pair[0] for pair in pairs if pair is not None)
        for pair, (out, _) in zip(pairs, self.shapes, strict=True):
            if pair is None:
                lefts.append(like.new_zeros(out, width))
                continue
            lefts.append(nn.functional.pad(pair[0], (at, width - at - pair[0].shape[1])))
            at += pair[0].shape[1]
        right = torch.cat([pair[1] for pair in pairs if pair is not None])
        rank, size = self._weights.place(self._entry) if self._cut else (0, 1)
        if self._entry.axis == 1:
            return lefts[0], right.chunk(size, 1)[rank]
        return shard(self._entry, lefts, self._weights.a, rank, size), right

    def _sum_gradient(self, tensor: Tensor) -> Tensor:
        if not self._cut:
            return tensor
        group = (
            parallel_state.get_tensor_model_parallel_group()
            if self.expert is None
            else parallel_state.get_expert_tensor_parallel_group()
        )
        found: Tensor = copy_to_tensor_model_parallel_region(tensor, group=group)
        return found

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Compute, sync and export with ``function(weight)`` in place of the stored shard.

        Its gradient passes through autograd, so the module does not add gradients to ``main_grad`` itself."""
        module: Any = self.module
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = False
        self._weights.changes[self._entry.name] = function

        def hide(module: nn.Module, args: Any) -> None:
            if not self._weights.unchanged:
                module.__dict__[self.attribute] = function(self.weight)

        def restore(module: nn.Module, args: Any, output: Any) -> None:
            module.__dict__.pop(self.attribute, None)

        module.register_forward_pre_hook(hide)
        module.register_forward_hook(restore, always_call=True)


def find_matrices(weights: Weights, chunk: nn.Module) -> Iterator[Matrix]:
    """Yield the matrices of a chunk's linear layers and experts, except experts that the checkpoint has in one tensor.

    Norms, embeddings, the output layer and routers are left out."""
    places = {
        id(parameter): (module, name) for module in chunk.modules() for name, parameter in module._parameters.items()
    }
    shapes = weights.checkpoint_shapes()
    for entry in weights.entries:
        held = weights.held.get(entry.name)
        gate = entry.name.endswith(".shared_experts.gate_weight")  # a linear layer in Transformers
        if held is None or held.dim() != 2 or not (entry.is_matrix or gate) or entry.layout.startswith("stacked"):
            continue
        if id(held) in places:  # not in another chunk
            yield Matrix(weights, entry, shapes, *places[id(held)])


def offer_matrices(weights: Weights, chunk: Any, on_chunk: Callable[[nn.Module], object]) -> None:
    """Let plugins change a chunk and its matrices."""
    vars(chunk)["matrices"] = list(find_matrices(weights, chunk))
    on_chunk(chunk)
    _pass_gradients(chunk)


def _pass_gradients(chunk: Any) -> None:
    """Make the output of a frozen embedding require a gradient; otherwise recomputed layers would get none.

    Megatron-Core recomputes in an autograd function whose output requires a gradient only if its input does."""
    embedding: nn.Module | None = getattr(chunk, "embedding", None)
    if embedding is None or any(p.requires_grad for p in embedding.parameters()):
        return

    def require_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    embedding.register_forward_hook(require_gradient)


def added_state(weights: Weights, chunk: nn.Module) -> dict[str, ShardedTensor]:
    """Return the sharded state of the parameters that plugins added to a chunk: name in the chunk -> tensor with its name in the whole model."""
    known = {id(parameter): (name, replica) for name, (parameter, replica) in weights.added_parameters.items()}
    found = {}
    for local, parameter in chunk.named_parameters():
        if id(parameter) in known:
            name, replica = known[id(parameter)]
            found[local] = ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, *replica))
    return found
