"""Memory of a trainer with adapters on one GPU, for the plan. Does not import torch.

The base has one copy, in BF16 or in the codes of a number format, without gradients and optimizer states. Each parameter of an adapter has
a copy, an FP32 master, its gradient and two moments. Activations are those of a frozen model, and one layer of decoded weights. CUDA
graphs of the engine keep the memory of one module's decoded weights, once for decode steps and once for prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_embedded import Frozen, ModelSize, engine_usage, size_of, trainer_parts, trainer_usage, training_of

#: Bytes per weight of a base in a format of four bits with scales, and of other formats (groups of 16 or larger blocks).
_FOUR_BITS, _EIGHT_BITS = {"nvfp4": 0.5625, "mxfp4": 0.53125}, 1.0625
#: Pools of CUDA graphs in which a module's weights are decoded: decode steps, and passes over prompts.
_GRAPH_POOLS = 2
#: Copies of a parameter's codes while it is read and stacked.
_PARAMETER_COPIES = 2
#: Elements of an adapter per rank and weight of its matrix, times the hidden size: an upper bound for matrices with both sides of at least a third of
#: the hidden size.
_PER_WEIGHT = 4.0
#: The largest number of matrices in an attention, a dense feed-forward layer, and a sparse one without its routed experts.
_ATTENTION_MATRICES, _DENSE_MATRICES, _SHARED_MATRICES = 5, 3, 5
#: The same of a layer with a state, without and with the names of an attention's matrices.
_STATE_MATRICES = (4, 9)
#: Matrices of an expert, with gate and up joined.
_EXPERT_MATRICES = 2
#: Parts of the names of matrices in feed-forward layers, of the last ones among them, and names of an attention's matrices.
_FEED_FORWARD = ("gate", "up_", "down", "w1", "w2", "w3", "fc", "input_linear", "output_linear")
_LAST = ("down", "w2", "fc2", "fc_out", "output_linear")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``: the trainer, and an embedded engine that shares its base."""
    size = size_of(facts, model)
    if size is None or facts.value("model.device") == "cpu" or facts.value("trainer") != "embedded":
        return
    how = training_of(facts)
    trained = trainer_usage(facts, size, frozen_parts(facts))
    base, full = base_bytes(facts, size), trained.parts
    own = adapter_parameters(facts, size) * how.share
    gathered = full.weights - (2 if how.reference else 1) * how.width * size.parameters * how.share
    shared = facts.value("lora.sync") == "adapter"
    away = experts_elsewhere(facts)
    decoded = how.width * (size.layer - away * size.routed) if is_encoded(facts) else 0
    parts = Parts(
        weights=base * (1 if shared or not how.reference else 2) + how.width * own + gathered,
        gradients=4 * own,
        optimizer=how.optimizer(own, full.activations),
        activations=full.activations + decoded,
        other=full.other,
    )
    note = _note(facts, size, how.width * own + parts.gradients + parts.optimizer)
    less = full.total - parts.total
    yield replace(
        trained,
        parts=parts,
        note=note,
        replaces=True,
        fitting=lambda budget, alone: trained.fitting(budget + less, alone + less),
    )
    if facts.value("engine") == "embedded" and shares_base(facts):
        # codes of a shared base are the trainer's, too
        engine = engine_usage(facts, size, shares=True)
        graphs = is_encoded(facts) and not facts.value("embedded.disable_cuda_graph")
        active = engine.parts.activations + (_GRAPH_POOLS * how.width * module_weights(size) if graphs else 0)
        held = replace(engine.parts, weights=how.width * own, activations=active)
        saved = engine.parts.total - held.total

        def find_fitting(budget: float, alone: float) -> Iterator[Mapping[str, Any]]:
            yield from engine.fitting(budget + saved, alone + saved)

        yield replace(engine, parts=held, replaces=True, fitting=find_fitting)


def _note(facts: Facts, size: ModelSize, adapters: float) -> str:
    """Describe the trainer; ``adapters``: bytes of the adapters with gradients and optimizer state."""
    note = (
        f"trainer: adapters of rank {facts.value('lora.rank')} ({adapters / 1e9:.1f} GB with gradients and optimizer state) over a frozen base of "
        f"{size.parameters / 1e9:,.3g} billion parameters ({facts.value('train.precision')})"
    )
    if is_encoded(facts):
        host = _PARAMETER_COPIES * _code_bytes(facts) * module_weights(size)
        note += f"; the host holds one of its parameters at a time while the base is read, {host / 1e9:.1f} GB"
    if away := experts_elsewhere(facts):
        how = training_of(facts)
        each = (1 - away) * (_code_bytes(facts) * size.experts + how.width * size.routed) + trainer_parts(
            size, how
        ).other
        note += f"; its experts are divided among {facts.value('lora.base_gpus')} GPUs, and each of the others needs {each / 1e9:.1f} GB"
    return note


def shares_base(facts: Facts) -> bool:
    """Whether engine and trainer share a frozen base, plain or encoded, under separate adapters."""
    here = facts.value("runtime") == "inline" and not facts.value("colocate")
    alike = facts.value("train.precision") == facts.value("rollout.precision")
    return bool(here and alike and facts.value("lora.sync") == "adapter")


def is_encoded(facts: Facts) -> bool:
    """Whether the base is stored in a number format only."""
    return facts.value("train.precision") not in ("bf16", None) and facts.value("lora.sync") == "adapter"


def base_bytes(facts: Facts, size: ModelSize) -> float:
    """Return the bytes of the base on one rank. Codes are not divided among ranks, and those of experts may be on several
    GPUs of one process."""
    how, precision = training_of(facts), str(facts.value("train.precision"))
    if not is_encoded(facts):
        return float(how.width * size.parameters * how.share)
    experts_only = precision == "int4" and facts.value("int4.scope") == "experts"
    encoded = size.experts if experts_only else size.parameters - size.embeddings
    held = encoded - experts_elsewhere(facts) * size.experts
    return float(_code_bytes(facts) * held + how.width * (size.parameters - encoded))


def experts_elsewhere(facts: Facts) -> float:
    """Return the fraction of the experts whose codes are not on the first GPU (``--lora-base-gpus``)."""
    return 1 - 1 / int(facts.value("lora.base_gpus") or 1)


def _code_bytes(facts: Facts) -> float:
    """Return the bytes per encoded weight, with its share of the scales."""
    precision = str(facts.value("train.precision"))
    if precision == "int4":  # BF16 scales
        return 0.5 + 2 / int(facts.value("int4.group_size") or 128)
    return _FOUR_BITS.get(precision, _EIGHT_BITS)


def module_weights(size: ModelSize) -> int:
    """Return the weights of the largest module: the experts of a layer, or about a third of a dense layer."""
    return size.routed or max(size.dense // 3, size.attention // 3)


def frozen_parts(facts: Facts) -> Frozen:
    """Return which inputs adapters read. Joined experts need all of theirs: they compute with the sum of a weight and its adapter."""
    every, experts, mixers, inner = _targets(facts)
    last = {name for name in inner if any(part in name for part in _LAST)}
    return Frozen(every or bool(mixers), every or experts or bool(inner - last), every or experts or bool(last))


def _targets(facts: Facts) -> tuple[bool, bool, set[str], set[str]]:
    """Return whether all linear layers, and whether experts get an adapter; names of matrices of attentions, and of feed-forward layers."""
    targets = str(facts.value("lora.target_modules") or "").split(",")
    names = {name.strip().rpartition(".")[2] for name in targets}
    inner = {name for name in names for part in _FEED_FORWARD if part in name}
    every, experts = "all-linear" in names, any("expert" in name for name in targets)
    return every, experts, names - inner - {"all-linear", "all-experts"}, inner


def adapter_parameters(facts: Facts, size: ModelSize) -> float:
    """Return an upper bound on the adapters' parameters: those of every matrix that a target may name."""
    every, experts, mixers, inner = _targets(facts)
    parts: list[tuple[int, int, int]] = []  # layers, weights and matrices of each
    if every or mixers:
        parts.append((size.attending, size.attention, _ATTENTION_MATRICES))
    if size.state and (every or mixers - {*_ATTENTION} or (mixers and size.state.attention_names)):
        parts.append((size.state_layers, size.state.parameters, _STATE_MATRICES[size.state.attention_names]))
    if every or inner:
        parts.append((size.dense_layers, size.dense, _DENSE_MATRICES))
        parts.append((size.sparse_layers, size.shared, _SHARED_MATRICES))
    if experts:
        parts.append((size.sparse_layers, size.routed, _EXPERT_MATRICES * int(facts.value("model.num_experts") or 1)))
    rank = int(facts.value("lora.rank") or 1)
    return rank * sum(layers * _sides(weights, matrices, size.hidden) for layers, weights, matrices in parts)


def _sides(weights: int, matrices: int, hidden: int) -> float:
    """Return an upper estimate of the sum of the inputs and outputs of the matrices of a layer.

    It is ``hidden + weights / hidden`` for a matrix with one side of the hidden size, however narrow the other one is.
    """
    return max(_PER_WEIGHT * weights / hidden, matrices * hidden + weights / hidden) if weights else 0.0
