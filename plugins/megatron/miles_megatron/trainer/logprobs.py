"""Log-probabilities and entropies over a vocabulary that tensor parallelism divides.

Each rank has the logits of its rows of the output layer; maxima, sums and the chosen token's logit are exchanged, never logits.
Only rows that predict a trained token meet the output layer, a chunk at a time; with a gradient, chunks are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region as total,
)
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from miles_core.data import Ragged
from miles_megatron.memory import LOGITS


@dataclass(frozen=True)
class Head:
    """This rank's part of the output layer.

    Attributes:
        weight: [rows here, hidden].
        first: the vocabulary's number of its first row.
        vocabulary: rows of the checkpoint's layer; those above are padding.
        group: the tensor-parallel ranks.
        temperature: of the distribution that was sampled.
    """

    weight: Tensor
    first: int
    vocabulary: int
    group: Any
    temperature: float


def head_on(weight: Tensor, vocabulary: int, temperature: float) -> Head:
    """The part of an output layer that this rank has; see ``Head``."""
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    return Head(weight, first, vocabulary, parallel_state.get_tensor_model_parallel_group(), temperature)


def whole_rows(hidden: Tensor, sequence: bool) -> Tensor:
    """[tokens here, 1, hidden] -> [tokens, hidden] on every tensor-parallel rank; in backward their gradients are summed.

    Args:
        hidden: behind the last norm.
        sequence: sequence parallelism divides the tokens.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    rows = hidden.squeeze(1)
    if sequence:
        found: Tensor = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=group)
    else:
        found = copy_to_tensor_model_parallel_region(rows, group=group)
    return found


def token_log_probs(
    head: Head, hidden: Tensor, tokens: Tensor, support: Ragged | None, entropy: bool, elements: int = LOGITS
) -> Tensor:
    """log p(token | row), and the entropy in nats.

    Args:
        head: see ``Head``.
        hidden: [M, hidden], the same on all ranks of ``head.group``.
        tokens: [M] the tokens.
        support: M lists of token ids that the sampler chose from; an empty one means all.
        entropy: also compute entropies.
        elements: bound on the logits held at once.

    Returns:
        [M, 2] in FP32 (FP64 for a model of that): log-probabilities and entropies, 0 where none were asked for.
    """
    rows = max(elements // len(head.weight), 1)
    parts = []
    for at in range(0, max(len(tokens), 1), rows):
        chosen = slice(at, at + rows)
        mine = tokens[chosen]
        lists = None if support is None else support.select(torch.arange(at, at + len(mine), device=tokens.device))
        arguments = (head, head.weight, hidden[chosen], mine, lists, entropy)
        if torch.is_grad_enabled() and len(tokens) > rows:
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk(*arguments))
    return torch.cat(parts)


def _chunk(head: Head, weight: Tensor, hidden: Tensor, tokens: Tensor, support: Ragged | None, entropy: bool) -> Tensor:
    logits = linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits if head.temperature == 1.0 else logits / head.temperature
    if head.first + len(weight) > head.vocabulary:
        logits = logits.clone()
        logits[:, max(head.vocabulary - head.first, 0) :] = -torch.inf
    here = (tokens >= head.first) & (tokens < head.first + len(weight))
    picked = logits.gather(1, torch.where(here, tokens - head.first, 0).unsqueeze(1)).squeeze(1)
    picked = total(torch.where(here, picked, 0.0), group=head.group)
    normaliser, entropies = _normaliser(head, logits, support, entropy)
    return torch.stack([picked - normaliser, entropies], 1)


def _normaliser(head: Head, logits: Tensor, support: Ragged | None, entropy: bool) -> tuple[Tensor, Tensor]:
    """[M] log of the sum of exponentials, and [M] the entropy where it is asked for, of the whole vocabulary or of a support."""
    highest = _highest(head, logits.detach().amax(1))
    weights = (logits - highest.unsqueeze(1)).exp()
    if support is not None:
        weights = weights * _within(head, logits, support)
    whole = total(weights.sum(1), group=head.group)
    normaliser = whole.log() + highest
    if not entropy:
        return normaliser, torch.zeros_like(normaliser)
    mean = total((weights * logits.masked_fill(weights == 0, 0.0)).sum(1), group=head.group) / whole
    return normaliser, normaliser - mean


def _highest(head: Head, values: Tensor) -> Tensor:
    if head.group.size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=head.group)
    return values


def _within(head: Head, logits: Tensor, support: Ragged) -> Tensor:
    """[M, rows here] 1 where a row's list has the token, or has none at all."""
    counts = support.offsets.diff()
    inside = (counts == 0).unsqueeze(1).to(logits.dtype).expand_as(logits).clone()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    ids = support.values.long() - head.first
    mine = (ids >= 0) & (ids < logits.shape[1])
    inside[owner[mine], ids[mine]] = 1.0
    return inside
