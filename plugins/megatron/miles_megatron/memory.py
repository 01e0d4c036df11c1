"""The memory of a rank, from sizes alone. Imports no torch.

What stays is exact: parameters, the buffer that gradients are summed in, the optimiser's moments and FP32 masters, divided among the
ranks that hold copies. Activations are counted tensor by tensor: what a layer keeps for its backward pass with an attention that
stores no scores, as in Korthikanti et al. (arXiv 2205.05198, section 4) but for gated layers, grouped-query and latent attention and
experts that are evenly loaded. A stage of a pipeline keeps as many micro-batches as there are stages after it (Narayanan et al.,
arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles_megatron import count
from miles_megatron.architecture import Architecture
from miles_megatron.count import Count
from miles_megatron.sizes import Sizes

GB = 1e9
#: Elements of logits held at once (``logprobs``), and bytes each of them takes with its copies and gradient.
LOGITS, LOGIT_BYTES = 1 << 26, 14
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers where there are several ranks.
CONTEXT, CHANNELS = 1.0 * GB, 1.0 * GB


@dataclass(frozen=True)
class Work:
    """What a run does with the model.

    Attributes:
        tokens: of a micro-batch.
        micro_batches: of an optimiser step on one replica.
        step: tokens of an optimiser step on all replicas; 0 where both numbers above are given.
        longest: tokens of the longest sample.
        limit: tokens of a micro-batch on each rank; 0 where a micro-batch is so many samples.
        width: bytes of a parameter and of an activation.
        seen: bytes more of a parameter while passes see it through the codes of a number format.
        gradient: bytes of an element of the gradient buffer.
        state: bytes of moments and masters for each parameter.
        offloaded: part of the optimiser's state that is on the CPU.
        recompute: what is computed again in the backward pass: "full", "selective" or "".
        recompute_layers: layers recomputed together with "full".
        recompute_modules: what "selective" recomputes.
        further: the checkpoint's MTP layer is trained.
    """

    tokens: int
    micro_batches: int
    width: int = 2
    seen: int = 0
    gradient: int = 4
    state: float = 12.0
    offloaded: float = 0.0
    recompute: str = ""
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    further: bool = False
    step: int = 0
    longest: int = 0
    limit: int = 0

    def divided(self, s: Sizes) -> Work:
        """The same among other ranks: context parallelism makes micro-batches longer, fewer replicas have more of them each."""
        tokens = max(self.limit * s.cp, self.longest) if self.limit else self.tokens
        return replace(self, tokens=tokens, micro_batches=max(-(-self.step // (s.dp * tokens)), 1))


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage, in bytes; all ranks of a stage are alike.

    Attributes:
        number, layers: which stage, and its decoder layers.
        weights, gradients, optimiser: what stays from step to step.
        activations: at their peak, logits and the working set of one layer's backward included.
        other: CUDA's context and NCCL.
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
        """Of the trainer, without an engine beside it."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.other


def memory(a: Architecture, s: Sizes, w: Work) -> list[Stage]:
    """Each pipeline stage; the sizes must divide."""
    found, at = [], 0
    for number, layers in enumerate(s.stages(a.layers)):
        held = _parameters(a, s, number, range(at, at + layers))
        further = w.further and number == s.pp - 1
        if further:
            held += count.mtp_layer(a)
        mine = held.split / s.tp + held.whole
        experts = held.experts / (s.ep * s.etp)
        state = w.state * (1 - w.offloaded) * (mine / (s.dp * s.cp) + experts / s.expert_dp)
        found.append(
            Stage(
                number,
                layers,
                weights=(w.width + w.seen) * (mine + experts) + w.width * (_table(a, s) if further else 0),
                gradients=w.gradient * (mine + experts),
                optimiser=state,
                activations=_activations(a, s, w, number, range(at, at + layers)),
                other=CONTEXT + (CHANNELS if s.ranks > 1 else 0),
            )
        )
        at += layers
    return found


def _table(a: Architecture, s: Sizes) -> float:
    """Elements of the copy of the embedding that an MTP layer reads where no stage has both; it is not trained."""
    return 0.0 if s.pp == 1 or a.tied else count.embedding(a).split / s.tp


def _parameters(a: Architecture, s: Sizes, number: int, layers: range) -> Count:
    """Of one stage, undivided."""
    total = Count()
    for i in layers:
        total += count.layer(a, a.sparse[i])
    first, last = number == 0, number == s.pp - 1
    if first:
        total += count.embedding(a)
    if last:
        total += Count(whole=a.hidden)
        if not a.tied or not first:
            total += count.embedding(a)
    return total


def layer_elements(a: Architecture, s: Sizes, sparse: bool, without: tuple[str, ...] = ()) -> float:
    """Elements that a layer keeps for each token on this rank, where the modules ``without`` are recomputed."""
    around = 1 / s.tp if s.sequence else 1.0  # of what tensor parallelism repeats
    inputs, outputs = 2 * a.hidden * around, 0 if "layernorm" in without else 2 * a.hidden * around
    if a.latent is not None:
        low = a.latent
        heads = a.heads / s.tp
        kept = 2 * low.q_rank + 2 * (low.kv_rank + low.rope) + heads * low.value
        if "mla_up_proj" not in without:
            kept += heads * (2 * (low.nope + low.rope) + low.nope + low.value)
    else:
        kept = (2 * a.q_size + 2 * a.kv_size) / s.tp
        kept += (a.q_size + a.kv_size) / s.tp if a.qk_norm else 0
    return inputs + outputs + kept + _feed_forward(a, s, sparse, without, around)


def _feed_forward(a: Architecture, s: Sizes, sparse: bool, without: tuple[str, ...], around: float) -> float:
    if not sparse or a.experts is None:
        return 0 if "mlp" in without else 3 * a.ffn / s.tp
    e = a.experts
    if "moe" in without:
        return 0
    activated = 2 * e.ffn if "moe_act" in without else 3 * e.ffn
    routed = around * s.etp * e.top_k * (a.hidden + activated / s.etp)
    shared = 0 if "shared_experts" in without else 3 * e.shared / s.tp
    return routed + shared + 4 * e.count * around  # scores and weights are FP32


def _activations(a: Architecture, s: Sizes, w: Work, number: int, layers: range) -> float:
    """Bytes at the peak of one rank."""
    tokens = w.tokens / s.cp
    around = 1 / s.tp if s.sequence else 1.0
    modules = w.recompute_modules if w.recompute == "selective" else ()
    kept = [layer_elements(a, s, a.sparse[i], modules) for i in layers]
    working = max((layer_elements(a, s, a.sparse[i]) for i in layers), default=0.0)
    if w.recompute == "full":
        group = max(w.recompute_layers, 1)
        working *= group
        kept = [a.hidden * around / group] * len(layers)
    flying = _in_flight(s, w, number)
    elements = flying * sum(kept) + (working if w.recompute else working / 2)
    if number == 0:
        elements += flying * a.hidden * around
    bytes_of = w.width * elements * tokens
    if number == s.pp - 1:
        bytes_of += w.width * 3 * a.hidden * tokens
        bytes_of += LOGIT_BYTES * min(LOGITS, tokens * a.vocab / s.tp)
        if w.further:  # one layer more, never recomputed as a whole; states, embedding and what the projection makes of both; its logits
            bytes_of += w.width * (layer_elements(a, s, bool(a.sparse) and a.sparse[-1]) + 6 * a.hidden) * tokens
            bytes_of += LOGIT_BYTES * min(LOGITS, tokens * a.vocab / s.tp)
    return bytes_of


def _in_flight(s: Sizes, w: Work, number: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its layers."""
    if s.virtual == 1:
        return min(s.pp - number, w.micro_batches)
    chunks = 2 * (s.pp - number - 1) + (s.virtual - 1) * s.pp + 1
    return min(chunks / s.virtual, w.micro_batches)
