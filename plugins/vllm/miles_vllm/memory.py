"""Estimates the GPU memory of a vLLM engine, and checks that the model fits and divides among its GPUs. Imports no torch.

vLLM uses a share of each GPU (``gpu_memory_utilization``) for weights, the peak of a profiled forward pass and the cache, which fills
what is left; it does not start if the cache cannot hold one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import Facts, Parts, Problem, Usage, describe_fact
from miles_embedded import ModelSize, format_billions, longest_sample, size_of, wanted_rows

GB = 1e9
#: Fraction of a GPU's memory that vLLM may use next to a trainer in the same process, alternating with a trainer (``--colocate``), and on a GPU
#: of its own (the default of ``CacheConfig`` in vLLM 0.26).
BESIDE, ALTERNATING, ALONE = 0.4, 0.8, 0.92
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers with several GPUs.
CONTEXT, CHANNELS = 1.0 * GB, 1.0 * GB
#: Bytes of the profiled forward pass and of CUDA graphs. An assumption, as in the comparison with published recipes (``recipes_plan.py``).
_ACTIVATIONS = 8.0 * GB
_PER_ENGINE, _RANKS = "ray.rollout_num_gpus_per_engine", "vllm.tensor_parallel_size"


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """Implements ``miles_core.plugin.Plugin.memory``. Yields nothing for servers that this run did not start, or on a CPU."""
    size = _own_size(facts, model)
    if size is None:
        return
    gpu, ranks, share, origin = _gpu(facts), _ranks(facts), *_share(facts)
    held, sequence = _weights(size, ranks), _sequence(facts, size, ranks)
    rows, (longest, why) = wanted_rows(facts), longest_sample(facts)
    pool = max(share * gpu - held - _ACTIVATIONS, 0.0) if gpu else rows * sequence
    fitting = int(pool // sequence)
    enough = f"all {rows:,} of the engine's" if fitting >= rows else f"{fitting:,} of up to {rows:,}"
    note = (
        f"engine: bf16 weights on {ranks} GPU{'s' * (ranks > 1)}, {share:.2f} of each for weights, activations and cache ({origin}): the cache "
        f"is enough for {enough} concurrent sequences of maximum length ({longest:,} tokens: {why})"
    )
    asleep = CONTEXT + (CHANNELS if ranks > 1 else 0.0)
    # ``find_size_problems`` reports an engine that does not fit
    usable = math.inf if gpu and held + sequence + _ACTIVATIONS > share * gpu else 1.0
    yield Usage("engine", "GPU", Parts(weights=held, cache=pool, other=_ACTIVATIONS), asleep, usable=usable, note=note)


def find_size_problems(facts: Facts, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Report an engine whose GPUs differ from those of the runtime, a model that does not divide among them, or one that does not fit."""
    size = None if model is None else _own_size(facts, model)
    if size is None:
        return
    assert model is not None
    ranks, given = _ranks(facts), facts.value(_PER_ENGINE) if facts.value("plugin.ray") else None
    if given is not None and given != ranks:
        needs, why = f"--vllm-tensor-parallel-size {given}, the GPUs of an engine", "vLLM uses one GPU per rank"
        yield _problem(facts, needs, why, {_RANKS: given}, {_PER_ENGINE: ranks})
    if undivided := list(_undivided(model, ranks)):
        smaller = next((n for n in range(ranks - 1, 0, -1) if not ranks % n and not any(_undivided(model, n))), 1)
        needs = f"sizes that divide among the GPUs of an engine: {'; '.join(undivided)}"
        yield _problem(facts, needs, "every GPU holds an equal part of each layer", _on(facts, smaller))
    gpu, (share, origin) = _gpu(facts), _share(facts)
    needed = _weights(size, ranks) + _sequence(facts, size, ranks) + _ACTIVATIONS
    if gpu and needed > share * gpu:
        why = (
            f"weights ({format_billions(size.parameters)} parameters in bf16), activations and the cache of one sequence of "
            f"{longest_sample(facts)[0]:,} tokens take {needed / GB:.0f} GB on each of {ranks} GPUs, but vLLM may use {share * gpu / GB:.0f} GB "
            f"({share:.2f}: {origin})"
        )
        wider = [_on(facts, ranks << n) for n in range(1, 4)]
        yield _problem(facts, "an engine that fits the model", why, *wider, {"vllm.gpu_memory_utilization": ALONE})


def _own_size(facts: Facts, model: Mapping[str, Any]) -> ModelSize | None:
    if facts.value("engine") != "vllm" or facts.value("vllm.url") or facts.value("model.device") == "cpu":
        return None
    return size_of(facts, model)


def _gpu(facts: Facts) -> float:
    return float(facts.value("gpu.memory_gb") or 0) * GB


def _ranks(facts: Facts) -> int:
    given = facts.value(_PER_ENGINE) if facts.value("plugin.ray") else None
    return int(facts.value(_RANKS) or given or 1)


def _share(facts: Facts) -> tuple[float, str]:
    """Return the share of a GPU that vLLM uses, as ``build``, and its origin."""
    given = facts.value("vllm.gpu_memory_utilization")
    if given is not None:
        return float(given), f"--vllm-gpu-memory-utilization {given}"
    if facts.value("colocate"):
        return ALTERNATING, "default on a trainer's GPU"
    return (BESIDE, "default next to a trainer") if facts.value("runtime") == "inline" else (ALONE, "vLLM's default")


def _weights(size: ModelSize, ranks: int) -> float:
    return 2.0 * (size.parameters + (size.tower.parameters if size.tower else 0)) / ranks


def _sequence(facts: Facts, size: ModelSize, ranks: int) -> float:
    """Return the bytes of the longest sequence in the cache of one GPU. Ranks split KV heads and states, but not a latent."""
    width = 1.0 if str(facts.value("rollout.kv_cache_dtype")).startswith("float8") else 2.0
    cached = width * size.cached * longest_sample(facts)[0] / min(ranks, size.heads)
    return cached + size.state_bytes(2) / ranks


def _undivided(model: Mapping[str, Any], ranks: int) -> Iterator[str]:
    text = model.get("text_config")
    keys = {**model, **text} if isinstance(text, Mapping) else model
    heads, kv = (int(keys.get(name) or 0) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads % ranks:
        yield f"{heads} attention heads by {ranks}"
    if kv and not keys.get("kv_lora_rank") and kv % ranks and ranks % kv:
        yield f"{kv} heads of keys and values by {ranks}"


def _on(facts: Facts, ranks: int) -> dict[str, Any]:
    """Return the options that give an engine this number of GPUs."""
    found: dict[str, Any] = {_RANKS: ranks} if facts.value(_RANKS) or not facts.value("plugin.ray") else {}
    if not facts.value("plugin.ray"):
        return found
    rollout = facts.value("ray.rollout_num_gpus")
    return {**found, _PER_ENGINE: ranks, **({"ray.rollout_num_gpus": ranks} if rollout and rollout % ranks else {})}


def _problem(facts: Facts, needs: str, because: str, *tries: dict[str, Any]) -> Problem:
    names = (_RANKS, *([_PER_ENGINE] if facts.value("plugin.ray") else []), "gpu.memory_gb")
    return Problem(
        "vllm", needs, because, tuple(describe_fact(facts.lookup(name)) for name in names), tries=lambda: tries
    )
