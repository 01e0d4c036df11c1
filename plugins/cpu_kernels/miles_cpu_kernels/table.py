"""Builds a model's table of operations with the kernels that suit this processor; torch computes everything else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from miles_cpu_kernels import kernels
from miles_cpu_kernels.attention import attention
from miles_cpu_kernels.experts import left_to_torch, small_experts
from miles_cpu_kernels.library import library
from miles_embedded import LogProbs, Operations


def add_kernels(before: Operations) -> Operations:
    """Return ``before`` with the kernels; they fall back to the operations of ``before`` for unsupported arguments.

    Raises:
        CannotCompileError: the kernels cannot be compiled.
    """
    library()
    return replace(
        before,
        norm=kernels.rms_norm,
        rotation=_rotate_both,
        experts=before.experts if left_to_torch() else partial(small_experts, before.experts),
        log_probs=partial(_log_probs, before.log_probs),
        attention=partial(attention, before.attention),
    )


def _rotate_both(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.rotate(query, cosine, sine), kernels.rotate(key, cosine, sine)


def _log_probs(before: LogProbs, logits: Tensor, tokens: Tensor) -> Tensor:
    return kernels.log_probs(logits, tokens) if kernels.takes(logits) else before(logits, tokens)
