"""Estimates the GPU memory of a rank from sizes. Imports no torch.

The persistent memory is exact: parameters, the gradient buffer, and the optimizer's moments and FP32 masters, sharded across data-parallel
ranks. Activations are counted tensor by tensor: the tensors that a layer keeps for its backward pass with an attention that does not
store scores, as in Korthikanti et al. (arXiv 2205.05198, section 4), extended to gated MLPs, grouped-query and latent attention, and
evenly loaded experts. A pipeline stage holds one micro-batch for itself and one for each later stage (Narayanan et al., arXiv 2104.04473,
section 2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from miles_megatron import count
from miles_megatron.architecture import Architecture, Kind
from miles_megatron.count import Count
from miles_megatron.sizes import Sizes

GB = 1e9
#: Elements of logits that exist at once (``logprobs``), and bytes per element including copies and gradient.
LOGITS, LOGIT_BYTES = 1 << 26, 14
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers with several ranks.
CONTEXT, CHANNELS = 1.0 * GB, 1.0 * GB

#: Tokens of a chunk of the gated delta rule's kernels.
CHUNK = 64
#: The kinds of layers of a pipeline stage, and how many of each it has.
Layers = tuple[tuple[Kind, int], ...]


@dataclass(frozen=True)
class Work:
    """The size of an optimizer step and the memory-related options.

    Attributes:
        tokens: tokens per micro-batch.
        micro_batches: micro-batches per optimizer step on one replica.
        step: tokens per optimizer step on all replicas; 0 if ``tokens`` and ``micro_batches`` are given.
        longest: tokens of the longest sample.
        limit: maximum tokens of a micro-batch per rank; 0 if a micro-batch has a fixed number of samples.
        width: bytes of a parameter and of an activation element.
        seen: additional bytes per parameter during passes with quantised weights (the saved unquantised weights).
        gradient: bytes of an element of the gradient buffer.
        state: bytes of moments and masters per parameter.
        offloaded: fraction of the optimizer state in host memory.
        kept: bytes per parameter that stay on the GPU for the state in host memory.
        recompute: what the backward pass recomputes: "full", "selective" or "".
        recompute_layers: number of layers recomputed together with "full".
        recompute_modules: modules that "selective" recomputes.
        mtp: the checkpoint's MTP layer is trained.
        trained: parameters with gradients and optimizer state per parameter of the model; below 1 those of adapters, next to the model's.
    """

    tokens: int
    micro_batches: int
    width: int = 2
    seen: int = 0
    gradient: int = 4
    state: float = 12.0
    offloaded: float = 0.0
    kept: float = 0.0
    recompute: str = ""
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    mtp: bool = False
    trained: float = 1.0
    step: int = 0
    longest: int = 0
    limit: int = 0

    def split_over(self, s: Sizes) -> Work:
        """Return the work with ``tokens`` and ``micro_batches`` for other parallel sizes.

        Context parallelism allows longer micro-batches; with fewer replicas, each has more micro-batches."""
        tokens = max(self.limit * s.cp, self.longest) if self.limit else self.tokens
        return replace(self, tokens=tokens, micro_batches=max(-(-self.step // (s.dp * tokens)), 1))


@dataclass(frozen=True)
class Stage:
    """Memory of one rank of a pipeline stage, in bytes; all ranks of a stage need the same.

    Attributes:
        number: index of the stage.
        layers: number of its decoder layers.
        weights, gradients, optimiser: persistent memory.
        activations: peak activations, including logits and the working set of one layer's backward pass.
        other: CUDA context and NCCL buffers.
    """

    number: int
    layers: int
    weights: float
    gradients: float
    optimiser: float
    activations: float
    other: float

    @property
    def total(self) -> float:
        """Bytes of the trainer, without an engine on the same GPU."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.other


def memory(a: Architecture, s: Sizes, w: Work) -> list[Stage]:
    """Return the memory of each pipeline stage; the sizes must pass ``misfits``."""
    return [_stage(a, s, w, number, kinds) for number, kinds in enumerate(_kinds(a.kinds, tuple(s.stages(a.layers))))]


def peak(a: Architecture, s: Sizes, w: Work) -> float:
    """Return the bytes of the stage that needs most, as ``memory`` but faster for long pipelines."""
    return max(_totals(a, s, w))


def fits(a: Architecture, s: Sizes, w: Work, budget: float) -> bool:
    """Whether no stage needs more than ``budget`` bytes."""
    return all(total <= budget for total in _totals(a, s, w))


def _totals(a: Architecture, s: Sizes, w: Work) -> Iterator[float]:
    """Yield the bytes of each stage that may need most.

    Of several stages with equally many layers of each kind, the first has the most micro-batches in flight."""
    chosen: dict[tuple[Layers, bool], int] = {}
    for number, kinds in enumerate(_kinds(a.kinds, tuple(s.stages(a.layers)))):
        chosen.setdefault((kinds, 0 < number == s.pp - 1), number)
    for (kinds, _), number in chosen.items():
        yield _stage(a, s, w, number, kinds).total


@lru_cache(maxsize=4096)
def _kinds(kinds: tuple[Kind, ...], stages: tuple[int, ...]) -> tuple[Layers, ...]:
    """Return the kinds of layers of each stage. kinds: the kind of each layer; stages: the number of layers of each."""
    ends = accumulate(stages)
    counts = (Counter(kinds[end - layers : end]) for layers, end in zip(stages, ends, strict=True))
    return tuple(tuple(sorted(found.items())) for found in counts)


def _stage(a: Architecture, s: Sizes, w: Work, number: int, kinds: Layers) -> Stage:
    """Return the memory of one stage with these layers."""
    held = _parameters(a, number == 0, number == s.pp - 1, kinds)
    mtp = w.mtp and number == s.pp - 1
    if mtp:
        held += count.mtp_layer(a)
    mine = held.split / s.tp + held.whole
    experts = held.experts / (s.ep * s.etp)
    own = w.width * w.trained if w.trained < 1 else 0.0
    state = w.state * (1 - w.offloaded) + w.kept * w.offloaded
    return Stage(
        number,
        sum(layers for _, layers in kinds),
        weights=(w.width + w.seen + own) * (mine + experts) + w.width * (_table(a, s) if mtp else 0),
        gradients=w.gradient * w.trained * (mine + experts),
        optimiser=state * w.trained * (mine / (s.dp * s.cp) + experts / s.expert_dp),
        activations=_activations(a, s, w, number, kinds),
        other=CONTEXT + (CHANNELS if s.ranks > 1 else 0),
    )


def _table(a: Architecture, s: Sizes) -> float:
    """Return the elements of the untrained embedding copy for an MTP layer; 0 if the last stage has the embedding."""
    return 0.0 if s.pp == 1 or a.tied else count.embedding(a).split / s.tp


@lru_cache(maxsize=4096)
def _parameters(a: Architecture, first: bool, last: bool, kinds: Layers) -> Count:
    """Count the parameters of one stage, before tensor and expert parallelism."""
    total = Count()
    for kind, layers in kinds:
        total += count.layer(a, kind) * layers
    if first:
        total += count.embedding(a)
    if last:
        total += Count(whole=a.hidden)
        if not a.tied or not first:
            total += count.embedding(a)
    return total


def layer_elements(a: Architecture, s: Sizes, kind: Kind, without: tuple[str, ...] = ()) -> float:
    """Return the activation elements per token that a layer keeps on one rank; the modules ``without`` are recomputed."""
    around = 1 / s.tp if s.sequence else 1.0  # share of the activations outside of tensor-parallel regions
    parts = (kind.mixer != "none") + kind.feed  # each has a norm
    inputs, outputs = parts * a.hidden * around, 0 if "layernorm" in without else parts * a.hidden * around
    feed = _feed_forward(a, s, kind.sparse, without, around) if kind.feed else 0.0
    return inputs + outputs + _mixer(a, s, kind, without) + feed


def _mixer(a: Architecture, s: Sizes, kind: Kind, without: tuple[str, ...]) -> float:
    if kind.mixer == "none":
        return 0.0
    if kind.mixer == "delta":
        return _delta(a) / s.tp
    if kind.mixer == "mamba":
        return _mamba(a) / s.tp
    if a.latent is not None:
        low = a.latent
        heads = a.heads / s.tp
        kept = 2 * low.q_rank + 2 * (low.kv_rank + low.rope) + heads * low.value
        if "mla_up_proj" not in without:
            kept += heads * (2 * (low.nope + low.rope) + low.nope + low.value)
        return kept
    kept = (2 * a.q_size + 2 * a.kv_size) / s.tp
    kept += (a.q_size + a.kv_size) / s.tp if a.qk_norm else 0
    return kept + (2 * a.q_size / s.tp if a.output_gate else 0)  # the gate, and the output before it


def _delta(a: Architecture) -> float:
    """Return the activation elements per token that a gated delta net keeps: input and output of the convolution, queries and keys of
    every head of values, values, gate, the output before and after the norm and after the gate, and per head decay, its sums and beta
    (FP32), and a row of the chunk's triangular matrix."""
    assert a.delta is not None
    d = a.delta
    return 2 * (2 * d.keys + d.values) + 2 * d.value_heads * d.key_size + 5 * d.values + d.value_heads * (6 + CHUNK)


def _mamba(a: Architecture) -> float:
    """Return the activation elements per token that a Mamba-2 mixer keeps: the output of its first projection, and the gated output before and
    after its norm. The kernel computes the convolution and the states again in the backward pass (``mamba_split_conv1d_scan_combined``)."""
    assert a.mamba is not None
    d = a.mamba
    return (2 * d.inner + 2 * d.shared + d.heads) + 3 * d.inner


def _feed_forward(a: Architecture, s: Sizes, sparse: bool, without: tuple[str, ...], around: float) -> float:
    projected = 3 if a.gated else 2  # with the result of the activation
    if not sparse or a.experts is None:
        return 0 if "mlp" in without else projected * a.ffn / s.tp
    e = a.experts
    if "moe" in without:
        return 0
    activated = (projected - 1 if "moe_act" in without else projected) * e.ffn
    routed = around * s.etp * e.top_k * ((e.latent or a.hidden) + activated / s.etp)
    routed += around * e.latent  # the experts' output before the second projection
    shared = 0 if "shared_experts" in without else projected * e.shared / s.tp
    return routed + shared + 4 * e.count * around  # scores and weights are FP32


def _activations(a: Architecture, s: Sizes, w: Work, number: int, kinds: Layers) -> float:
    """Return the peak activation bytes of one rank."""
    tokens = w.tokens / s.cp
    around = 1 / s.tp if s.sequence else 1.0
    modules = w.recompute_modules if w.recompute == "selective" else ()
    working = max((layer_elements(a, s, kind) for kind, _ in kinds), default=0.0)
    if w.recompute == "full":
        group = max(w.recompute_layers, 1)
        working *= group
        kept = sum(layers for _, layers in kinds) * a.hidden * around / group
    else:
        kept = sum(layers * layer_elements(a, s, kind, modules) for kind, layers in kinds)
    flying = _in_flight(s, w, number)
    elements = flying * kept + (working if w.recompute else working / 2)
    if number == 0:
        elements += flying * a.hidden * around
    bytes_of = w.width * elements * tokens
    if number == s.pp - 1:
        bytes_of += w.width * 3 * a.hidden * tokens
        bytes_of += LOGIT_BYTES * min(LOGITS, tokens * a.vocab / s.tp)
        if w.mtp:  # the MTP layer, never recomputed as a whole; its inputs and projection; its logits
            bytes_of += w.width * (layer_elements(a, s, a.mtp_kind) + 6 * a.hidden) * tokens
            bytes_of += LOGIT_BYTES * min(LOGITS, tokens * a.vocab / s.tp)
    return bytes_of


def _in_flight(s: Sizes, w: Work, number: int) -> float:
    """Return the number of micro-batches whose activations a stage holds at once; fractional with virtual stages."""
    if s.virtual == 1:
        return min(s.pp - number, w.micro_batches)
    chunks = 2 * (s.pp - number - 1) + (s.virtual - 1) * s.pp + 1
    return min(chunks / s.virtual, w.micro_batches)
