"""Layouts of this engine for ``miles plan --search``: the entry point ``engine.sglang`` of ``miles_planner``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from miles_core.plugin import Facts
from miles_embedded import ModelSize, size_of
from miles_planner import EngineLayout
from miles_sglang.division import change, find_undivided
from miles_sglang.memory import (
    GB,
    Server,
    bytes_needed,
    cache_bytes_per_token,
    draft_bytes,
    free_memory,
    server_of,
    state_bytes_per_sequence,
    usage,
    weights_on_gpu,
)

#: Shares of a GPU for weights and cache to try, in hundredths.
_SHARES = range(90, 15, -5)
#: Most machines of an engine to try.
_MACHINES = 8
#: Sequences that SGLang decodes at once if ``--max-running-requests`` is not set.
_SLOTS = 256


def read(facts: Facts, model: Mapping[str, Any], gpus: int) -> EngineLayout | None:
    """Implements ``miles_planner.layout.EnginePlanner``."""
    size = size_of(facts, model)
    gpu = free_memory(facts)
    if size is None or not gpu:
        return None
    server = server_of(facts, gpu)
    if gpus % server.gpus:
        return None
    return _layout(facts, model, size, server, gpus, {})


def find(facts: Facts, model: Mapping[str, Any], gpus: int, budget: float) -> Iterator[EngineLayout]:
    """Implements ``miles_planner.layout.EnginePlanner``: for each size of an engine the largest share of a GPU that fits, or the user's.

    Engines on several machines are proposed up to twice the size of the smallest that fits: one that is full of weights has little cache."""
    size = size_of(facts, model)
    gpu = free_memory(facts)
    if size is None or not gpu:
        return
    machine, smallest, share_set = int(facts.value("gpu.count") or 8), 0, facts.lookup("sglang.mem_fraction_static")
    shares = [float(share_set.value)] if share_set.chosen else [n / 100 for n in _SHARES]
    for tp in (1 << n for n in range(12)):
        if smallest and tp > max(machine, 2 * smallest):
            return
        if tp > min(gpus, _MACHINES * machine) or gpus % tp or (tp > machine and tp % machine):
            continue
        for changes in _ways(facts, model, tp):
            changed = change(facts, changes)
            share = next((s for s in shares if _fits(changed, size, gpu, budget, s)), None)
            if share is None:
                continue
            smallest = smallest or tp
            changes = {**changes, "sglang.mem_fraction_static": share}
            changed = change(changed, {"sglang.mem_fraction_static": share})
            if facts.value("plugin.ray") and facts.value("sglang.tp_size") is None:
                changes.pop(
                    "sglang.tp_size"
                )  # it follows from --rollout-num-gpus-per-engine, which the runtime's placement sets
            yield _layout(changed, model, size, server_of(changed, gpu), gpus, changes)


def explain(facts: Facts, model: Mapping[str, Any], gpus: int) -> str:
    """Implements ``miles_planner.layout.EnginePlanner``."""
    size = size_of(facts, model)
    gpu = free_memory(facts)
    if size is None or not gpu:
        return "config.json does not determine the size of the model, or the GPU's memory is unknown"
    most = min(gpus, _MACHINES * int(facts.value("gpu.count") or 8))
    tp = max((n for n in (1 << i for i in range(12)) if n <= most and any(_ways(facts, model, n))), default=0)
    if not tp:
        return "the sizes of the model do not divide among any number of GPUs of an engine"
    share = facts.lookup("sglang.mem_fraction_static")
    most_used = float(share.value) if share.chosen else _SHARES[0] / 100
    server = server_of(change(facts, {"sglang.tp_size": tp, "sglang.mem_fraction_static": most_used}), gpu)
    if share.chosen:
        needed, held = bytes_needed(facts, size, server), server.fraction * gpu
        return (
            f"on {tp} GPUs, the most that divide the model, weights and the cache of one sequence take {needed / GB:,.0f} GB on each, and "
            f"--sglang-mem-fraction-static {share.value} gives them {held / GB:,.0f} of {gpu / GB:.0f} GB"
        )
    return (
        f"on {tp} GPUs, the most that divide the model, weights and the cache of one sequence take "
        f"{bytes_needed(facts, size, server) / GB:,.0f} GB on each, and SGLang "
        f"needs {server.reserve / GB:.0f} of its {gpu / GB:.0f} GB for activations"
    )


def _ways(facts: Facts, model: Mapping[str, Any], tp: int) -> Iterator[dict[str, Any]]:
    """Yield the options for one tensor-parallel size under which the model divides: plain, or with whole experts on each GPU if it does
    not divide otherwise; and for a latent cache the same with attention split by sequences."""
    wide: dict[str, Any] = {"sglang.tp_size": tp}
    split = {**wide, "sglang.dp_size": tp, "sglang.enable_dp_attention": True}
    for options in (wide, *([split] if tp > 1 and model.get("kv_lora_rank") else [])):
        whole = [{**options, "sglang.ep_size": tp}] if facts.value("sglang.ep_size") in (None, 1) else []
        divided = (changes for changes in (options, *whole) if not any(find_undivided(change(facts, changes), model)))
        yield from islice(divided, 1)


def _fits(facts: Facts, size: ModelSize, gpu: float, budget: float, share: float) -> bool:
    server = server_of(change(facts, {"sglang.mem_fraction_static": share}), gpu)
    return share * gpu + server.reserve <= budget and bytes_needed(facts, size, server) <= share * gpu


def _layout(
    facts: Facts, model: Mapping[str, Any], size: ModelSize, server: Server, gpus: int, changes: Mapping[str, Any]
) -> EngineLayout:
    gpu = free_memory(facts)
    each = cache_bytes_per_token(facts, size, server)
    held = weights_on_gpu(facts, size, server)
    pool = max(server.fraction * gpu - held - draft_bytes(facts, size) / server.gpus, 0.0)
    return EngineLayout(
        count=gpus // server.gpus,
        tp=server.tp,
        pp=server.pp,
        dp=server.dp,
        slots=int(facts.value("rollout.max_running_requests") or _SLOTS * server.dp),
        cache=int(pool / max(each, 1.0)) * server.dp,
        weights=held,
        token_bytes=each,
        state_bytes=state_bytes_per_sequence(size, server),
        precision=str(facts.value("rollout.precision") or "bf16"),
        changes=changes,
        estimate=lambda: tuple(usage(facts, model)),
    )
