"""Layouts of this trainer for ``miles plan --search``: the entry point ``trainer.megatron`` of ``miles_planner``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles_core.plugin import CheckpointError, Facts
from miles_megatron import families
from miles_megatron.architecture import Architecture
from miles_megatron.memory import Work, fits, peak
from miles_megatron.sizes import Sizes, candidates, misfits, sizes_of
from miles_megatron.usage import change_sizes, usages_of
from miles_megatron.work import work_of
from miles_planner import TrainerLayout

#: Tokens per micro-batch to try if ``--max-tokens-per-gpu`` is not set.
_TOKENS = (8192, 16384, 32768)
#: Context-parallel sizes to try.
_CONTEXT = (1, 2, 4, 8)
#: Options that save memory, cheapest first: (options, changes of the work). The first one keeps the user's options; the others do not
#: override them.
_SAVINGS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"megatron.recompute_granularity": "full"}, {"recompute": "full"}),
    (
        {
            "megatron.recompute_granularity": "full",
            "megatron.optimizer_cpu_offload": True,
            "megatron.use_precision_aware_optimizer": True,
        },
        {"recompute": "full", "offloaded": 1.0, "kept": 0.0, "state": 12.0},
    ),
)


def read(facts: Facts, model: Mapping[str, Any]) -> TrainerLayout | None:
    """Implements ``miles_planner.layout.TrainerPlanner``."""
    a, s = _architecture(model), sizes_of(facts)
    if a is None or any(misfits(s, a)):
        return None
    return _layout(facts, a, s, work_of(facts, s), {})


def find(facts: Facts, model: Mapping[str, Any], ranks: int, budget: float) -> Iterator[TrainerLayout]:
    """Implements ``miles_planner.layout.TrainerPlanner``: each layout with the cheapest savings under which it fits.

    Sizes that the user set and that ``candidates`` does not propose (other stages, virtual stages) are a layout too."""
    a = _architecture(model)
    if a is None:
        return
    old = sizes_of(facts)
    given, context = facts.lookup("train.max_tokens_per_gpu"), facts.lookup("megatron.context_parallel_size")
    limits = (0,) if given.chosen or facts.lookup("train.micro_batch_size").chosen else _TOKENS
    for cp in (n for n in ((old.cp,) if context.chosen else _CONTEXT) if not ranks % n):
        start = Sizes(ranks=ranks, cp=cp)
        works = [(limit, _work(facts, start, limit)) for limit in limits]
        savings = {work: [(options, replace(work, **fields)) for options, fields in _SAVINGS] for _, work in works}
        for s in dict.fromkeys((*candidates(start, a, (cp,)), *_typed(replace(old, ranks=ranks), a, cp))):
            for limit, work in works:
                if work.limit * cp >= 2 * max(work.longest, work.limit) and cp > 1 and not context.chosen:
                    continue  # a smaller context-parallel size holds as many tokens
                fitting = _cheapest(a, s, savings[work], budget)
                if fitting is not None:
                    saved, changes = fitting
                    changes = {**change_sizes(old, s), **changes}
                    if limit:
                        changes["train.max_tokens_per_gpu"] = limit
                    yield _layout(facts, a, s, saved, changes)


def explain(facts: Facts, model: Mapping[str, Any], ranks: int) -> str:
    """Implements ``miles_planner.layout.TrainerPlanner``."""
    try:
        a = families.read(model)
    except CheckpointError as error:
        return str(error)
    start = Sizes(ranks=ranks)
    least = replace(_work(facts, start, 0), **_SAVINGS[-1][1])
    peaks = [(peak(a, s, least.split_over(s)), s) for s in candidates(start, a)]
    if not peaks:
        return f"no parallel sizes divide {ranks} ranks, {a.layers} layers and {a.heads} heads"
    smallest, sizes = min(peaks, key=lambda pair: pair[0])
    return (
        f"the smallest of {len(peaks)} layouts on {ranks} ranks needs {smallest / 1e9:,.0f} GB on a GPU of "
        f"{facts.value('gpu.memory_gb')} GB, with recomputation and the optimizer on the host ({sizes.flags()})"
    )


def _typed(s: Sizes, a: Architecture, cp: int) -> tuple[Sizes, ...]:
    """Return the sizes that the options set, if they have this context-parallel size and divide."""
    return (s,) if s.cp == cp and not any(misfits(s, a)) else ()


def _architecture(model: Mapping[str, Any]) -> Architecture | None:
    try:
        return families.read(model)
    except CheckpointError:
        return None


def _work(facts: Facts, s: Sizes, limit: int) -> Work:
    work = work_of(facts, s)
    return replace(work, limit=limit).split_over(s) if limit else work


def _cheapest(
    a: Architecture, s: Sizes, savings: Sequence[tuple[dict[str, Any], Work]], budget: float
) -> tuple[Work, dict[str, Any]] | None:
    """Return the work with the first savings under which every stage fits, and their options; None if none suffices."""
    if not fits(a, s, savings[-1][1].split_over(s), budget):
        return None
    for options, saved in savings:
        work = saved.split_over(s)
        if fits(a, s, work, budget):
            return work, options
    return None


def _layout(facts: Facts, a: Architecture, s: Sizes, work: Work, changes: Mapping[str, Any]) -> TrainerLayout:
    return TrainerLayout(
        ranks=s.ranks,
        tp=s.tp,
        pp=s.pp,
        cp=s.cp,
        ep=s.ep,
        etp=s.etp,
        virtual=s.virtual,
        stage_layers=max(s.stages(a.layers)),
        last_layers=s.stages(a.layers)[-1],
        tokens=work.tokens,
        samples=0 if work.limit else int(facts.value("train.micro_batch_size") or 0),
        recompute={"full": 1.0, "selective": 0.2}.get(work.recompute, 0.0),
        offloaded=work.offloaded,
        precision=str(facts.value("train.precision") or "bf16"),
        changes=changes,
        estimate=lambda: tuple(usages_of(facts, a, s, work)),
    )
