"""What an engine takes of the same GPU. Imports no torch."""

from __future__ import annotations

from miles_core import Facts
from miles_megatron import count
from miles_megatron.architecture import Architecture


def engine_share(facts: Facts, a: Architecture, gpu: float, ranks: int) -> tuple[float, str]:
    """Bytes, and where the number comes from.

    Args:
        facts: of the plan.
        a: the model.
        gpu: bytes of the GPU, 0 where it is not known.
        ranks: of the trainer.
    """
    engine = facts.value("engine")
    if facts.value("runtime") != "inline" or ranks > 1:
        return 0.0, "on GPUs of its own"
    fraction = facts.value(f"{engine}.mem_fraction_static")
    if fraction is not None:
        return float(fraction) * gpu, f"{engine}.mem_fraction_static = {fraction} of the GPU"
    rows = facts.value("rollout.max_running_requests", 256) * context(facts)[0]
    weights = 2.0 * count.model(a).total
    return weights + rows * a.layers * _cached(a), f"weights in BF16 and a full cache of {rows:,} tokens"


def _cached(a: Architecture) -> float:
    """Bytes that one layer caches for a token, in BF16."""
    return 2.0 * (a.latent.kv_rank + a.latent.rope if a.latent else 2 * a.kv_size)


def context(facts: Facts) -> tuple[int, str]:
    """Tokens of the longest sample, and where the number comes from."""
    if facts.value("rollout.max_context_len"):
        return facts.value("rollout.max_context_len"), "--rollout-max-context-len"
    answer = facts.value("rollout.max_response_len", 1024)
    if facts.value("rollout.max_prompt_len"):
        return facts.value("rollout.max_prompt_len") + answer, "longest prompt and response"
    return answer + 1024, "longest response, and a prompt of 1,024 tokens (--rollout-max-prompt-len bounds it)"
