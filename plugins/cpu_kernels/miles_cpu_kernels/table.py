"""The kernels as a model's table of operations: which of them a processor is suited for, and what they leave to torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from miles_cpu_kernels import kernels
from miles_cpu_kernels.attention import attention
from miles_cpu_kernels.experts import left_to_torch, small_experts
from miles_cpu_kernels.library import library
from miles_embedded import LogProbs, Operations


def compiled(before: Operations) -> Operations:
    """``before`` with the kernels in it; they call what was there before for what they do not compute.

    Raises:
        CannotCompileError: there are no kernels here.
    """
    library()
    return replace(
        before,
        norm=kernels.rms_norm,
        rotation=kernels.rotate,
        experts=before.experts if left_to_torch() else partial(small_experts, before.experts),
        log_probs=partial(_log_probs, before.log_probs),
        attention=partial(attention, before.attention),
    )


def _log_probs(before: LogProbs, logits: Tensor, tokens: Tensor) -> Tensor:
    return kernels.log_probs(logits, tokens) if kernels.takes(logits) else before(logits, tokens)
