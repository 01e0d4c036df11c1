"""Log-probabilities of the trained tokens.

Only rows that predict a trained token are multiplied by ``lm_head``, in chunks of rows, which bounds the [rows, vocabulary] matrix;
with gradients, chunks are recomputed in the backward pass. Where the engine recorded the support that it sampled from, the softmax
here is restricted to the same support. Otherwise the two sides would compare different distributions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from miles_core.data.batch import Ragged
from miles_embedded.model.operations import (
    Operations,
    SupportedLogProbs,
    divide_by_temperature,
    logits_of_support,
    operations_of,
    sum_support,
)
from miles_embedded.model.parts import logits_module, text_configuration

#: Largest number of logits in memory at once; further rows are processed in chunks.
CHUNK_ELEMENTS = 1 << 26
#: Bytes of so many logits with their copies and gradient. Logits that are not converted take fewer, so a chunk has more rows.
_CHUNK_BYTES = 14 * CHUNK_ELEMENTS
#: Configuration entries that scale the logits, and the entry that caps them.
FACTORS, CAP = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier"), "final_logit_softcapping"
#: Model types whose ``logits_scaling`` is a factor instead of a divisor.
_MULTIPLIED = ("hyperclovax",)


def token_log_probs(
    model: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    support: Ragged | None = None,
    entropy: bool = False,
    chunk_elements: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(token | row), and optionally the entropy of that distribution.

    Args:
        model: a causal language model, whose head is applied here.
        hidden: [M, hidden] final hidden state of the row that predicts each token.
        tokens: [M] token ids.
        temperature: temperature of the distribution that the tokens were sampled from.
        support: for each token, the ids that the sampler chose from; an empty list means the whole vocabulary.
        entropy: also return the entropy in nats.
        chunk_elements: largest number of logits in memory at once; 0 for the default.

    Returns:
        log-probabilities [M] float32 (float64 for a float64 model), and entropies of the same shape and dtype, or None.
    """
    return head_log_probs(model, hidden, tokens, temperature, support, entropy, chunk_elements)[:2]


def head_log_probs(
    model: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    support: Ragged | None = None,
    entropy: bool = False,
    chunk_elements: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What ``token_log_probs`` returns, and the log-probabilities of further tokens from the same logits.

    Args:
        model, hidden, tokens, temperature, support, entropy, chunk_elements: as for ``token_log_probs``.
        candidates: [M, k] token ids; their probabilities are always over the whole vocabulary.

    Returns:
        [M], [M] or None, and [M, k] or None.
    """
    if not chunk_elements:
        direct = _of_logits(model, hidden, support, entropy, candidates)
        chunk_elements = CHUNK_ELEMENTS if direct is None else _CHUNK_BYTES // (2 * hidden.itemsize)
    rows = max(chunk_elements // _vocabulary(model), 1)
    if len(tokens) <= rows:
        return _chunk(model, hidden, tokens, temperature, support, entropy, candidates)
    parts = []
    for at in range(0, len(tokens), rows):
        piece = slice(at, at + rows)
        chosen = None
        if support is not None:
            chosen = support.select(torch.arange(at, min(at + rows, len(tokens)), device=support.offsets.device))
        others = None if candidates is None else candidates[piece]
        arguments = (model, hidden[piece], tokens[piece], temperature, chosen, entropy, others)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(*arguments))
    log_probs = torch.cat([p[0] for p in parts])
    return (
        log_probs,
        torch.cat([p[1] for p in parts]) if entropy else None,
        None if candidates is None else torch.cat([p[2] for p in parts]),
    )


@torch.no_grad()
def top_log_probs(
    model: nn.Module, hidden: Tensor, k: int, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most probable tokens after each row, in descending order, over the whole vocabulary.

    Args:
        model, temperature, chunk_elements: as for ``token_log_probs``.
        hidden: [M, hidden].

    Returns:
        tokens [M, k] int32 and their log-probabilities [M, k] float32.
    """
    rows = max(chunk_elements // _vocabulary(model), 1)
    tokens, found = [hidden.new_zeros(0, k, dtype=torch.int32)], [hidden.new_zeros(0, k, dtype=torch.float32)]
    for at in range(0, len(hidden), rows):
        logits = divide_by_temperature(logits_of(model, hidden[at : at + rows]).float(), temperature)
        best = _log_softmax(model, logits).topk(k, -1)
        tokens.append(best.indices.int())
        found.append(best.values)
    return torch.cat(tokens), torch.cat(found)


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Compute logits [..., vocabulary] from ``hidden`` [..., hidden], including the family's steps after ``lm_head``."""
    logits = logits_module(model)(hidden)
    config, steps = text_configuration(model), head_steps(type(model))  # type: ignore[arg-type]  # a class is hashable
    scale = _scale(config, steps)
    if scale != 1:
        logits = logits * scale
    cap = getattr(config, CAP, None) if CAP in steps else None
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _scale(config: Any, steps: frozenset[str]) -> float:
    """Return the factor on the family's logits. Most families divide by ``logits_scaling``, before or after the head."""
    scale = 1.0
    for name in steps - {CAP}:
        value = float(getattr(config, name, None) or 1.0)
        divides = name == "logits_scaling" and getattr(config, "model_type", "") not in _MULTIPLIED
        scale *= 1.0 / value if divides else value
    return scale


@cache
def head_steps(kind: type[nn.Module]) -> frozenset[str]:
    """Return the configuration entries with which this class changes its logits: those of ``FACTORS`` and ``CAP`` that its ``forward``
    uses. A multimodal model may skip a scaling that its language model applies on its own."""
    found: set[str] = set()
    for each in kind.__mro__:
        if "forward" not in vars(each):
            continue
        code = getattr(inspect.unwrap(vars(each)["forward"]), "__code__", None)
        found |= set(code.co_names if code else ())
        if "super" not in found:
            break
    return frozenset(found & {*FACTORS, CAP})


def _of_logits(
    model: nn.Module, hidden: Tensor, support: Ragged | None, entropy: bool, candidates: Tensor | None
) -> Callable[[Tensor, Tensor, float], Tensor] | None:
    """Return the method ``of_logits`` of the model's operation ``log_probs``; None if it has none, or more than its result is needed."""
    if support is not None or entropy or candidates is not None or hidden.dtype == torch.float64:
        return None
    return getattr(operations_of(model).log_probs, "of_logits", None)


def _vocabulary(model: nn.Module) -> int:
    return int(text_configuration(model).vocab_size)


def _chunk(
    model: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    support: Ragged | None,
    entropy: bool,
    candidates: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logits = logits_of(model, hidden)
    direct = _of_logits(model, hidden, support, entropy, candidates)
    if direct is not None:
        return direct(logits, tokens, temperature), None, None
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = divide_by_temperature(logits, temperature)
    others = None if candidates is None else _log_softmax(model, logits).gather(-1, candidates.long())
    return *_sampled(model, logits, tokens, support, entropy), others


def _log_softmax(model: nn.Module, logits: Tensor) -> Tensor:
    """Log-softmax whose largest entry keeps its digits near 0, where the probability of all other tokens together is read from it.

    ``logits - logsumexp(logits)`` rounds that entry to a multiple of the resolution of 1 or of the largest logit.
    """
    best, at = logits.max(-1, keepdim=True)
    others = (logits - best).scatter(-1, at, -torch.inf).exp().sum(-1, keepdim=True)
    return operations_of(model).log_softmax(logits).scatter(-1, at, -torch.log1p(others))


def _sampled(
    model: nn.Module, logits: Tensor, tokens: Tensor, support: Ragged | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    operations = operations_of(model)
    if support is None:
        return _compute_full(logits, tokens, entropy, operations)
    sampled = support.offsets.diff() > 0
    if bool(sampled.all()):
        return _compute_supported(logits, tokens, support, entropy, operations.supported_log_probs)
    log_probs, entropies = _compute_full(logits, tokens, entropy, operations)
    where = sampled.nonzero().flatten()
    narrow, narrow_entropies = _compute_supported(
        logits[where], tokens[where], support.select(where), entropy, operations.supported_log_probs
    )
    log_probs = log_probs.index_copy(0, where, narrow)
    if entropies is not None and narrow_entropies is not None:
        entropies = entropies.index_copy(0, where, narrow_entropies)
    return log_probs, entropies


def _compute_full(
    logits: Tensor, tokens: Tensor, entropy: bool, operations: Operations
) -> tuple[Tensor, Tensor | None]:
    if not entropy:
        return operations.log_probs(logits, tokens), None
    every = operations.log_softmax(logits)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)


def _compute_supported(
    logits: Tensor, tokens: Tensor, support: Ragged, entropy: bool, operation: SupportedLogProbs
) -> tuple[Tensor, Tensor | None]:
    log_probs = operation(logits, tokens, support)
    if not entropy:
        return log_probs, None
    owner, values = logits_of_support(logits, support)
    normaliser, weights, total = sum_support(owner, values, len(tokens))
    expected = torch.zeros_like(total).index_add(0, owner, weights * values) / total
    return log_probs, normaliser - expected


def scatter(values: Tensor, targets: Tensor, length: int) -> Tensor:
    """Place values [M, ...] at flat positions ``targets`` of a zero tensor [length, ...]."""
    out: Any = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=values.device)
    return out.index_copy(0, targets, values)
