"""Plan checks of a Megatron run: parallel sizes that do not divide, and number formats that the trainer does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import CheckpointError, Facts, Problem, Review, describe_fact
from miles_megatron import families
from miles_megatron.architecture import Architecture
from miles_megatron.recipes import RECIPES, TILES, cuts
from miles_megatron.sizes import EXPERT_TENSOR, Misfit, Sizes, misfits, ranks_of, sizes_of
from miles_megatron.trainable import find_unsupported
from miles_megatron.work import MTP


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``; reports nothing for another trainer."""
    if facts.value("trainer") != "megatron" or model is None:
        return Review()
    try:
        a = families.read(model)
    except CheckpointError as error:
        values = (describe_fact(facts.lookup("model.type")),)
        return Review(problems=(Problem("megatron", "a supported model family", str(error), values),))
    problems = tuple(Problem("megatron", "a model that it can build", why) for why in find_unsupported(a))
    problems += (*_delta(facts, a), *_mtp(facts, a))
    s = sizes_of(facts)
    problems += tuple(_misfit(facts, s, found) for found in misfits(s, a))
    if any(misfits(s, a)):
        return Review(problems=problems)
    problems += (*_format(facts, a, s), *_local(facts, a, s))
    note: tuple[str, ...] = ()
    layers = a.mtp if not a.mixers else int(facts.value("model.mtp_layers") or 0)
    if untrained := layers - bool(facts.value(MTP)):
        note = (f"{untrained} MTP layers are not trained; an export contains them unchanged",)
    machine = int(facts.value("gpu.count") or 0)
    if machine and s.tp > machine:
        note += (
            f"warning: the ranks of --tensor-model-parallel-size {s.tp} are on several machines of {machine} GPUs, so that every layer waits for the "
            "network; pipeline, context and expert parallelism send less",
        )
    return Review(note, problems)


def _delta(facts: Facts, a: Architecture) -> Iterator[Problem]:
    """Report options that Megatron-Core does not support for gated delta nets."""
    if a.delta is None:
        return
    if facts.value("megatron.deterministic_mode"):
        why = "Megatron-Core's gated delta nets compute packed samples only without it"
        values = (describe_fact(facts.lookup("megatron.deterministic_mode")),)
        yield Problem("megatron", "--no-deterministic-mode", why, values, choices=("megatron.deterministic_mode",))


def _mtp(facts: Facts, a: Architecture) -> Iterator[Problem]:
    """Report training of MTP layers that this trainer only copies."""
    if a.mixers and facts.value(MTP):
        why = f"a {a.family} checkpoint stores its MTP layers outside of the decoder, in a form that this trainer does not train"
        yield Problem("megatron", "no training of MTP layers", why, (describe_fact(facts.lookup("model.mtp_layers")),))


def _misfit(facts: Facts, s: Sizes, m: Misfit) -> Problem:
    """Convert a misfit to a problem with the involved options and values that would work."""
    paths = [f"megatron.{name}" for name in m.options]
    because = f"{m.because}; {m.options[0]} may be {', '.join(map(str, m.fit))}" if m.fit else m.because
    values = [describe_fact(facts.lookup(path)) for path in paths]
    if EXPERT_TENSOR in m.options and facts.value(f"megatron.{EXPERT_TENSOR}") is None:
        values[m.options.index(EXPERT_TENSOR)] = (
            f"megatron.{EXPERT_TENSOR}",
            str(s.etp),
            "the value of tensor_model_parallel_size",
        )
    tries = [{paths[0]: value} for value in m.fit]
    tries += [{f"megatron.{name}": value for name, value in other.items()} for other in m.others]
    ranks = ("ranks", str(s.ranks), ranks_of(facts)[1])
    return Problem("megatron", m.needs, because, (*values, ranks), choices=tuple(paths), tries=lambda: tries)


def _local(facts: Facts, a: Architecture, s: Sizes) -> Iterator[Problem]:
    """Report tensor parallelism with latent attention on a CPU, where Megatron-Core's local modules compute wrong gradients."""
    without_sequence = s.tp > 1 and not s.sequence
    if a.latent is not None and without_sequence and facts.value("gpu.count") == 0 and not facts.elsewhere:
        name = "megatron.tensor_model_parallel_size"
        why = (
            "without a GPU, Megatron-Core's local modules do not sum the gradient of latent attention's shared keys over tensor-parallel "
            "ranks without --sequence-parallel; add it, or use pipeline or context parallelism"
        )
        values = (describe_fact(facts.lookup(name)), describe_fact(facts.lookup("gpu.count")))
        yield Problem("megatron", "--tensor-model-parallel-size 1", why, values, choices=(name,))


def _format(facts: Facts, a: Architecture, s: Sizes) -> Iterator[Problem]:
    """Report why the model cannot be trained in ``--train-precision`` on the machine's GPUs."""
    name = facts.value("train.precision")
    tile = TILES.get(str(name))
    if tile is None:  # BF16, or a format that the manifest does not declare
        return
    values = (describe_fact(facts.lookup("train.precision")), describe_fact(facts.lookup("gpu.sm")))
    if name in RECIPES and facts.value("gpu.sm") and facts.value("precision.emulated"):
        why = "on a GPU TransformerEngine needs tensor cores for this format; --trainer embedded emulates them"
        yield Problem("megatron", f"a GPU with {name} tensor cores, or no GPU at all", why, values)
    if facts.value("gpu.sm") and facts.value(f"{name}.transformer_impl") == "local":
        why = "the local modules are for machines without a GPU; on a GPU, TransformerEngine computes in this format"
        flag = (describe_fact(facts.lookup(f"{name}.transformer_impl")),)
        yield Problem("megatron", "--transformer-impl transformer_engine", why, flag)
    if a.mlp_bias:
        why = (
            f"a {a.family} checkpoint stores all experts of a layer in one tensor, which this trainer does not quantise"
        )
        yield Problem("megatron", "--train-precision bf16", why, values[:1])
    size = facts.value("int4.group_size") if name == "int4" else None
    rows, columns = tile[0], int(size or tile[1])
    for needs in cuts(a, s, (rows, columns)):
        why = f"a tile of {rows} x {columns} would cross into another projection's rows or another rank's shard"
        yield Problem("megatron", needs, why, values[:1])
