"""What the plan says of a Megatron run: sizes that do not divide, packages that are missing, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from miles_core import MICRO_BATCH_TOKENS, CheckpointError, Facts, Problem, Review, described
from miles_megatron import count, families
from miles_megatron.architecture import Architecture
from miles_megatron.engine_share import context, engine_share
from miles_megatron.memory import GB, USABLE, Stage, Work, memory
from miles_megatron.packages import missing
from miles_megatron.recipes import RECIPES, TILES, cuts
from miles_megatron.sizes import Sizes, candidates, misfits, ranks_of, sizes_of
from miles_megatron.trainable import lacks

#: Whether a plugin has the checkpoint's MTP layer trained.
FURTHER = "trainer.uses.further_layers"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
_SUGGESTED = 3
#: How often the ranks are doubled in the search for as many as would do.
_DOUBLED = 9


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.Plugin.review``; nothing is asked where another trainer was chosen."""
    if facts.value("trainer") != "megatron" or model is None:
        return Review()
    try:
        a = families.read(model)
    except CheckpointError as error:
        values = (described(facts.lookup("model.type")),)
        return Review(problems=(Problem("megatron", "a family it has a table for", str(error), values),))
    problems = tuple(Problem("megatron", "a model that it can build", why) for why in lacks(a))
    note, missed = _packages(facts)
    s = sizes_of(facts)
    problems += missed
    problems += tuple(
        Problem(
            "megatron",
            m.needs,
            m.because + (f"; {m.option} may be {', '.join(map(str, m.fit))}" if m.fit else ""),
            (described(facts.lookup(f"megatron.{m.option}")), ("ranks", str(s.ranks), ranks_of(facts)[1])),
            choices=(f"megatron.{m.option}",),
        )
        for m in misfits(s, a)
    )
    if any(misfits(s, a)):
        return Review(note, problems)
    problems += (*_format(facts, a, s), *_local(facts, a, s))
    if untrained := a.mtp - bool(facts.value(FURTHER)):
        note += (f"{untrained} MTP layers are not trained; an export has them as the checkpoint has",)
    fits = _fits(facts, a, s)
    return Review((*note, *fits.notes), (*problems, *fits.problems))


def _packages(facts: Facts) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """What has to be installed: a note where the plan is for other machines (``--hardware``, ``--fact megatron.ranks=N``)."""
    found = list(missing(gpu=bool(facts.value("gpu.count", 0) or facts.value("gpu.sm"))))
    if _elsewhere(facts):
        lines = ["to be installed where it runs", *(needs for needs, _ in found)]
        return (("\n  ".join(lines),) if found else ()), ()
    return (), tuple(Problem("megatron", needs, because) for needs, because in found)


def _elsewhere(facts: Facts) -> bool:
    """Whether the plan is for other machines."""
    return any(facts.lookup(name).chosen for name in ("gpu", "gpu.sm", "gpu.memory_gb", "megatron.ranks"))


def _local(facts: Facts, a: Architecture, s: Sizes) -> Iterator[Problem]:
    """What Megatron-Core's local modules, which run without a GPU, compute wrongly."""
    if a.latent is not None and s.tp > 1 and facts.value("gpu.count") == 0 and not _elsewhere(facts):
        name = "megatron.tensor_model_parallel_size"
        why = (
            "without a GPU Megatron-Core's local modules run, which do not sum over tensor-parallel ranks the gradient of the keys that all "
            "heads of latent attention share; divide by pipeline, expert or context"
        )
        values = (described(facts.lookup(name)), described(facts.lookup("gpu.count")))
        yield Problem("megatron", "--tensor-model-parallel-size 1", why, values, choices=(name,))


def _format(facts: Facts, a: Architecture, s: Sizes) -> Iterator[Problem]:
    """Why the model cannot be trained in ``--train-precision`` on the machine's GPUs."""
    name = facts.value("train.precision")
    if name == "bf16":
        return
    values = (described(facts.lookup("train.precision")), described(facts.lookup("gpu.sm")))
    tile = TILES.get(str(name))
    if tile is None:
        known = ", ".join(TILES)
        why = f"of the others it knows no tiles, in which Megatron-Core's matrices would have to be cut; {name} needs --trainer embedded"
        yield Problem("megatron", f"--train-precision bf16, {known}", why, values[:1])
        return
    if name in RECIPES and facts.value("gpu.sm") and facts.value("precision.emulated"):
        why = "on a GPU TransformerEngine multiplies codes; without its tensor cores --trainer embedded emulates them"
        yield Problem("megatron", f"a GPU with {name} tensor cores, or no GPU at all", why, values)
    if facts.value("gpu.sm") and facts.value(f"{name}.transformer_impl") == "local":
        why = "the local modules are for machines without a GPU; on one TransformerEngine computes in this format"
        flag = (described(facts.lookup(f"{name}.transformer_impl")),)
        yield Problem("megatron", "--transformer-impl transformer_engine", why, flag)
    if a.mlp_bias:
        why = (
            f"a {a.family} checkpoint joins all experts of a layer in one tensor, which this trainer does not quantise"
        )
        yield Problem("megatron", "--train-precision bf16", why, values[:1])
    size = facts.value("int4.group_size") if name == "int4" else None
    rows, columns = tile[0], int(size or tile[1])
    for needs in cuts(a, s, (rows, columns)):
        why = f"a tile of {rows} x {columns} would reach into another projection's rows or another rank's part"
        yield Problem("megatron", needs, why, values[:1])


def work_of(facts: Facts, s: Sizes) -> Work:
    """What a step computes, as the options say it."""

    def value(name: str, default: Any) -> Any:
        found = facts.value(name)
        return default if found in (None, "") else found

    full = _width(facts) == 4
    longest = context(facts)[0]
    counted = value("train.micro_batch_size", 0) and not value("train.use_dynamic_batch_size", False)
    rollout = value("rollout.batch_size", 1) * value("rollout.n_samples_per_prompt", 1)
    samples = value("train.global_batch_size", rollout // (value("train.num_steps_per_rollout", 1)))
    recompute = value(
        "megatron.recompute_granularity", "full" if value("train.activation_checkpointing", False) else ""
    )
    return Work(
        tokens=value("train.micro_batch_size", 0) * longest,
        micro_batches=1,
        step=samples * longest,
        longest=longest,
        limit=0 if counted else value("train.max_tokens_per_gpu", MICRO_BATCH_TOKENS["cuda"]),
        width=4 if full else 2,
        seen=(4 if full else 2) * (value("train.precision", "bf16") not in ("bf16", *RECIPES)),
        gradient=4 if full or value("megatron.grad_reduce_in_fp32", True) else 2,
        state=_state(facts, full),
        offloaded=value("megatron.optimizer_offload_fraction", 0.0) if value("megatron.optimizer_cpu_offload", False) else 0.0,
        recompute=recompute,
        recompute_layers=value("megatron.recompute_num_layers", 1),
        recompute_modules=tuple(str(value("megatron.recompute_modules", "core_attn")).split(",")),
        further=bool(facts.value(FURTHER)),
    ).divided(s)  # fmt: skip


def _width(facts: Facts) -> int:
    dtype = facts.value("model.dtype", "auto")
    return 4 if dtype == "float32" or (dtype == "auto" and facts.value("gpu.count", 1) == 0) else 2


def _state(facts: Facts, full: bool) -> float:
    """Bytes of the optimiser for each parameter: two moments, and a master where the parameter itself is none."""
    if not facts.value("megatron.use_precision_aware_optimizer"):
        return 8.0 if full else 12.0
    moments = sum(_BYTES[facts.value(f"megatron.{n}") or "float32"] for n in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    remainders = facts.value("megatron.store_param_remainders") is not False
    master = 2 if remainders and not full else _BYTES[facts.value("megatron.main_params_dtype") or "float32"]
    return float(moments + (0 if full else master))


def _fits(facts: Facts, a: Architecture, s: Sizes) -> Review:
    gpu = float(facts.value("gpu.memory_gb") or 0) * GB
    engine, why = engine_share(facts, a, gpu, s.ranks)
    w = work_of(facts, s)
    stages = memory(a, s, w)
    note = _note(facts, a, s, w, stages, engine, why, gpu)
    peak = max(stage.total for stage in stages) + engine
    if not gpu or peak <= USABLE * gpu:
        return Review((note,))
    found = _others(a, s, w, gpu, engine)
    because = f"{USABLE:.0%} of a GPU can be used; "
    because += f"these sizes fit: {'; '.join(found)}" if found else _on_more(a, s, w, gpu)
    x = max(stages, key=lambda stage: stage.total)
    parts = {"weights": x.weights, "gradients": x.gradients, "optimiser": x.optimiser, "activations": x.activations}
    held = " + ".join(
        f"{size / GB:.1f} {what}" for what, size in (parts | {"other": x.other, "engine": engine}).items()
    )
    values = (
        described(facts.lookup("gpu.memory_gb")),
        (f"a rank of stage {x.number}", f"{peak / GB:.1f} GB", held),
        ("ranks", str(s.ranks), ranks_of(facts)[1]),
    )
    problem = Problem("megatron", f"{peak / GB / USABLE:.0f} GB on each GPU", because, values)
    return Review((note,), (problem,))


@lru_cache(maxsize=256)
def _others(a: Architecture, s: Sizes, w: Work, gpu: float, engine: float) -> tuple[str, ...]:
    """Sizes that fit, as they are typed: as asked first, then with recomputation."""
    whole = Work(**{**vars(w), "recompute": "full", "recompute_layers": 1})
    ways = [(w, "")] if w.recompute == "full" else [(w, ""), (whole, " --recompute-granularity full")]
    fitting = (
        (c.flags() if c != s else "the same sizes") + how
        for v, how in ways
        for c in ([s] if how else []) + list(candidates(s, a))
        if max(stage.total for stage in memory(a, c, v.divided(c))) + engine <= USABLE * gpu
    )
    return tuple(islice(fitting, _SUGGESTED))


def _on_more(a: Architecture, s: Sizes, w: Work, gpu: float) -> str:
    """What to do where no sizes fit."""
    for ranks in (s.ranks << n for n in range(1, _DOUBLED)):
        if found := _others(a, replace(s, ranks=ranks), w, gpu, 0.0):
            return f"no sizes fit on {_ranks(s.ranks)}; {_ranks(ranks)} do, with {found[0]}"
    return f"no sizes fit on {_ranks(s.ranks)}, nor on {_ranks(s.ranks << _DOUBLED - 1)}: take a smaller model"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _note(
    facts: Facts, a: Architecture, s: Sizes, w: Work, stages: list[Stage], engine: float, why: str, gpu: float
) -> str:
    total, ranks = count.model(a, int(w.further)).total, f"{s.ranks} rank{'s' * (s.ranks > 1)}"
    size = f"{total / 1e9:,.3g} billion" if total > 1e7 else f"{total:,}"
    lines = [
        f"memory of a rank in GB: {a.family}, {size} parameters on {ranks} ({ranks_of(facts)[1]}); replicas: {s.dp}",
        f"  {'stage':>5}  {'layers':>6}  {'weights':>8}  {'gradients':>9}  {'optimiser':>9}  {'activations':>11}  "
        f"{'other':>6}  {'engine':>7}  {'in all':>7}",
    ]
    lines += [
        f"  {x.number:>5}  {x.layers:>6}  {x.weights / GB:>8.1f}  {x.gradients / GB:>9.1f}  {x.optimiser / GB:>9.1f}  "
        f"{x.activations / GB:>11.1f}  {x.other / GB:>6.1f}  {engine / GB:>7.1f}  {(x.total + engine) / GB:>7.1f}"
        for x in stages
    ]
    lines.append(f"  micro-batches of {w.tokens:,} tokens ({context(facts)[1]}); engine: {why}")
    lines.append(f"  the GPU has {gpu / GB:.0f} GB ({facts.lookup('gpu.memory_gb').origin})" if gpu else
                 "  no GPU here to compare with: plan for one with --hardware H200")  # fmt: skip
    return "\n".join(lines)
