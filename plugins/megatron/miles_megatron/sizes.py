"""Parallel sizes, and checks that they fit the model. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from miles_core.plugin import ConfigError, Facts
from miles_megatron.architecture import Architecture

#: Maximum suggested tensor-parallel size: the GPUs of one machine, because tensor parallelism communicates in every layer.
_TENSOR = 8
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes.

    Attributes:
        ranks: processes that train one policy, with one GPU each.
        tp, pp, cp, ep, etp: tensor, pipeline, context, expert and expert-tensor parallel sizes.
        virtual: model chunks per pipeline stage.
        first, last: layers of the first and the last pipeline stage; 0 if they have as many as the others.
        sequence: whether sequence parallelism is enabled.
        embedding, loss: the embedding and the output layer count as one layer each in the division among stages.
    """

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual: int = 1
    first: int = 0
    last: int = 0
    sequence: bool = False
    embedding: bool = False
    loss: bool = False

    @property
    def dp(self) -> int:
        """Number of replicas of the model."""
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Number of replicas of each expert."""
        return self.ranks // (self.etp * self.ep * self.pp)

    def stages(self, layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage; they must divide evenly."""
        if self.embedding or self.loss:
            found = [(layers + self.embedding + self.loss) // self.pp] * self.pp
            found[0] -= self.embedding
            found[-1] -= self.loss
            return found
        middle = self.pp - bool(self.first) - bool(self.last)
        each = (layers - self.first - self.last) // max(middle, 1)
        return [self.first] * bool(self.first) + [each] * middle + [self.last] * bool(self.last)

    def flags(self) -> str:
        """Return the sizes as command-line flags, without those that are 1."""
        pairs = (
            ("tensor-model-parallel", self.tp),
            ("pipeline-model-parallel", self.pp),
            ("context-parallel", self.cp),
            ("expert-model-parallel", self.ep),
        )
        found = [f"--{name}-size {value}" for name, value in pairs if value > 1]
        if self.etp != self.tp:
            found.append(f"--expert-tensor-parallel-size {self.etp}")
        if self.first:
            found.append(f"--num-layers-in-first-pipeline-stage {self.first}")
        if self.last:
            found.append(f"--num-layers-in-last-pipeline-stage {self.last}")
        found += ["--account-for-embedding-in-pipeline-split"] * self.embedding
        found += ["--account-for-loss-in-pipeline-split"] * self.loss
        return " ".join(found + ["--sequence-parallel"] * self.sequence) or "all parallel sizes 1"


@dataclass(frozen=True)
class Misfit:
    """A violated condition on the parallel sizes.

    Attributes:
        needs, because: the condition and its reason.
        options: names of the involved options; the first is the one to change.
        fit: values of the first option that would work.
        others: other changes that would work, as option -> value.
    """

    needs: str
    because: str
    options: tuple[str, ...]
    fit: tuple[int, ...] = ()
    others: tuple[Mapping[str, int], ...] = ()


def ranks_of(facts: Facts) -> tuple[int, str]:
    """Return the number of training ranks and the source of the number.

    Raises:
        ConfigError: the number is not a positive integer."""
    given = facts.lookup("megatron.ranks")
    if facts.value("megatron.ranks") is not None:
        return _number(given.value, given.origin), given.origin
    nodes, each = facts.value("ray.actor_num_nodes"), facts.value("ray.actor_num_gpus_per_node")
    if facts.value("plugin.ray") and nodes and each:
        return int(nodes) * int(each), "--actor-num-nodes x --actor-num-gpus-per-node"
    if "WORLD_SIZE" in os.environ:
        origin = "environment variable WORLD_SIZE"
        return _number(os.environ["WORLD_SIZE"], origin), origin
    return 1, "--runtime inline is one process; plan for more with --fact megatron.ranks=N"


def _number(given: object, origin: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", str(given)):
        raise ConfigError(f"{origin}: the number of training ranks is {given}; it must be a positive integer")
    return int(str(given))


def sizes_of(facts: Facts) -> Sizes:
    """Return the parallel sizes that the options configure."""

    def value(name: str, default: Any) -> Any:
        return facts.value(f"megatron.{name}") or default

    tp = value("tensor_model_parallel_size", 1)
    return Sizes(
        ranks=ranks_of(facts)[0],
        tp=tp,
        pp=value("pipeline_model_parallel_size", 1),
        cp=value("context_parallel_size", 1),
        ep=value("expert_model_parallel_size", 1),
        etp=value("expert_tensor_parallel_size", tp),
        virtual=value("virtual_pipeline_model_parallel_size", 1),
        first=value("num_layers_in_first_pipeline_stage", 0),
        last=value("num_layers_in_last_pipeline_stage", 0),
        sequence=tp > 1 and bool(value("sequence_parallel", False)),
        embedding=bool(value(_EMBEDDING, False)),
        loss=bool(value(_LOSS, False)),
    )


def misfits(s: Sizes, a: Architecture) -> Iterator[Misfit]:
    """Yield every violated condition on the parallel sizes."""
    e = a.experts
    tensor = [(a.heads, f"{a.heads} attention heads")]
    tensor += [] if a.latent else [(a.kv_heads, f"{a.kv_heads} heads of keys and values")]
    if any(kind.feed and not kind.sparse for kind in a.kinds):
        tensor.append((a.ffn, f"{a.ffn} inner units of a dense layer"))
    if e is not None and e.shared:
        tensor.append((e.shared, f"{e.shared} inner units of the shared experts"))
    for size, what in tensor:
        if size % s.tp:
            fit = tuple(n for n in divisors(s.ranks) if not any(whole % n for whole, _ in tensor))
            yield Misfit(
                f"{what} that divide by {s.tp}", "each rank holds the same number", ("tensor_model_parallel_size",), fit
            )
    block = s.tp * s.pp * s.cp
    if s.ranks % block:
        yield Misfit(
            f"{s.ranks} ranks that divide by tensor x pipeline x context = {block}", "all replicas have the same size",
            ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
            tuple(n for n in divisors(s.ranks) if not s.ranks % (n * s.tp * s.cp)),
        )  # fmt: skip
    yield from _delta(s, a)
    yield from _mamba(s, a)
    yield from _stages(s, a)
    yield from _experts(s, a)


def _delta(s: Sizes, a: Architecture) -> Iterator[Misfit]:
    if a.delta is None or "delta" not in a.mixers:
        return
    heads, both = a.delta.key_heads, s.tp * s.cp
    if heads % both:
        fit = tuple(n for n in divisors(s.ranks) if not heads % (n * s.cp))
        others = tuple({"context_parallel_size": n} for n in divisors(s.ranks) if not heads % (n * s.tp))
        yield Misfit(
            f"{heads} heads of keys of a gated delta net that divide by tensor x context = {both}",
            "each rank computes the same number of heads, for all tokens",
            ("tensor_model_parallel_size", "context_parallel_size"), fit, others,
        )  # fmt: skip
    if s.tp > 1 and not s.sequence and a.experts is None:
        yield Misfit("--sequence-parallel", "Megatron-Core sums the gradient of a gated delta net's norm over tensor-parallel ranks only with it",
                     ("sequence_parallel",), others=({"sequence_parallel": True},))  # fmt: skip


def _mamba(s: Sizes, a: Architecture) -> Iterator[Misfit]:
    if a.mamba is None or "mamba" not in a.mixers:
        return
    d, both = a.mamba, s.tp * s.cp
    for size, ranks, what, options in (
        (d.groups, s.tp, "groups of heads", ("tensor_model_parallel_size",)),
        (d.heads, both, "heads", ("tensor_model_parallel_size", "context_parallel_size")),
    ):
        if size % ranks:
            fit = tuple(n for n in divisors(s.ranks) if not d.groups % n and not d.heads % (n * s.cp))
            over = " x context" if "context" in options[-1] else ""
            yield Misfit(f"{size} {what} of Mamba-2 that divide by tensor{over} = {ranks}",
                         "each rank computes the same number of them, for all tokens", options, fit)  # fmt: skip
    if not d.groups % s.tp and (groups := d.groups // s.tp) % s.cp and s.cp % groups:
        fit = tuple(n for n in divisors(s.ranks) if not (groups % n and n % groups) and not d.heads % (n * s.tp))
        yield Misfit(f"a context-parallel size that divides {groups} groups of heads of Mamba-2, or is a multiple of them",
                     "context-parallel ranks compute different heads", ("context_parallel_size",), fit)  # fmt: skip


def _stages(s: Sizes, a: Architecture) -> Iterator[Misfit]:
    middle = (s.pp - bool(s.first) - bool(s.last)) * s.virtual
    rest = a.layers - s.first - s.last + s.embedding + s.loss
    counted = _EMBEDDING if s.embedding else _LOSS
    if (s.first or s.last) and (s.embedding or s.loss):
        yield Misfit("one way to divide the layers", "a first or last stage with its own number of layers excludes counting the "
                     "embedding or the output layer as one", (counted,), others=({counted: False},))  # fmt: skip
    elif s.virtual > 1 and s.pp == 1:
        yield Misfit("--pipeline-model-parallel-size above 1", "virtual stages subdivide pipeline stages",
                     ("virtual_pipeline_model_parallel_size",))  # fmt: skip
    elif s.pp == 1 and (s.first or s.last):
        yield Misfit("--pipeline-model-parallel-size above 1", "a pipeline has a first and a last stage",
                     ("num_layers_in_first_pipeline_stage" if s.first else "num_layers_in_last_pipeline_stage",))  # fmt: skip
    elif rest < 0 or (middle <= 0 and rest) or (middle > 0 and rest % middle):
        fit = tuple(n for n in divisors(s.ranks) if n * s.virtual <= a.layers and not a.layers % (n * s.virtual))
        first, last = (0, 0) if s.virtual > 1 or rest != a.layers else _ends(s.pp, a.layers)
        ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        yield Misfit(
            f"{rest} layers that divide among {max(middle, 0)} pipeline stages",
            "stages have the same number of layers, except for those set by --num-layers-in-first-pipeline-stage and "
            "--num-layers-in-last-pipeline-stage, or with the embedding and the output layer counted as layers "
            "(--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split)",
            ("pipeline_model_parallel_size",), fit, (ends,) if first else (),
        )  # fmt: skip


def _experts(s: Sizes, a: Architecture) -> Iterator[Misfit]:
    e = a.experts
    if e is None or not any(a.sparse):
        if s.ep > 1:
            yield Misfit("a mixture of experts", f"this {a.family} model has no experts",
                         (EXPERT,), (1,))  # fmt: skip
        return
    if e.count % s.ep:
        yield Misfit(f"{e.count} experts that divide by {s.ep}", "each rank holds the same number",
                     (EXPERT,), tuple(n for n in divisors(s.ranks) if not e.count % n))  # fmt: skip
    if e.ffn % s.etp:
        yield Misfit(f"{e.ffn} inner units of an expert that divide by {s.etp}", "each rank holds the same number",
                     (EXPERT_TENSOR,), tuple(n for n in divisors(s.ranks) if not e.ffn % n))  # fmt: skip
    if s.ranks % (s.ep * s.etp * s.pp):
        fit = tuple(n for n in divisors(s.ranks) if not s.ranks % (n * s.etp * s.pp) and not e.count % n)
        cut = [n for n in divisors(s.ranks) if not s.ranks % (s.ep * n * s.pp) and not e.ffn % n]
        yield Misfit(
            f"{s.ranks} ranks that divide by expert x expert-tensor x pipeline = {s.ep * s.etp * s.pp}",
            "every expert has the same number of replicas",
            (EXPERT, EXPERT_TENSOR, "pipeline_model_parallel_size"), fit, tuple({EXPERT_TENSOR: n} for n in cut),
        )  # fmt: skip
    if s.tp > 1 and not s.sequence:
        yield Misfit("--sequence-parallel", "Megatron-Core requires it for experts with tensor parallelism",
                     ("sequence_parallel",), others=({"sequence_parallel": True},))  # fmt: skip


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in ascending order."""
    return tuple(n for n in range(1, number + 1) if not number % n)


def candidates(s: Sizes, a: Architecture, contexts: Collection[int] = ()) -> Iterator[Sizes]:
    """Yield all valid sizes for the same number of ranks, those with less model parallelism first.

    Args:
        s: the number of ranks, and the context-parallel size.
        a: the model.
        contexts: context-parallel sizes to try; by default 1 and that of ``s``.
    """
    found = []
    experts = [n for n in divisors(s.ranks) if not a.experts.count % n] if a.experts else [1]
    for tp in (n for n in divisors(s.ranks) if n <= _TENSOR):
        for pp in (n for n in divisors(s.ranks // tp) if n <= a.layers):
            first, last = _ends(pp, a.layers)
            for cp in contexts or {1, s.cp}:
                if s.ranks % (tp * pp * cp):
                    continue
                for ep in experts:
                    for etp in {1, tp} if a.experts else [tp]:
                        made = Sizes(s.ranks, tp, pp, cp, ep, etp, first=first, last=last, sequence=tp > 1)
                        if not any(True for _ in misfits(made, a)):
                            found.append(made)
    yield from sorted(found, key=lambda c: (c.tp * c.pp * c.cp, c.pp, c.ep, c.etp))


def _ends(pp: int, layers: int) -> tuple[int, int]:
    """Return the layers of the first and the last stage: fewer than those of the others if the layers do not divide evenly, else 0."""
    if pp < 3 or not layers % pp:
        return 0, 0
    left = layers - -(-layers // pp) * (pp - 2)
    return (left - left // 2, left // 2) if left >= 2 else (0, 0)
