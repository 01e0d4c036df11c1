"""Memory estimates of a Megatron rank for the plan, and option changes that need less memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from miles_core.plugin import CheckpointError, Facts, Parts, Usage
from miles_embedded import engines_gpus, format_billions, longest_sample
from miles_megatron import count, families
from miles_megatron.architecture import Architecture
from miles_megatron.host_memory import describe_host
from miles_megatron.memory import Stage, Work, memory, peak
from miles_megatron.sizes import Sizes, candidates, misfits, ranks_of, sizes_of
from miles_megatron.work import MTP, work_of

#: Fractions of the optimizer state in host memory to try.
_OFFLOADED = (0.25, 0.5, 0.75, 1.0)
#: Number of suggested parallel sizes for each way to save memory.
_SUGGESTED = 2
#: GPUs of a machine if their number is unknown.
_MACHINE = 8
#: Maximum number of times to double the ranks when searching for enough memory.
_DOUBLED = 9


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """Implements ``miles_core.plugin.Plugin.memory``: yields one row per pipeline stage.

    Yields nothing for another trainer, or if the parallel sizes are invalid (``review`` reports them)."""
    if facts.value("trainer") != "megatron":
        return
    try:
        a = families.read(model)
    except CheckpointError:
        return
    s = sizes_of(facts)
    if any(misfits(s, a)):
        return
    yield from usages_of(facts, a, s, work_of(facts, s))


def usages_of(facts: Facts, a: Architecture, s: Sizes, w: Work) -> Iterator[Usage]:
    """Yield one row per pipeline stage for sizes that pass ``misfits``."""
    total = count.model(a, int(bool(facts.value(MTP)))).total
    size = format_billions(total) if total > 1e7 else f"{total:,}"
    note = (
        f"trainer: {a.family}, {size} parameters on {s.ranks} rank{'s' * (s.ranks > 1)} ({ranks_of(facts)[1]}), {s.dp} replicas; "
        f"micro-batches of {w.tokens:,} tokens ({longest_sample(facts)[1]})"
    )
    if w.trained < 1:
        note += f"; adapters, counted as {w.trained:.0%} of the parameters, over a frozen base"
    if w.offloaded:
        note += f"; {w.offloaded:.0%} of the optimizer's state is in host memory"
    note += describe_host(facts, a, s, w)
    for stage in memory(a, s, w):
        label = f"rank of stage {stage.number} ({stage.layers} layers)" if s.pp > 1 else "rank"
        yield Usage(
            "trainer",
            label,
            _parts(stage),
            stage.other,
            note=note,
            processes=s.ranks,
            fitting=lambda budget, alone: _fitting(facts, a, s, w, budget),
        )


def _parts(stage: Stage) -> Parts:
    return Parts(
        weights=stage.weights,
        gradients=stage.gradients,
        optimizer=stage.optimiser,
        activations=stage.activations,
        other=stage.other,
    )


@lru_cache(maxsize=4096)
def _peak(a: Architecture, s: Sizes, w: Work) -> float:
    return peak(a, s, w.split_over(s))


def _fitting(facts: Facts, a: Architecture, s: Sizes, w: Work, budget: float) -> Iterator[dict[str, Any]]:
    """Propose option changes with which every stage fits into ``budget`` bytes: first with the same parallel sizes, then with other
    sizes, then with more ranks."""
    ways = list(_ways(w))
    for v, how in ways[1:]:
        if _peak(a, s, v) <= budget:
            yield how
    for v, how in ways:
        yield from islice(({**change_sizes(s, c), **how} for c in _others(a, s, v, budget)), _SUGGESTED)
    # more ranks with everything that saves memory, up to those that suffice without
    for ranks in (s.ranks << n for n in range(1, _DOUBLED)):
        more = replace(s, ranks=ranks)
        for v, how in (ways[0], *ways[-1:]):
            found = next((c for c in (more, *_others(a, more, v, budget)) if _fits(a, c, v, budget)), None)
            if found is not None:
                changed = {**change_sizes(s, found), **how}
                yield {**_on_ranks(facts, ranks, engines_gpus(facts)), **changed}
                if not facts.value("colocate"):
                    yield {**_on_ranks(facts, ranks, 0), **changed, "colocate": True}
                if not how:
                    return
                break


def _fits(a: Architecture, s: Sizes, w: Work, budget: float) -> bool:
    return not any(misfits(s, a)) and _peak(a, s, w) <= budget


def _ways(w: Work) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Yield variants of the work and the options for each: unchanged, with optimizer offload, with recomputation, with both."""
    yield w, {}
    whole = {"megatron.recompute_granularity": "full"}
    saving = replace(w, recompute="full", recompute_layers=1)
    fractions = [f for f in _OFFLOADED if f > w.offloaded]
    for fraction in fractions:
        yield replace(w, offloaded=fraction, kept=0.0), _offload(fraction)
    if w.recompute != "full":
        yield saving, whole
        for fraction in fractions[-1:]:
            yield replace(saving, offloaded=fraction, kept=0.0), {**whole, **_offload(fraction)}


def _offload(fraction: float) -> dict[str, Any]:
    return {
        "megatron.optimizer_cpu_offload": True,
        "megatron.optimizer_offload_fraction": fraction,
        "megatron.use_precision_aware_optimizer": True,
    }


@lru_cache(maxsize=256)
def _others(a: Architecture, s: Sizes, w: Work, budget: float) -> tuple[Sizes, ...]:
    """Return other parallel sizes for the same number of ranks that fit into ``budget`` bytes."""
    return tuple(islice((c for c in candidates(s, a) if c != s and _peak(a, c, w) <= budget), _SUGGESTED))


_OPTIONS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "virtual": "virtual_pipeline_model_parallel_size",
    "sequence": "sequence_parallel",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}


def change_sizes(old: Sizes, new: Sizes) -> dict[str, Any]:
    """Return the options that change ``old`` to ``new``; expert-tensor parallelism defaults to tensor parallelism."""
    found = {}
    for name, option in _OPTIONS.items():
        value = getattr(new, name)
        if value != getattr(old, name) or (name == "etp" and new.tp != old.tp):
            found[f"megatron.{option}"] = value or None if name in ("first", "last") else value
    return found


def _on_ranks(facts: Facts, ranks: int, engines: int) -> dict[str, Any]:
    """Return the options for ``ranks`` training ranks in addition to ``engines`` GPUs of engines."""
    if not facts.value("plugin.ray"):
        return {"megatron.ranks": ranks}
    each = int(facts.value("gpu.count") or facts.value("ray.actor_num_gpus_per_node") or 8)
    nodes, machines = max(ranks // each, 1), -(-(ranks + engines) // each)
    found = {"gpu.machines": machines} if machines > int(facts.value("gpu.machines") or 1) else {}
    return {**found, "ray.actor_num_nodes": nodes, "ray.actor_num_gpus_per_node": min(each, ranks)}
