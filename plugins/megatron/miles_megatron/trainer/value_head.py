"""The value head of a critic: a module on the last hidden states of the last pipeline stage, in place of the output layer.

Every tensor-parallel rank computes all values from all rows, so the head's gradient is the same on each of them and is summed over
replicas and context-parallel ranks only. The output layer is frozen unless its weight is the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from miles_core.plugin import PluginError, Policy, Run

#: Name of the head in the last chunk.
NAME = "value_head"


def make_value_head(run: Run, policy: Policy, chunk: Any) -> nn.Module:
    """Make the head of a plugin that provides one, else a linear layer that starts at 0, as the embedded trainer does."""
    names = [name for name in run.hooks.find_provided("head") if name != "linear"]
    if names:
        made = run.hooks.make("head", names[0], run=run, policy=policy, model=chunk)
        if not isinstance(made, nn.Module):
            raise PluginError(f"the head {names[0]!r} is {made!r:.80}; make_head must return a torch.nn.Module")
        return made
    like = next(chunk.parameters())
    head = nn.Linear(chunk.config.hidden_size, 1, device=like.device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def add_head(chunk: Any, make: Callable[[nn.Module], nn.Module], tied: bool) -> None:
    """Add the head to a chunk, if it is the last one of the model.

    Args:
        chunk: Megatron-Core's model, not wrapped.
        make: makes the head for the chunk.
        tied: whether the output layer's weight is the embedding.
    """
    if not chunk.post_process:
        return
    setattr(chunk, NAME, make(chunk))
    if not tied:
        chunk.output_layer.weight.requires_grad_(False)


def values_of(head: nn.Module, hidden_states: Tensor, sources: Tensor, sequence: bool) -> Tensor:
    """Compute values [M] in FP32.

    Args:
        head: the head, [rows, hidden] -> [rows] or [rows, 1].
        hidden_states: [tokens on this rank, 1, hidden] the output of the final norm.
        sources: [M] rows whose value is wanted.
        sequence: whether sequence parallelism splits the tokens.

    Raises:
        PluginError: the head returned another shape.
    """
    rows = hidden_states.squeeze(1)
    if sequence:
        group = parallel_state.get_tensor_model_parallel_group()
        rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=group)
    found: Tensor = head(rows.index_select(0, sources).to(next(head.parameters()).dtype))
    if found.dim() == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.shape != sources.shape:
        raise PluginError(
            f"the value head {type(head).__name__} returned shape {list(found.shape)} for {len(sources)} rows; it must return one "
            "value per row"
        )
    return found if found.dtype == torch.float64 else found.float()
