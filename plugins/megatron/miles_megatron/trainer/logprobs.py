"""Log-probabilities and entropies over a vocabulary that is split across tensor-parallel ranks.

Each rank computes the logits of its vocabulary rows. Ranks exchange maxima, sums and the chosen token's logit, but never logits. Only rows
that predict a trained token go through the output layer, one chunk at a time; chunks are recomputed in the backward pass.
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
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region as total,
)
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from miles_core.data import Ragged
from miles_megatron.memory import LOGITS


@dataclass(frozen=True)
class Head:
    """This rank's shard of the output layer.

    Attributes:
        weight: [rows on this rank, hidden].
        first: vocabulary index of the first row.
        vocabulary: vocabulary size of the checkpoint; rows from this index on are padding.
        group: the tensor-parallel group.
        temperature: sampling temperature.
    """

    weight: Tensor
    first: int
    vocabulary: int
    group: Any
    temperature: float


def head_on(weight: Tensor, vocabulary: int, temperature: float) -> Head:
    """Create the ``Head`` of this rank's shard of an output layer."""
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    return Head(weight, first, vocabulary, parallel_state.get_tensor_model_parallel_group(), temperature)


def whole_rows(hidden: Tensor, sequence: bool) -> Tensor:
    """Return [tokens, hidden] on every tensor-parallel rank. The backward pass sums the gradients of all ranks.

    Args:
        hidden: [tokens on this rank, 1, hidden] the output of the final norm.
        sequence: whether sequence parallelism splits the tokens.
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
    """Compute log-probabilities of tokens and, optionally, entropies, in nats.

    Args:
        head: this rank's shard of the output layer.
        hidden: [M, hidden], the same on all ranks of ``head.group``.
        tokens: [M] token ids.
        support: M lists of token ids, the sampling supports; an empty list means the whole vocabulary.
        entropy: also compute entropies.
        elements: maximum number of logits that exist at once.

    Returns:
        [M, 2] in FP32 (FP64 for an FP64 model): log-probabilities and entropies; entropies are 0 unless requested.
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
    """Return [M] log-sum-exp and [M] entropies (0 unless requested) over the whole vocabulary or the supports."""
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
    """Return [M, rows on this rank]: 1 where the token is in the row's support or the support is empty, else 0."""
    counts = support.offsets.diff()
    inside = (counts == 0).unsqueeze(1).to(logits.dtype).expand_as(logits).clone()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    ids = support.values.long() - head.first
    mine = (ids >= 0) & (ids < logits.shape[1])
    inside[owner[mine], ids[mine]] = 1.0
    return inside
