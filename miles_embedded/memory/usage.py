"""Memory of the embedded trainer and engine on one GPU, and options that reduce it. Does not import torch.

The trainer keeps a BF16 copy of each parameter, an FP32 master, its FP32 gradient and two FP32 moments: 18 bytes (16 if the copy is
FP32 and serves as the master). Plugins that provide an optimizer set the bytes of its state (``--optimizer-state-bytes``). With
``--offload-optimizer`` masters and state are on the GPU only after the activations are freed. ``full_shard`` shards all of it across the
ranks and
gathers one decoder layer at a time, prefetching the next. Activations are counted per token as Transformers' modules keep them; with
recomputation a layer keeps its input only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_core.trainer import MICRO_BATCH_TOKENS
from miles_embedded.memory.model_size import ModelSize, model_size

#: Logits in memory at once, in elements (``model.logprobs``), and bytes per logit including copies and gradient.
LOGITS, LOGIT_BYTES = 1 << 26, 14
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers with several ranks.
CONTEXT, CHANNELS = 1.0e9, 1.0e9
#: FP32 elements per bucket of the gradient reduction (``trainer.data_parallel``).
BUCKET = 1 << 24
#: Bytes per output of a projection that a layer with a recurrence keeps (measured: 20 to 38 for gated delta nets and Mamba-2).
RECURRENT_BYTES = 28.0
#: States kept per row, as ``engine.store``; each prompt has one more.
VERSIONS = 2
#: GPUs per machine if the number is unknown.
_MACHINE = 8


@dataclass(frozen=True)
class Frozen:
    """A model whose own weights are frozen. A layer then keeps no normalised values and outputs of norms, and no inputs of its matrices, except
    those that trained additions to these matrices read.

    Attributes:
        attention, feed_forward, down: whether an addition reads the input of the attention, of the feed-forward layer, and of its last matrix.
    """

    attention: bool
    feed_forward: bool
    down: bool


@dataclass(frozen=True)
class Training:
    """Training settings of a rank.

    Attributes:
        width: bytes per parameter and activation element.
        ranks: number of data-parallel ranks.
        sharded: whether weights, gradients and optimizer states are sharded across the ranks.
        tokens: tokens per micro-batch.
        recompute: whether layers are recomputed in the backward pass.
        reference: whether there is a second, frozen model.
        state: bytes of optimizer state per weight, without the master.
        offload: whether masters and state are in host memory except during an optimizer step.
        images: largest number of features of images in a micro-batch; 0 without images.
        trains_tower: whether the tower is trained.
        frozen: what is kept of a frozen model; None if the model is trained.
        quantised: bytes of a weight's dequantised values, and for native products of its codes and those of the transposed weight.
    """

    width: int
    ranks: int
    sharded: bool
    tokens: int
    recompute: bool
    reference: bool
    state: float = 8.0
    offload: bool = False
    images: int = 0
    trains_tower: bool = False
    frozen: Frozen | None = None
    quantised: int = 0

    def optimizer(self, weights: float, activations: float) -> float:
        """Bytes of masters and optimizer state of ``weights``, as far as they exceed ``activations``, which are gone during a step."""
        held = (self.state + (4 if self.width == 2 else 0)) * weights
        return max(held - activations, 0.0) if self.offload else held

    @property
    def share(self) -> float:
        """Fraction of the model that one rank stores."""
        return 1 / self.ranks if self.sharded else 1.0


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``. A plugin that changes how a model is stored yields usages that replace these."""
    size = size_of(facts, model)
    if size is None or facts.value("model.device") == "cpu":
        return
    trains = facts.value("rollout.num_rollout") != 0 or facts.value("sft.data")  # else its model is in host memory
    if facts.value("trainer") == "embedded" and trains:
        yield trainer_usage(facts, size)
    if facts.value("engine") == "embedded":
        yield engine_usage(facts, size, shares_storage(facts))


def size_of(facts: Facts, model: Mapping[str, Any]) -> ModelSize | None:
    """Compute the sizes of the run's model; None if ``config.json`` does not determine them."""
    return model_size(model, int(facts.value("model.moe_layers") or 0), int(facts.value("model.mtp_layers") or 0))


def longest_sample(facts: Facts) -> tuple[int, str]:
    """Return the tokens of the longest sample, and the option that determines the number. Without ``--rollout-max-context-len``, responses end
    at the model's context."""
    context = int(facts.value("model.context") or 0)
    if limit := facts.value("rollout.max_context_len"):
        beyond = f"; warning: the model's context in config.json has {context:,}" if 0 < context < int(limit) else ""
        return int(limit), f"--rollout-max-context-len{beyond}"
    answer = int(facts.value("rollout.max_response_len") or 1024)
    prompt = facts.value("rollout.max_prompt_len")
    longest = answer + int(prompt or 1024)
    if 0 < context < longest:
        return context, f"the model's context, where responses end although --rollout-max-response-len is {answer:,}"
    if prompt:
        return longest, "longest prompt and response"
    return longest, "longest response, and a prompt of 1,024 tokens (--rollout-max-prompt-len bounds it)"


def wanted_rows(facts: Facts) -> int:
    """Return how many sequences one engine may decode at once: all samples of a rollout, up to the configured limit."""
    prompts = facts.value("rollout.over_sampling_batch_size") or facts.value("rollout.batch_size") or 1
    samples = int(prompts) * int(facts.value("rollout.n_samples_per_prompt") or 1)
    allowed = int(facts.value("rollout.max_running_requests") or 256)
    return allowed if facts.value("schedule") == "async" else min(allowed, samples)


def training_of(facts: Facts) -> Training:
    """Derive the training settings from the options of a run."""
    ranks = 1
    if facts.value("plugin.ray"):
        ranks = int(facts.value("ray.actor_num_nodes") or 1) * int(facts.value("ray.actor_num_gpus_per_node") or 1)
    counted = facts.value("train.micro_batch_size") and not facts.value("train.use_dynamic_batch_size")
    longest = longest_sample(facts)[0]
    limit = int(facts.value("train.max_tokens_per_gpu") or MICRO_BATCH_TOKENS["cuda"])
    tokens = int(facts.value("train.micro_batch_size")) * longest if counted else max(limit, longest)
    answer = int(facts.value("rollout.max_response_len") or 1024)  # all of a prompt may be images
    return Training(
        width=_width(facts),
        ranks=ranks,
        sharded=ranks > 1 and facts.value("embedded.sharding_strategy") != "no_shard",
        tokens=tokens,
        recompute=bool(facts.value("train.activation_checkpointing")),
        reference=bool(facts.value("algorithm.kl_loss_coef") or facts.value("algorithm.kl_coef")),
        state=float(facts.value("embedded.optimizer_state_bytes", 8.0)),
        offload=bool(facts.value("embedded.offload_optimizer")),
        images=tokens * max(longest - answer, 0) // longest if facts.value("data.media") else 0,
        trains_tower=bool(facts.value("data.media") and facts.value("embedded.train_vision_tower")),
        quantised=_quantised_bytes(facts),
    )


def _quantised_bytes(facts: Facts) -> int:
    plain, dense = facts.value("train.precision") in ("bf16", None), not facts.value("model.moe")
    wanted, dgrad = facts.value("precision.quantized_product"), dense and bool(facts.value("embedded.quantized_dgrad"))
    native = not facts.value("precision.emulated") and (wanted == "native" or (wanted == "auto" and dense))
    return 0 if plain else _width(facts) + native * (1 + dgrad)


def _width(facts: Facts) -> int:
    return 4 if facts.value("model.dtype") == "float32" else 2


def trainer_parts(size: ModelSize, how: Training) -> Parts:
    """Memory of one rank during training, in bytes."""
    tower = size.tower.parameters if size.tower and how.images else 0
    held = (size.parameters + tower) * how.share
    trained = (size.parameters + tower * how.trains_tower) * how.share
    gathered = reduced = 0.0
    if how.sharded:
        root = size.embeddings
        gathered = how.width * (root + 2 * size.layer)
        reduced = how.width * (root + size.layer) + 4 * max(root, size.layer)
    elif how.ranks > 1:
        reduced = 4 * BUCKET
    models, active = 2 if how.reference else 1, activations(size, how)
    values = 0 if how.sharded or how.frozen else how.quantised * (size.parameters - size.embeddings)
    return Parts(
        weights=models * (how.width * held + values) + gathered,
        gradients=4 * trained + reduced,
        optimizer=how.optimizer(trained, active),
        activations=active,
        other=CONTEXT + (CHANNELS if how.ranks > 1 else 0),
    )


def activations(size: ModelSize, how: Training) -> float:
    """Bytes at the peak of a forward and backward pass over one micro-batch.

    A layer keeps the FP32 inputs, the normalised values and the outputs of two norms, queries, keys and values before and after rotation, the
    attention output, and gate, up, activated gate and product of the feed-forward layer. ``Frozen`` lists what a frozen layer does not keep.
    """
    frozen = how.frozen
    outputs, inner = (4, 4) if frozen is None else (frozen.attention + frozen.feed_forward, 3 + frozen.down)
    kept = 8 * size.hidden + how.width * (outputs * size.hidden + inner * size.active_ffn)
    attended, stateful = how.width * 1.5 * size.attention / size.hidden, state_activations(size, how.width)
    if how.recompute:
        layers = size.layers * how.width * size.hidden + kept + max(attended, stateful)
    else:
        layers = size.layers * kept + size.attending * attended + size.state_layers * stateful
    logits = LOGIT_BYTES * min(LOGITS, how.tokens * size.vocab)
    text = how.tokens * (layers + 6 * how.width * size.hidden) + logits
    return float(text + how.images * _image_bytes(size, how))


def _image_bytes(size: ModelSize, how: Training) -> int:
    """Bytes per feature of an image: its pixel values, its row in place of an embedding, and what a backward pass through the tower keeps."""
    if size.tower is None:
        return 0
    kept = size.tower.activations(how.width) if how.trains_tower else 4 * size.tower.patches * size.tower.pixels
    return kept + 2 * how.width * size.hidden


def state_activations(size: ModelSize, width: int) -> float:
    """Bytes per token that a layer with a state keeps for the backward pass.

    A short convolution keeps its projections before and after it. A recurrence computes in float32; Transformers' own implementation, which runs
    where no kernels are installed, keeps several copies. Not counted: the states between tokens, which the scan of Mamba-1 keeps too.
    """
    if size.state is None:
        return 0.0
    return (RECURRENT_BYTES if size.state.recurrent else 2 * width) * size.state.parameters / size.hidden


def trainer_usage(facts: Facts, size: ModelSize, frozen: Frozen | None = None) -> Usage:
    """Memory of a rank of the embedded trainer, whose whole model is stored on the device, and trained. ``frozen`` changes the activations."""
    how = replace(training_of(facts), frozen=frozen)
    strategy = "" if how.ranks == 1 else f", {facts.value('embedded.sharding_strategy')}"
    note = (
        f"trainer: {format_billions(size.parameters)} parameters on {how.ranks} rank{'s' * (how.ranks > 1)}{strategy}; "
        f"micro-batches of {how.tokens:,} tokens ({longest_sample(facts)[1]})"
    )
    if size.tower and how.images:
        state = "trained" if how.trains_tower else "frozen"
        note += f"; a {state} tower of {format_billions(size.tower.parameters)} parameters, and up to {how.images:,} features of images"
    parts = trainer_parts(size, how)
    return Usage(
        "trainer",
        "rank",
        parts,
        parts.other,
        note=note,
        processes=how.ranks,
        fitting=lambda budget, alone: _smaller_trainer(facts, size, how, budget, alone),
    )


#: A smaller training, and the changes of options that lead to it.
_Way = tuple[Training, dict[str, Any]]


def _smaller_trainer(
    facts: Facts, size: ModelSize, how: Training, budget: float, alone: float
) -> Iterator[dict[str, Any]]:
    """Yield changes of options that reduce a rank to ``budget`` bytes, or to ``alone`` bytes on its own GPU."""
    recompute = {"train.activation_checkpointing": True}
    whole: list[_Way] = [(how, {})]
    shorter: list[_Way] = [
        (replace(how, tokens=n), {"train.max_tokens_per_gpu": n}) for n in _halves(how.tokens, longest_sample(facts)[0])
    ]
    kinds = [whole, shorter]  # changes of one kind, smallest first; of each kind the first that fits is offered
    if not how.recompute:
        again = [[(replace(w, recompute=True), {**recompute, **c}) for w, c in kind] for kind in kinds]
        kinds = [whole, again[0], shorter, again[1]]
    if how.ranks > 1 and not how.sharded:
        sharding = {"embedded.sharding_strategy": "full_shard"}
        kinds += [[(replace(w, sharded=True), {**sharding, **c}) for w, c in kind] for kind in kinds]
    first = (next((c for w, c in kind if c and trainer_parts(size, w).total <= budget), None) for kind in kinds)
    offered = [change for change in first if change is not None]
    yield from (change for change in offered if not any(other.items() < change.items() for other in offered))
    limit_there = budget if facts.value("colocate") else alone
    for ranks in (how.ranks << n for n in range(1, 9)):
        found = next(
            (
                c
                for kind in kinds
                for w, c in kind
                if trainer_parts(size, replace(w, ranks=ranks, sharded=True)).total <= limit_there
            ),
            None,
        )
        if found is not None:
            how_many = {**found, "embedded.sharding_strategy": "full_shard"}
            yield {**_on_ranks(facts, ranks, engines_gpus(facts)), **how_many}
            yield {**_on_ranks(facts, ranks, 0), **how_many, "colocate": True}
            return


def _halves(tokens: int, longest: int) -> Iterator[int]:
    """Yield half of a number of tokens, half of that and so on, down to those of the longest sample."""
    while tokens > longest:
        tokens = max(tokens // 2, longest)
        yield tokens


def format_billions(count: float) -> str:
    """Return a number of parameters with three digits, for example ``30.5 billion`` or ``1,030 billion``."""
    return f"{float(f'{count / 1e9:.3g}'):,g} billion"


def engines_gpus(facts: Facts) -> int:
    """Number of GPUs reserved for engines in a multi-process runtime."""
    if facts.value("colocate"):
        return 0
    found = facts.value("ray.rollout_num_gpus") if facts.value("plugin.ray") else None
    per_engine = facts.value("ray.rollout_num_gpus_per_engine") if facts.value("plugin.ray") else None
    return int(found or per_engine or 1)


def _on_ranks(facts: Facts, ranks: int, engines: int) -> dict[str, Any]:
    """Options that give a run this number of ranks in addition to ``engines`` GPUs for engines."""
    count = int(facts.value("gpu.count") or 0)
    each = min(max(count, _MACHINE), ranks)
    nodes, machines = -(-ranks // each), -(-(ranks + engines) // max(count, _MACHINE))
    found: dict[str, Any] = {"runtime": "ray"}
    if count < min(ranks + engines, _MACHINE):
        found["gpu.count"] = _MACHINE
    if machines > int(facts.value("gpu.machines") or 1):
        found["gpu.machines"] = machines
    return {**found, "ray.actor_num_nodes": nodes, "ray.actor_num_gpus_per_node": each}


def engine_usage(facts: Facts, size: ModelSize, shares: bool) -> Usage:
    """Memory of an embedded engine. ``shares``: it reads the trainer's weights where they are not quantised, and has no copy of them.

    A quantised weight is stored as codes if the format's native product reads them, otherwise decoded. Neither is shared with a trainer: codes of
    the engine are an addition to the trainer's weights."""
    rows, (longest, why) = wanted_rows(facts), longest_sample(facts)
    inline = facts.value("runtime") == "inline"
    plain, quantised = float(size.parameters), 0.0
    if facts.value("rollout.precision") not in ("bf16", None):
        plain, quantised = float(size.embeddings), float(size.parameters - size.embeddings)
    weights = 0.0 if shares else _width(facts) * plain
    if size.tower and facts.value("data.media") and not shares:
        weights += _width(facts) * size.tower.parameters
    weights += quantised * float(facts.value("embedded.engine_weight_bytes") or _width(facts))
    width = 1 if str(facts.value("rollout.kv_cache_dtype")).startswith("float8") else _width(facts)
    row = float(longest * size.expanded * width)
    states = size.state_bytes(_width(facts)) * (VERSIONS + 1 / int(facts.value("rollout.n_samples_per_prompt") or 1))
    row += states
    drafts = size.mtp * float(_width(facts)) if facts.value("plugin.speculative") else 0.0
    graphs = 0.0 if facts.value("embedded.disable_cuda_graph") else graph_bytes(size, rows, _width(facts))
    parts = Parts(
        weights=weights,
        draft=drafts,
        cache=rows * row,
        activations=4.0 * min(rows * size.vocab, LOGITS) + 4.0 * _width(facts) * size.hidden * longest + graphs,
        other=0.0 if inline else CONTEXT,
    )
    note = f"engine: a cache of {rows:,} sequences of {longest:,} tokens ({why}; --max-running-requests bounds the sequences)"
    if states:
        note += f"; {rows * states / 1e9:.1f} GB of it are states of layers"
    if graphs:
        note += f"; {graphs / 1e9:.1f} GB of its activations are CUDA graphs"
    if shares:
        note += "; it shares the trainer's weights"

    def find_fitting(budget: float, alone: float) -> Iterator[dict[str, Any]]:
        left = int((budget - (parts.total - parts.cache)) // row)
        if 1 <= left < rows:
            yield {"rollout.max_running_requests": left}

    return Usage("engine", "GPU", parts, parts.other, note=note, fitting=find_fitting)


def graph_rows(rows: int) -> list[int]:
    """Return the numbers of rows of the CUDA graphs that are recorded for up to ``rows`` sequences, as ``static_step.padded_rows``."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64]
    sizes += range(128, rows + 64, 64)
    return sizes[: 1 + sum(size < rows for size in sizes)]


def graph_bytes(size: ModelSize, rows: int, width: int) -> float:
    """Bytes that CUDA graphs for up to ``rows`` sequences keep while the engine is awake.

    The graphs of decode steps share one pool. Each size keeps its logits; the largest step's temporary tensors are shared: FP32 logits, and per row
    the hidden state, the norm's FP32 input, queries, keys and values, and the feed-forward layer. Passes over prompts share another pool. The
    driver's own memory for the launches is not counted.
    """
    every = graph_rows(rows)
    row = width * (2 * size.hidden + size.attention / size.hidden + 4 * size.active_ffn) + 4 * size.hidden
    prompts = prompt_tokens(size.parameters) * row
    return float(sum(every) * size.vocab * width + every[-1] * (4 * size.vocab + row) + prompts)


def prompt_tokens(parameters: float) -> int:
    """Return the tokens of the longest pass over prompts in a CUDA graph, as ``prompt_graphs.most_tokens``."""
    return int(min(8192, 8e12 / parameters))


def shares_storage(facts: Facts) -> bool:
    """Whether engine and trainer share one copy of the weights in one process."""
    here = facts.value("runtime") == "inline" and facts.value("trainer") == "embedded"
    return here and bool(facts.value("plugin.zero_copy")) and facts.value("schedule") == "sync"
